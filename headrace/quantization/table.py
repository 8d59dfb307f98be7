"""Which scheme serves each linear of a model: by the checkpoint's format of it, or that of `--quantization`, which is
made of plain weights on the fly. Imports no torch."""

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
    module: str
    function: str
    """that makes the Scheme"""
    options: dict[str, Any] = field(default_factory=dict)
    """what it is called with"""

    def make(self) -> Any:
        return getattr(importlib.import_module(self.module), self.function)(**self.options)


UNQUANTIZED = SchemeEntry("headrace.quantization.unquantized", "unquantized")
SCHEMES = {
    ("", PLAIN.name): UNQUANTIZED,
    ("", "fp8"): SchemeEntry("headrace.quantization.fp8", "fp8", {"per_channel": False}),
    ("", "ptpc_fp8"): SchemeEntry("headrace.quantization.fp8", "fp8", {"per_channel": True}),
}
"""(`quant_method` of config.json, empty where weights are plain; format) -> what serves it"""
HEAD = "lm_head"


def resolve_format(config: ModelConfig, quantization: str | None = None) -> CheckpointFormat:
    """The checkpoint's format, or `quantization` on the fly where its weights are plain. Raises UnsupportedModelError
    naming the formats we read, ConfigError where `quantization` is none or not the checkpoint's own."""
    given = config.quantization or {}
    method = str(given.get("quant_method", "unnamed")) if given else ""
    if given.get("kv_cache_scheme") and not given.get("config_groups", True):
        method = ""  # it speaks of the KV cache alone, whose scales the attention layers take
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


def scheme_for(held: CheckpointFormat, *names: str) -> SchemeEntry:
    """What serves the linear that a checkpoint in `held` calls so (`CheckpointFormat.format_for`)."""
    found = held.format_for(*names).name
    return UNQUANTIZED if found == PLAIN.name else SCHEMES[held.method, found]
