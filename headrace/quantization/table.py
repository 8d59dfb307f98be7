"""Lists what serves which layout of weights, and finds in which formats a checkpoint holds its linears.

The formats are those of the checkpoint or, for an unquantized checkpoint, that of `--quantization`. Imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from headrace.config import QUANTIZATIONS
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig
from headrace.quantization.checkpoint_format import CheckpointFormat, read_format
from headrace.quantization.formats import UNQUANTIZED, LinearFormat, rounded


@dataclass(frozen=True)
class SchemeEntry:
    """Names the function that makes a Scheme, which loads torch: (format: WeightFormat, **settings) -> Scheme."""

    module: str
    function: str


SCHEMES = {
    "plain": SchemeEntry("headrace.quantization.unquantized", "unquantized"),
    "mxfp4": SchemeEntry("headrace.quantization.fp4", "mxfp4"),
    "nvfp4": SchemeEntry("headrace.quantization.fp4", "nvfp4"),
    "rounded": SchemeEntry("headrace.quantization.fp8", "fp8"),
    "pack_quantized": SchemeEntry("headrace.quantization.packed_layouts", "pack_quantized"),
    "awq": SchemeEntry("headrace.quantization.packed_layouts", "awq"),
    "gptq": SchemeEntry("headrace.quantization.packed_layouts", "gptq"),
}
"""layout of a LinearFormat -> what serves it"""
HEAD = "lm_head"


def resolve_format(config: ModelConfig, quantization: str | None = None) -> CheckpointFormat:
    """Return the checkpoint's format or, if it is unquantized, the one named by `quantization`. Raises
    UnsupportedModelError, naming the formats that are served, ConfigError if `quantization` is no format or contradicts
    the checkpoint."""
    given = config.quantization or {}
    method = str(given.get("quant_method", "unnamed")) if given else ""
    if given.get("kv_cache_scheme") and not given.get("config_groups", True):
        method = ""  # it is about the KV cache alone, whose scales the attention layers take
    if quantization is not None:
        wanted = QUANTIZATIONS.get(quantization)
        if wanted is None:
            raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}; got {quantization!r}")
        if method not in ("", wanted):
            raise ConfigError(
                f"quantization {quantization!r} contradicts config.json, whose quantization_config.quant_method is "
                f"{method!r}: weights that are quantized already keep their format, which needs no --quantization"
            )
        if not method:
            return CheckpointFormat("", rounded(wanted), ((HEAD, UNQUANTIZED),))
    if not method:
        return CheckpointFormat()
    found = read_format(given)
    if found.default.layout not in SCHEMES:
        raise UnsupportedModelError(
            f"config.json: quantization_config.quant_method {method!r} with {found.default.format.name} weights is not "
            "served yet"
        )
    return found


def make_scheme(linear: LinearFormat) -> Any:
    """Return a new Scheme for linears of that format, which imports its module."""
    entry = SCHEMES[linear.layout]
    return getattr(importlib.import_module(entry.module), entry.function)(linear.format, **dict(linear.settings))
