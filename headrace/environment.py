"""Reads environment variables, which nothing else does, and sets those of libraries and children."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config import ATTENTION_OF_VLLM
from headrace.errors import ConfigError
from headrace.knobs import knob_types

ENVIRONMENT_KNOBS = {
    "VLLM_CPU_KVCACHE_SPACE": "cpu_kv_cache_gib",
    "VLLM_API_KEY": "api_key",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "timeout_keep_alive",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
    "VLLM_ATTENTION_BACKEND": "attention_backend",
    "VLLM_PP_LAYER_PARTITION": "pp_layer_partition",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "runtime_lora_folder",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "quick_reduce_quantization",
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": "quick_reduce_max_size_mb",
}
SWITCHES = {"1": True, "true": True, "0": False, "false": False}


def knobs_from_environment(config_class: type, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values that environment variables give to fields of `config_class`. Flags win over them."""
    environ = os.environ if environ is None else environ
    kinds = knob_types(config_class)
    values: dict[str, Any] = {}
    for variable, name in ENVIRONMENT_KNOBS.items():
        text = environ.get(variable)
        if name not in kinds or text is None or (not text and name != "api_key"):
            continue  # an empty key does not count as absent: whoever sets it believes that there is a key
        if name == "attention_backend" and text.upper() in ATTENTION_OF_VLLM:
            continue
        kind = kinds[name][0]
        try:
            if kind is bool:
                values[name] = SWITCHES[text.lower()]
            else:
                values[name] = [text] if kind is list else kind(text)
        except (ValueError, KeyError):
            raise ConfigError(
                f"environment variable {variable} must be of type {kind.__name__}, got {text!r}"
            ) from None
    return values


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for measurements of this machine: HEADRACE_CACHE, or `headrace` in the user's cache folder. A
    user without a home folder, as in a container that runs under any number, gets one among the temporary folders."""
    environ = os.environ if environ is None else environ
    if given := environ.get("HEADRACE_CACHE"):
        return Path(given)
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"headrace-{os.getuid()}")


def node_secret() -> str:
    """Return the secret by which machines of one engine know each other; empty: there is none."""
    return os.environ.get("HEADRACE_SECRET", "")


def node_network() -> tuple[str, str]:
    """Return the host by which the user calls this machine for the others, and the network interface that leads to
    them; empty: not given."""
    return os.environ.get("VLLM_HOST_IP", ""), os.environ.get("GLOO_SOCKET_IFNAME", "")


def environment() -> dict[str, str]:
    """Return a copy of all environment variables, for code that examines them rather than obeys them."""
    return dict(os.environ)


LIBRARY_VARIABLES = {
    # Else OpenMP's barriers spin for milliseconds when cores are shared with another busy process. (16 tiny sequences
    # on 2 busy cores: 115 ms a step with libgomp's own default, 10 ms with this.)
    "GOMP_SPINCOUNT": "1000",
    # oneDNN keeps a compiled product for every number of tokens that it met, up to 1024 of some megabytes each. A step
    # needs one for each size of linear, which its layers share; to compile one anew takes 0.2 ms.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    # One instruction of a product and a sum, as kernels were measured: Triton 3.9 warns where nothing is said, since
    # later versions will not make it by default.
    "TRITON_DEFAULT_FP_FUSION": "1",
}


def calm_libraries() -> None:
    """Set environment variables for the libraries that compute. Call it before torch is imported.
    Child processes inherit them; what the user has set stays."""
    for name, value in LIBRARY_VARIABLES.items():
        os.environ.setdefault(name, value)


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a child process: this one's, and `extra` where the user has not set it."""
    return {**extra, **os.environ}
