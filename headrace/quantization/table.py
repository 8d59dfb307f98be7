"""Lists what serves which layout of weights, and finds in which formats a checkpoint holds its linears.

The formats are those of the checkpoint or, for an unquantized checkpoint, that of `--quantization`. Imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from headrace.config import CHECKPOINT_WORDS, QUANTIZATIONS
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.quantization.checkpoint_format import read_format
from headrace.quantization.checkpoint_integers import HEAD
from headrace.quantization.formats import UNQUANTIZED, LinearFormat, rounded
from headrace.quantization.linear_rules import CheckpointFormat, left_alone

_INTEGERS = ("awq", "gptq", "pack_quantized", "int_quantized", "modelopt_awq", "modelopt_int8")
SCHEMES = {
    "plain": ("unquantized", "unquantized"),
    "mxfp4": ("packed", "floats:mxfp4"),
    "nvfp4": ("packed", "floats:nvfp4"),
    "fp8_stored": ("fp8", "stored:fp8"),
    "int8": ("fp8", "stored:int8"),
    **{layout: ("packed", f"integers:{layout}") for layout in _INTEGERS},
}
"""layout of a LinearFormat -> (module of this package, which loads torch; the function in it that makes a Scheme of
(format: WeightFormat, **settings), and behind a colon the spelling that it is given too)"""


def resolve_format(config: ModelConfig, quantization: str | None = None) -> CheckpointFormat:
    """Return the checkpoint's formats or, if it is unquantized, the one named by `quantization`. Raises
    UnsupportedModelError for values that no layout holds, ConfigError if `quantization` is no format or contradicts the
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


def make_scheme(linear: LinearFormat) -> Any:
    """Return a new Scheme for linears of that format, which imports its module."""
    module, made_by = SCHEMES[linear.layout]
    function, *spelling = made_by.split(":")
    make = getattr(importlib.import_module(f"headrace.quantization.{module}"), function)
    return make(linear.format, *spelling, **dict(linear.settings))
