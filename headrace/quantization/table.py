"""Lists which scheme serves which weight format, and finds that of each linear of a model.

The format is that of the checkpoint or, for an unquantized checkpoint, that of `--quantization`. Imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from headrace.config import QUANTIZATIONS
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig
from headrace.quantization.checkpoint_format import CheckpointFormat, read_format
from headrace.quantization.formats import FORMATS, PLAIN


@dataclass(frozen=True, eq=False)
class SchemeEntry:
    """Names the function that makes a Scheme, which loads torch."""

    module: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    """its keyword arguments"""

    def make(self) -> Any:
        """Import the module and return a new Scheme."""
        return getattr(importlib.import_module(self.module), self.function)(**self.options)


UNQUANTIZED = SchemeEntry("headrace.quantization.unquantized", "unquantized")
SCHEMES = {
    ("", PLAIN.name): UNQUANTIZED,
    ("", "fp8"): SchemeEntry("headrace.quantization.fp8", "fp8", {"per_channel": False}),
    ("", "ptpc_fp8"): SchemeEntry("headrace.quantization.fp8", "fp8", {"per_channel": True}),
}
"""(`quant_method` of config.json, empty for unquantized weights; name of the format) -> what serves it"""
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
            return CheckpointFormat("", FORMATS[wanted], ((HEAD, PLAIN),))
    if not method:
        return CheckpointFormat()
    methods = {known for known, _ in SCHEMES}
    found = read_format(given) if method in methods else None
    if found is None or (found.method, found.default.name) not in SCHEMES:
        supported = ", ".join(known or "none (float16, bfloat16, float32 weights)" for known in sorted(methods))
        raise UnsupportedModelError(
            f"config.json: quantization_config.quant_method {method!r} is not supported; supported: {supported}"
        )
    return found


def scheme_for(checkpoint: CheckpointFormat, *names: str) -> SchemeEntry:
    """Return what serves a linear of the checkpoint, given its names (`CheckpointFormat.format_for`)."""
    found = checkpoint.format_for(*names).name
    return UNQUANTIZED if found == PLAIN.name else SCHEMES[checkpoint.method, found]
