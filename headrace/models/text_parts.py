"""Describes the text parts of folders with more than text. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.model_config import Fields
from headrace.models.descriptions import (
    Describe,
    Described,
    encoder,
    llama,
    qwen_experts,
    switched_window,
    upper_window,
)
from headrace.models.encoders import qwen3_vision


def qwen3_vl(c: Fields) -> Described:
    """Describe Qwen3-VL: Qwen3 behind a vision encoder."""
    text = llama(c, upper_window, mlp_bias=False, qk_norm="head", theta=500000.0)
    return replace(text, vision_weights=encoder(c, qwen3_vision))


def qwen3_vl_moe(c: Fields) -> Described:
    """Describe the text part of Qwen3-VL-MoE: Qwen3-MoE behind a vision encoder."""
    text = llama(c, switched_window, mlp_bias=False, qk_norm="head", feed_forwards=qwen_experts)
    return replace(text, vision_weights=encoder(c, qwen3_vision))


def text_part_of(families: Mapping[str, Describe], vision: Callable[[Fields, int], int] | None = None) -> Describe:
    """Return a description that chooses by the `model_type` of the text part, the first where there is none. `vision`
    counts the parameters of the image encoder, given its fields and the hidden size; None: they are not known."""

    def describe(c: Fields) -> Described:
        kind = c.text("model_type", next(iter(families)))
        if kind not in families:
            raise c.refusal("model_type", f"one of {', '.join(families)} in `text_config`")
        described = families[kind](c)
        if vision is None:
            return described
        return replace(described, vision_weights=encoder(c, vision, c.integer("hidden_size")))

    return describe
