"""Describes families in which layers with a recurrent state alternate with attention. It imports no torch."""

from __future__ import annotations

from headrace.layer_parts import Norm, Norms
from headrace.mixers import RecurrentState
from headrace.model_config import Fields, num_layers
from headrace.model_spec import LayerSpec
from headrace.models.descriptions import (
    Described,
    FeedForwards,
    alike,
    all_dense,
    attention,
    head,
    layer_types,
    rms_norm,
)
from headrace.models.ropes import read_rope
from headrace.parameters import Parameter, Split, linear

NET = "linear_attn"
"""name of a gated delta-net in a layer"""
KINDS = ("full_attention", "linear_attention")
"""of layers"""
HEAD = {
    "embed_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc",
    "layer": "mtp.layers.0", "norm": "mtp.norm",
}  # fmt: skip
"""Names of the parts of a head for further tokens"""
SHARE = 0.25
"""the part of a head that is rotated, unless config.json says another"""


def gated_delta_net(c: Fields, norm: Norm, by_key_head: bool) -> RecurrentState:
    """Return a gated delta-net (arXiv 2412.06464), whose sizes both generations name alike. `by_key_head`: one projects
    all that belongs to a key head side by side (Qwen3-Next), the other kind by kind (Qwen3.5)."""
    hidden, key_heads = c.integer("hidden_size"), c.integer("linear_num_key_heads")
    heads, key_dim, value_dim = (
        c.integer(f"linear_{name}") for name in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    if heads % key_heads:
        raise c.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    taps, keys, values = c.integer("linear_conv_kernel_dim"), key_heads * key_dim, heads * value_dim
    sizes = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
    of_gates = {"in_proj_b": heads, "in_proj_a": heads}
    if by_key_head:
        sizes, of_gates = {"in_proj_qkvz": 2 * (keys + values)}, {"in_proj_ba": 2 * heads}
    tensors = []
    for fused, parts in (("in_proj_qkvz", sizes), ("in_proj_ba", of_gates)):
        for name, size in parts.items():
            tensors += linear(f"{NET}.{name}", size, hidden, "heads", fused=fused)
    tensors += linear(f"{NET}.out_proj", hidden, values, "heads", axis=1)
    plain: list[tuple[str, tuple[int, ...], Split, bool]] = [
        ("conv1d.weight", (2 * keys + values, 1, taps), "heads", False), ("A_log", (heads,), "heads", True),
        ("dt_bias", (heads,), "heads", True), ("norm.weight", (value_dim,), "whole", False),
    ]  # fmt: skip
    tensors += [Parameter(f"{NET}.{name}", shape, "plain", split, wide=wide) for name, shape, split, wide in plain]
    return RecurrentState(hidden, heads, key_dim, value_dim, tuple(tensors), key_heads, taps, by_key_head, norm.eps)


def qwen_hybrid(c: Fields, by_key_head: bool, feed_forwards: FeedForwards = all_dense) -> Described:
    """Describe Qwen3-Next and Qwen3.5, with gated attention in every `full_attention_interval`-th layer, or where
    `layer_types` says, and weights of norms less one. Files of Qwen3-Next hold one layer for further tokens, which its
    config.json does not mention."""
    count, every, norm = num_layers(c), c.integer("full_attention_interval", 4), rms_norm(c, plus_one=True)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    kinds = layer_types(c, KINDS) or usual
    bias = c.flag("attention_bias")
    full = attention(
        c, qkv_bias=bias, o_bias=bias, qk_norm="head", norm=norm, rope=read_rope(c, share=SHARE), output_gate=True
    )
    state = gated_delta_net(c, norm, by_key_head)
    mixers, blocks = [state if kind == "linear_attention" else full for kind in kinds], feed_forwards(c, False)
    norms, own = Norms(norm=norm), c.integer("mtp_num_hidden_layers", int(by_key_head), 0)
    guesses = head(c, LayerSpec(full, blocks[-1], norms), HEAD, hands_on_normed=True) if own else None
    return alike(mixers, blocks, norms, head=guesses)
