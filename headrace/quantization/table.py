"""Lists what serves which layout of weights, and finds in which formats a checkpoint holds its linears.

The formats are those of the checkpoint or, for an unquantized checkpoint, that of `--quantization`. Imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from headrace.config import CHECKPOINT_WORDS, QUANTIZATIONS
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig
from headrace.quantization.checkpoint_format import read_format
from headrace.quantization.checkpoint_integers import HEAD
from headrace.quantization.formats import UNQUANTIZED, LinearFormat, rounded
from headrace.quantization.linear_rules import CheckpointFormat, left_alone


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
    "int_quantized": SchemeEntry("headrace.quantization.packed_layouts", "int_quantized"),
    "modelopt_awq": SchemeEntry("headrace.quantization.packed_layouts", "modelopt_awq"),
    "modelopt_int8": SchemeEntry("headrace.quantization.packed_layouts", "modelopt_int8"),
    "awq": SchemeEntry("headrace.quantization.packed_layouts", "awq"),
    "gptq": SchemeEntry("headrace.quantization.packed_layouts", "gptq"),
    "fp8_stored": SchemeEntry("headrace.quantization.fp8", "stored"),
    "int8": SchemeEntry("headrace.quantization.int8", "int8"),
}
"""layout of a LinearFormat -> what serves it"""
LAYOUTS = {
    "fp8": ("fp8_stored",),
    "int8": ("int8",),
    "int4": ("pack_quantized", "int_quantized", "modelopt_awq", "awq", "gptq"),
    "w8a16": ("pack_quantized", "int_quantized", "modelopt_int8", "gptq"),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
}
"""name of a format -> layouts in which checkpoints hold it"""


def resolve_format(config: ModelConfig, quantization: str | None = None) -> CheckpointFormat:
    """Return the checkpoint's formats or, if it is unquantized, the one named by `quantization`. Raises
    UnsupportedModelError for a format that is not served, ConfigError if `quantization` is no format or contradicts the
    checkpoint."""
    found = read_format(config.quantization)
    if quantization is not None and quantization not in CHECKPOINT_WORDS:
        raise ConfigError(f"quantization must be one of {', '.join(CHECKPOINT_WORDS)}; got {quantization!r}")
    if quantization is not None and not found.method:
        if quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization {quantization!r} contradicts the checkpoint, whose weights are unquantized "
                f"({config.dtype}); accepted: {', '.join(QUANTIZATIONS)}, which round them, or no --quantization"
            )
        return CheckpointFormat("", rounded(QUANTIZATIONS[quantization]), left_alone([HEAD]))
    if quantization is not None:
        found = _in_words(found, quantization)
    missing = [one for one in found.formats if one.layout not in SCHEMES]
    if missing:
        raise UnsupportedModelError(
            f"config.json: quantization_config.quant_method {found.method!r} with {missing[0]} weights is not served "
            f"yet; served: {', '.join(served_formats()) or 'unquantized weights'}"
        )
    return found


def _in_words(found: CheckpointFormat, quantization: str) -> CheckpointFormat:
    """Return `found` with a note that `quantization` is another word for it. Raises ConfigError where it is not."""
    held = [one for one in found.formats if one != UNQUANTIZED]
    if not {one.format.name for one in held} & {*CHECKPOINT_WORDS[quantization]}:
        fitting = ", ".join(word for word, names in CHECKPOINT_WORDS.items() if held[0].format.name in names)
        raise ConfigError(
            f"quantization {quantization!r} contradicts config.json: the checkpoint is {found.method}, "
            f"{' and '.join(map(str, held[:3]))}, and keeps its format; accepted: no --quantization, or {fitting}"
        )
    if quantization == found.method:
        return found
    note = f"--quantization {quantization}: the checkpoint is {found.method}, {held[0]}; it is served as that."
    return replace(found, notes=(note, *found.notes))


def served_formats() -> list[str]:
    """Return the names of the formats that checkpoints may be in."""
    return [name for name, layouts in LAYOUTS.items() if any(layout in SCHEMES for layout in layouts)]


def make_scheme(linear: LinearFormat) -> Any:
    """Return a new Scheme for linears of that format, which imports its module."""
    entry = SCHEMES[linear.layout]
    return getattr(importlib.import_module(entry.module), entry.function)(linear.format, **dict(linear.settings))
