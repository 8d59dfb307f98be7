"""Describes Gemma: weights of norms less one, GELU, scaled embeddings, and from Gemma 2 on windows and more norms.

It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.feed_forwards import ExpertNames, Experts, FeedForward
from headrace.layer_parts import Norm, Norms, Rope
from headrace.model_config import Fields, num_layers
from headrace.model_spec import LayerSpec
from headrace.models.dense_families import SANDWICH, every_nth, rope_of_type, window_of
from headrace.models.descriptions import Described, alike, attention, dense, rms_norm
from headrace.models.ropes import read_rope, scaled


def gemma(c: Fields) -> Described:
    """Describe Gemma: weights of norms less one, GELU, scaled embeddings."""
    norm = rms_norm(c, plus_one=True)
    c = c.changed({"hidden_act": "gelu_pytorch_tanh"}) if c.values.get("hidden_act") == "gelu" else c
    bias = c.flag("attention_bias")
    mixer = attention(c, qkv_bias=bias, o_bias=bias, norm=norm)
    count = num_layers(c)
    return alike([mixer] * count, [dense(c)] * count, Norms(norm=norm), **_scaled_embedding(c))


def gemma2(c: Fields) -> Described:
    """Describe Gemma 2, with a window in every other layer, soft caps and four norms a layer."""
    return _gemma(c, 2, lambda kind: read_rope(c), attn_cap=50.0, logit_cap=30.0, qk_norm="none")


def vaultgemma(c: Fields) -> Described:
    """Describe VaultGemma (arXiv 2510.15001): Gemma 2 without norms behind mixer and feed-forward."""
    plain = gemma2(c)
    norms = Norms("input_layernorm", "", "pre_feedforward_layernorm", "", norm=plain.norm)
    return replace(plain, layers=tuple(replace(layer, norms=norms) for layer in plain.layers))


def gemma3(c: Fields) -> Described:
    """Describe Gemma 3, with a window in five layers of six, which rotate by another base, and QK norm. EmbeddingGemma
    (arXiv 2509.20354) is one whose tokens see later ones too, within half a window on either side."""
    local = c.number("rope_local_base_freq", 10000.0, above=1)
    pattern = c.integer("sliding_window_pattern", 6)
    both_ways = c.flag("use_bidirectional_attention")
    if both_ways:
        c = c.changed({"sliding_window": c.integer("sliding_window", 4096) // 2 + 1})  # the token itself included
    return _gemma(c, pattern, lambda kind: rope_of_type(c, kind, 1e6, local), qk_norm="head", causal=not both_ways)


def gemma4(c: Fields) -> Described:
    """Describe the Gemma 4 of 12B and 31B, and with experts beside the dense feed-forward that of 26B: layers that see
    all keys have heads of another size, may project values by the weights of keys, and turn a quarter of each head."""
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if c.values.get(name):
            raise c.refusal(name, "0 or null")
    if c.text("use_bidirectional_attention", "") == "all":
        raise c.refusal("use_bidirectional_attention", "null or vision")
    norm, bias, same = rms_norm(c, rounds_once=True), c.flag("attention_bias"), c.flag("attention_k_eq_v")
    kinds = [*every_nth(c, 6)[:-1], "full_attention"]
    kv_heads = c.optional("num_global_key_value_heads") if same else None
    wide = {"head_dim": c.integer("global_head_dim", 512)} | ({"num_key_value_heads": kv_heads} if kv_heads else {})
    mixers = []
    for layer, kind in enumerate(kinds):
        full = kind == "full_attention"
        named = c.object("per_layer_config").object(str(layer)).values  # as transformers writes what differs
        own = c.changed((named or wide) if full else named)
        rope = read_rope(own, kind, 1e6 if full else 10000.0)
        if full and not c.object("rope_parameters"):
            rope = scaled(own, replace(rope, share=0.25), Fields({"rope_type": "proportional"}, c.where))
        mixer = attention(
            own, window_of(c, kind, 512), rope=rope, qk_norm="head", v_norm=True, values_are_keys=same and full,
            qkv_bias=bias, o_bias=bias, scale=1.0, norm=norm,
        )  # fmt: skip
        mixers.append(mixer)
    block, norms = _fed(c, norm)
    layers = tuple(LayerSpec(mixer, block, norms, scaled=True) for mixer in mixers)
    cap = _cap(c, "final_logit_softcapping", None)
    return Described(layers, norm=norm, logit_cap=cap, names=BESIDE, **_scaled_embedding(c))


def _fed(c: Fields, norm: Norm) -> tuple[FeedForward, Norms]:
    """Return the feed-forward of each layer of Gemma 4, and where it norms."""
    beside, norms = dense(c, activation="hidden_activation"), replace(SANDWICH, norm=norm)
    if not c.flag("enable_moe_block"):
        return beside, norms
    number, width = c.integer("num_experts"), c.integer("moe_intermediate_size")
    per_token = c.integer("top_k_experts", maximum=number)
    experts = Experts(
        beside.hidden_size, number, per_token, width, intermediate_size=beside.intermediate_size,
        activation=beside.activation, own_norm=norm, names=ExpertNames("moe", shared=beside.block),
    )  # fmt: skip
    return experts, replace(norms, of_each=("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"))


def _gemma(
    c: Fields,
    pattern: int,
    rope: Callable[[str], Rope],
    attn_cap: float | None = None,
    logit_cap: float | None = None,
    **changes: Any,
) -> Described:
    norm, bias = rms_norm(c, plus_one=True), c.flag("attention_bias")
    changes |= {
        "qkv_bias": bias,
        "o_bias": bias,
        "norm": norm,
        "scale": c.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        "soft_cap": _cap(c, "attn_logit_softcapping", attn_cap),
    }
    kinds = every_nth(c, pattern)
    mixers = {kind: attention(c, window_of(c, kind), rope=rope(kind), **changes) for kind in {*kinds}}
    block = dense(c, activation="hidden_activation")
    return alike(
        [mixers[kind] for kind in kinds],
        [block] * len(kinds),
        replace(SANDWICH, norm=norm),
        logit_cap=_cap(c, "final_logit_softcapping", logit_cap),
        **_scaled_embedding(c),
    )


def _cap(c: Fields, name: str, default: float | None) -> float | None:
    """Return a soft cap, `default` where the field is absent, None where it is null."""
    if name not in c.values:
        return default
    return None if c.values[name] is None else c.number(name, above=0)


def _scaled_embedding(c: Fields) -> dict[str, Any]:
    return {"embedding_scale": math.sqrt(c.integer("hidden_size")), "rounds_embedding_scale": True}


BESIDE = (
    (".moe.experts.", ".experts."), (".experts.", ".moe.experts."), (".router.proj.", ".moe.gate."),
    (".router.", ".moe.gate."), (".pre_feedforward_layernorm_2.", ".moe.norm."),
)  # fmt: skip
"""Names in checkpoints of Gemma 4 with experts -> here"""
GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
GEMMA1: dict[str, Any] = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
GEMMA3: dict[str, Any] = {
    **GEMMA_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GEMMA4: dict[str, Any] = {**GEMMA_DEFAULTS, "hidden_size_per_layer_input": 256}
GEMMA4_UNIFIED: dict[str, Any] = {**GEMMA_DEFAULTS, "sliding_window": 1024}
"""Values of fields that Gemma's config.json leaves out"""
