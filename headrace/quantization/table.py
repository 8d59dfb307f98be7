"""The formats in which a checkpoint may hold its linear layers, by their names in config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UnsupportedModelError
from headrace.model_config import ModelConfig


@dataclass(frozen=True)
class FormatEntry:
    name: str
    """`quant_method` in config.json's quantization_config; "" where there is none"""
    module: str
    class_name: str
    """of the Scheme: built without arguments, one for the whole model"""


FORMATS = (FormatEntry("", "headrace.quantization.unquantized", "Unquantized"),)


def resolve_format(config: ModelConfig) -> FormatEntry:
    """The checkpoint's format; raises UnsupportedModelError naming those we read."""
    name = str((config.quantization or {}).get("quant_method", "unnamed")) if config.quantization else ""
    for entry in FORMATS:
        if entry.name == name:
            return entry
    supported = ", ".join(entry.name or "none (float16, bfloat16, float32 weights)" for entry in FORMATS)
    raise UnsupportedModelError(
        f"config.json: quantization_config.quant_method {name!r} is not supported; supported: {supported}"
    )
