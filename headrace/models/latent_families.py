"""Describes the families of multi-head latent attention: DeepSeek and those shaped like it. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.layer_parts import Norms
from headrace.model_config import Fields, num_layers
from headrace.model_spec import Experts, LatentAttention, LayerSpec
from headrace.models.descriptions import Described, alike, dense, encoder, mtp_weights, rms_norm
from headrace.models.encoders import kimi_vision
from headrace.models.expert_families import behind_dense, sigmoid_experts, softmax_experts
from headrace.models.ropes import read_rope


def latent_attention(c: Fields) -> LatentAttention:
    """Return the attention that a config.json of DeepSeek's form describes, with an indexer if it names one."""
    if c.flag("attention_bias"):
        raise c.refusal("attention_bias", "false")
    top_k = c.optional("index_topk")
    rope = replace(read_rope(c), interleaved=c.flag("rope_interleave", True))
    nope, rotated = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
    return LatentAttention(
        hidden_size=c.integer("hidden_size"),
        num_heads=c.integer("num_attention_heads"),
        latent_dim=c.integer("kv_lora_rank"),
        rope_dim=rotated,
        nope_dim=nope,
        v_head_dim=c.integer("v_head_dim"),
        q_rank=c.optional("q_lora_rank") if top_k is None else c.integer("q_lora_rank"),
        sparse_top_k=top_k,
        index_heads=c.integer("index_n_heads") if top_k is not None else 0,
        index_dim=c.integer("index_head_dim") if top_k is not None else 0,
        rope=rope,
        scale=(nope + rotated) ** -0.5 * _stretched(dict(rope.scaling)),
    )


def _stretched(scaling: dict[str, float]) -> float:
    """Return by which factor scores grow where YaRN (arXiv 2309.00071) stretches the context."""
    factor, share = scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0)
    return (0.1 * share * math.log(factor) + 1.0) ** 2 if factor > 1 and share else 1.0


def _described(c: Fields, routed: Experts, sparse: list[bool]) -> Described:
    """Return a model whose layers have dense feed-forwards where they are not sparse. Its layers for further tokens
    count as drafts."""
    hidden, mixer, plain, norms = c.integer("hidden_size"), latent_attention(c), dense(c), Norms(norm=rms_norm(c))
    drafts = c.integer("num_nextn_predict_layers", 0, 0) * mtp_weights(LayerSpec(mixer, routed))
    blocks = [routed if one else plain for one in sparse]
    vision = encoder(c, kimi_vision, hidden)
    return alike([mixer] * len(blocks), blocks, norms, vision_weights=vision, draft_weights=drafts)


def deepseek_v2(c: Fields) -> Described:
    """Describe DeepSeek V2 and V2-Lite (arXiv 2405.04434), whose first layers are dense."""
    return _described(c, softmax_experts(c), behind_dense(c, 0))


def deepseek_v3(c: Fields) -> Described:
    """Describe DeepSeek V3, V3.1 and R1, and Kimi K2: first dense layers, then routed and shared experts."""
    return _described(c, sigmoid_experts(c), behind_dense(c, 3))


def glm4_moe_lite(c: Fields) -> Described:
    """Describe GLM-4.7-Flash, whose feed-forwards `mlp_layer_types` names; by default the first alone is dense."""
    types, count = c.texts("mlp_layer_types"), num_layers(c)
    if types and (len(types) != count or {*types} - {"dense", "sparse"}):
        raise c.refusal("mlp_layer_types", f"dense or sparse for each of the {count} layers")
    sparse = [one == "sparse" for one in types] if types else behind_dense(c, 1)
    return _described(c, sigmoid_experts(c), sparse)


def youtu(c: Fields) -> Described:
    """Describe Youtu-LLM: latent attention and dense feed-forwards."""
    count = num_layers(c)
    return alike([latent_attention(c)] * count, [dense(c)] * count, Norms(norm=rms_norm(c)))
