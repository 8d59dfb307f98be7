"""Reads how a model rotates queries and keys, from the fields of config.json. It imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.layer_parts import Rope, Temperature
from headrace.model_config import MOST, Fields, head_dim

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
"""rope_type -> the fields that it needs"""
OTHER_NAMES = {"mrope": "default", "su": "longrope"}
"""rope_type -> what it is here. Text has one position, in all sections of M-RoPE (arXiv 2409.12191)."""
NUMBERS = ("factor", "low_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
"""fields of any rope type whose quotients must have a finite logarithm"""
OTHER_FIELDS = ("high_freq_factor", "mscale", "mscale_all_dim", "attention_factor", "truncate")
"""further fields that matter to a rope type"""


def read_rope(c: Fields, layer_type: str = "", theta: float = 10000.0, share: float = 1.0) -> Rope:
    """Return how layers of `layer_type` rotate; `rope_parameters` may have one set for each type. `theta` and `share`
    are the family's defaults. Raises UnsupportedModelError for what cannot be computed."""
    parameters, scaling = c.object("rope_parameters"), c.object("rope_scaling")
    if any(isinstance(value, dict) for value in parameters.values.values()):
        if not layer_type:
            raise c.refusal("rope_parameters", "one set for all layers")
        parameters = parameters.object(layer_type)
    if not scaling and parameters.text("rope_type", "default") != "default":
        scaling = parameters
    base = parameters.number("rope_theta", c.number("rope_theta", theta, above=1), above=1)
    part = c.number("partial_rotary_factor", share, above=0, maximum=1)
    part = parameters.number("partial_rotary_factor", part, above=0, maximum=1)
    return scaled(c, Rope(base, part), scaling)


def scaled(c: Fields, rope: Rope, scaling: Fields) -> Rope:
    """Return `rope` with the frequencies that an object of config.json asks for."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = OTHER_NAMES.get(kind, kind)
    if kind not in ROPE_FIELDS:
        raise UnsupportedModelError(f"{c.where}: rope type is {kind!r}; accepted: {', '.join(ROPE_FIELDS)}")
    missing = [name for name in ROPE_FIELDS[kind] if scaling.values.get(name) is None]
    if missing:
        raise UnsupportedModelError(f"{c.where}: `rope_scaling` of type {kind} lacks {', '.join(missing)}")
    _check_numbers(scaling)
    if kind == "default":
        return rope
    held: dict[str, Any] = {
        name: scaling.values[name] for name in (*NUMBERS, *OTHER_FIELDS) if scaling.values.get(name) is not None
    }
    if kind == "proportional":
        held["partial_rotary_factor"], rope = rope.share, replace(rope, share=1.0)
    if kind in ("yarn", "longrope"):
        held |= _stretch(c, scaling)
    if kind == "longrope":
        held |= _longrope(c, scaling, rope.share, held["original_max_position_embeddings"])
    return replace(rope, kind=kind, scaling=tuple(sorted(held.items())))


def read_temperature(c: Fields) -> Temperature | None:
    """Return how queries grow with their positions, where `rope_parameters` says so (Ministral 3); else None."""
    parameters = c.object("rope_parameters") or c.object("rope_scaling")
    if parameters.values.get("llama_4_scaling_beta") is None:
        return None
    return Temperature(
        parameters.number("llama_4_scaling_beta"), parameters.integer("original_max_position_embeddings")
    )


def _check_numbers(scaling: Fields) -> None:
    """Raise UnsupportedModelError for a number with which frequencies cannot be computed."""
    for name in NUMBERS:
        scaling.number(name, 1.0, above=1e-9, maximum=MOST)
    low = scaling.number("low_freq_factor", 0.0)
    if scaling.number("high_freq_factor", MOST) < low:
        raise scaling.refusal("high_freq_factor", f"at least low_freq_factor ({low:g})")
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        scaling.number(name, 1.0)
    scaling.flag("truncate", True)


def _stretch(c: Fields, scaling: Fields) -> dict[str, Any]:
    """Return the context before it was stretched, and by which factor it was."""
    longest = c.integer("max_position_embeddings", 2048)
    original = c.number("original_max_position_embeddings", scaling.number("original_max_position_embeddings", longest))
    return {"original_max_position_embeddings": original, "factor": scaling.number("factor", longest / original)}


def _longrope(c: Fields, scaling: Fields, share: float, original: float) -> dict[str, Any]:
    """Return the factors of frequencies: those for long contexts if the model's is longer than it was before it was
    stretched. Which ones a token gets cannot follow from its request's length, since requests share cached keys."""
    long = c.integer("max_position_embeddings", 2048) > original
    name, count = "long_factor" if long else "short_factor", int(head_dim(c) * share) // 2
    values = scaling.values[name]
    numbers = isinstance(values, list) and all(isinstance(one, int | float) and 0 < one < MOST for one in values)
    if not numbers or len(values) != count:
        raise scaling.refusal(name, f"a list of {count} numbers above 0")
    return {"long_factor": tuple(map(float, values))}
