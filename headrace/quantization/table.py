"""The formats in which a checkpoint may hold its linear layers, by their names in config.json, and those that are made
of plain ones on the fly (`--quantization`). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.config import QUANTIZATIONS
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig


@dataclass(frozen=True)
class FormatEntry:
    name: str
    """`quant_method` in config.json's quantization_config, "" where there is none; or what `--quantization` calls it"""
    module: str
    class_name: str
    """of the Scheme: one for the whole model"""
    options: dict[str, Any] = field(default_factory=dict)
    """what it is built with"""


FORMATS = (FormatEntry("", "headrace.quantization.unquantized", "Unquantized"),)
ON_THE_FLY = (
    FormatEntry("fp8", "headrace.quantization.fp8", "Fp8", {"per_channel": False}),
    FormatEntry("ptpc_fp8", "headrace.quantization.fp8", "Fp8", {"per_channel": True}),
)


def resolve_format(config: ModelConfig, quantization: str | None = None) -> FormatEntry:
    """The checkpoint's format, or `quantization` on the fly where its weights are plain. Raises UnsupportedModelError
    naming the formats we read, ConfigError where `quantization` is none or not the checkpoint's own."""
    given = config.quantization or {}
    name = str(given.get("quant_method", "unnamed")) if given else ""
    if given.get("kv_cache_scheme") and not given.get("config_groups", True):
        name = ""  # it speaks of the KV cache alone, whose scales the attention layers take
    if quantization is not None:
        wanted = QUANTIZATIONS.get(quantization)
        if wanted is None:
            raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}; got {quantization!r}")
        if name not in ("", wanted):
            raise ConfigError(
                f"quantization {quantization!r} contradicts config.json, whose quantization_config.quant_method is "
                f"{name!r}: weights that are quantized already keep their format, which needs no --quantization"
            )
        if not name:
            return next(entry for entry in ON_THE_FLY if entry.name == wanted)
    for entry in FORMATS:
        if entry.name == name:
            return entry
    supported = ", ".join(entry.name or "none (float16, bfloat16, float32 weights)" for entry in FORMATS)
    raise UnsupportedModelError(
        f"config.json: quantization_config.quant_method {name!r} is not supported; supported: {supported}"
    )
