"""Describes families with ordinary attention and experts, and the routers of DeepSeek, which they share with it.

It imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headrace.layer_parts import Norms
from headrace.model_config import Fields, head_dim, num_layers
from headrace.model_spec import ExpertNames, Experts
from headrace.models.descriptions import (
    W1_W3_W2,
    Described,
    alike,
    attention,
    dense,
    encoder,
    experts,
    llama,
    qwen_experts,
    rms_norm,
    switched_window,
)
from headrace.models.encoders import qwen3_vision
from headrace.models.ropes import read_rope

SHARED = ExpertNames(shared="shared_experts")
"""Names of experts in checkpoints of DeepSeek's form"""


def behind_dense(c: Fields, default: int) -> list[bool]:
    """Tell which layers have experts: those behind the first `first_k_dense_replace`."""
    first = c.integer("first_k_dense_replace", default, minimum=0)
    return [layer >= first for layer in range(num_layers(c))]


def softmax_experts(c: Fields) -> Experts:
    """Return the experts of DeepSeek V2, weighted by a softmax over all of them."""
    method = c.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise c.refusal("topk_method", "greedy or group_limited_greedy")
    return _routed(c, grouped=method != "greedy", renormalize=False)


def sigmoid_experts(c: Fields) -> Experts:
    """Return the experts of DeepSeek V3, weighted by sigmoids and chosen with a correction bias (arXiv 2412.19437)."""
    return _routed(c, grouped=True, renormalize=c.flag("norm_topk_prob", True), sigmoid=True)


def renormalized_experts(c: Fields) -> Experts:
    """Return the experts of Mistral Large 3, weighted by a softmax over all of them and scaled to sum to one."""
    if c.integer("n_group", 1) > 1:
        raise c.refusal("n_group", "1")
    return _routed(c, grouped=False, renormalize=c.flag("norm_topk_prob", True))


def _routed(c: Fields, grouped: bool, renormalize: bool, sigmoid: bool = False) -> Experts:
    groups = (c.optional("n_group") or 1) if grouped else 1
    if c.integer("n_routed_experts") % groups:
        raise c.refusal("n_group", f"a divisor of n_routed_experts ({c.integer('n_routed_experts')})")
    used = c.integer("topk_group", maximum=groups) if groups > 1 else 1
    size = c.integer("n_routed_experts") // groups
    if groups > 1 and (c.integer("num_experts_per_tok") > used * size or (sigmoid and size < 2)):
        raise c.refusal("topk_group", "groups with at least num_experts_per_tok experts, and two in each")
    shared = c.integer("moe_intermediate_size") * c.integer("n_shared_experts", 0, 0)
    return experts(
        c,
        "n_routed_experts",
        "moe_intermediate_size",
        renormalize=renormalize,
        sigmoid=sigmoid,
        selection_bias=sigmoid,
        groups=groups,
        used_groups=used,
        scaling=c.number("routed_scaling_factor", 1.0),
        intermediate_size=shared,
        names=SHARED,
    )


def glm4_moe(c: Fields) -> Described:
    """Describe GLM-4.5 and 4.6, which rotate the first half of each head."""
    norm = rms_norm(c, 1e-5)
    qk_norm: Literal["head", "none"] = "head" if c.flag("use_qk_norm") else "none"
    rope, bias = read_rope(c, share=0.5), c.flag("attention_bias")
    mixer = attention(c, rope=rope, qk_norm=qk_norm, qkv_bias=bias, norm=norm)
    routed, plain = sigmoid_experts(c), dense(c)
    blocks = [routed if sparse else plain for sparse in behind_dense(c, 1)]
    return alike([mixer] * len(blocks), blocks, Norms(norm=norm))


def minimax_m2(c: Fields) -> Described:
    """Describe MiniMax M2, with experts in every layer and norms of all heads together. The layers for further tokens
    that its config.json mentions are in no checkpoint."""
    norm, count = rms_norm(c), num_layers(c)
    share = c.integer("rotary_dim", head_dim(c), maximum=head_dim(c)) / head_dim(c)
    qk_norm: Literal["wide", "none"] = "wide" if c.flag("use_qk_norm", True) else "none"
    mixer = attention(c, qk_norm=qk_norm, rope=read_rope(c, share=share), norm=norm)
    names = replace(W1_W3_W2, selection="e_score_correction_bias")
    return alike(
        [mixer] * count, [experts(c, sigmoid=True, selection_bias=True, names=names)] * count, Norms(norm=norm)
    )


def olmoe(c: Fields) -> Described:
    """Describe OLMoE (arXiv 2409.02060), with experts in every layer and norms of all heads together."""
    norm, count, bias = rms_norm(c, 1e-5), num_layers(c), c.flag("attention_bias")
    if c.values.get("clip_qkv") is not None:  # it would follow the norms
        raise c.refusal("clip_qkv", "null")
    mixer = attention(c, qk_norm="wide", qkv_bias=bias, o_bias=bias, norm=norm)
    block = experts(c, "num_experts", renormalize=c.flag("norm_topk_prob"))
    return alike([mixer] * count, [block] * count, Norms(norm=norm))


def qwen3_vl_moe(c: Fields) -> Described:
    """Describe the text part of Qwen3-VL-MoE: Qwen3-MoE behind a vision encoder."""
    text = llama(c, switched_window, mlp_bias=False, qk_norm="head", feed_forwards=qwen_experts)
    return replace(text, vision_weights=encoder(c, qwen3_vision))
