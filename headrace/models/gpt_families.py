"""Describes GPT-2 and the families of its time, with layer norms, biases, feed-forwards without a gate, and fields that
have names of their own (model_config.py: `RENAMED`). It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.layer_parts import Norm, Norms, TextEmbedding
from headrace.mixers import Attention
from headrace.model_config import Fields, head_dim, num_layers
from headrace.models.dense_families import PARALLEL, USUAL, layer_norm
from headrace.models.descriptions import Described, alike, attention, dense, llama
from headrace.models.ropes import read_rope
from headrace.models.scaled_families import with_mixers

OF_GPT2 = (
    ("^transformer.", ""),
    ("wte.", "embed_tokens."),
    ("wpe.weight", "embeddings.positions"),
    ("ln_f.", "norm."),
    ("^h.", "layers."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".attn.attention.", ".self_attn."),
    (".attn.", ".self_attn."),
    (".self_attn.c_attn.", ".self_attn.qkv_proj."),
    (".self_attn.c_proj.", ".self_attn.o_proj."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
    (".mlp.fc_in.", ".mlp.up_proj."),
    (".mlp.fc_out.", ".mlp.down_proj."),
)
"""What parts of tensors' names are in checkpoints of GPT-2 and its kin, and here"""
TWO_NORMS = replace(PARALLEL, before_block="post_attention_layernorm")
"""a norm for attention and one for the feed-forward, of the same sum"""
GELU_NEW: dict[str, Any] = {"hidden_act": "gelu_new"}
TIED: dict[str, Any] = {**GELU_NEW, "tie_word_embeddings": True}


def widened(c: Fields) -> Fields:
    """Return the fields with the width of the feed-forward, four hidden sizes where none is given, and a KV head for
    each query."""
    wide, heads = c.integer("intermediate_size", 4 * c.integer("hidden_size")), c.integer("num_attention_heads")
    return c.changed({"intermediate_size": wide, "num_key_value_heads": heads})


def learned(c: Fields, first: int = 0) -> TextEmbedding:
    """Return the embeddings of positions, of which the first token has that in row `first`."""
    return TextEmbedding(positions=c.integer("max_position_embeddings") + first, first_position=first)


def _of_gpt2(c: Fields, mixers: Callable[[Norm], list[Attention]], **of_model: Any) -> Described:
    """Return a model whose layers have the norms and feed-forwards of GPT-2."""
    norm = layer_norm(c, bias=True)
    found = mixers(norm)
    block = dense(c, bias=True, gated=False)
    of_model = {"names": OF_GPT2, "text_embedding": learned(c), **of_model}
    return alike(found, [block] * len(found), Norms(norm=norm), **of_model)


def gpt2(c: Fields) -> Described:
    """Describe GPT-2, whose checkpoints hold weights [in, out]. Scores may shrink from layer to layer."""
    c = widened(c)
    plain, by_layer = not c.flag("scale_attn_weights", True), c.flag("scale_attn_by_inverse_layer_idx")
    scale = 1.0 if plain else head_dim(c) ** -0.5
    scales = [scale / (layer + 1 if by_layer else 1) for layer in range(num_layers(c))]
    ends = tuple(f".{name}.weight" for name in ("c_attn", "c_proj", "c_fc"))
    return _of_gpt2(c, lambda norm: [_biased(c, norm, scale=one) for one in scales], transposed=ends)


def gpt_bigcode(c: Fields) -> Described:
    """Describe StarCoder (arXiv 2305.06161): GPT-2 with one KV head for all queries."""
    shared, c = c.flag("multi_query", True), widened(c)
    own = c.changed({"num_key_value_heads": 1}) if shared else c
    scale = None if c.flag("scale_attn_weights", True) else 1.0
    return _of_gpt2(
        c, lambda norm: [_biased(own, norm, scale=scale, by_kv_head=not shared)] * num_layers(c)
    )  # fmt: skip


def gpt_neo(c: Fields) -> Described:
    """Describe GPT-Neo, with windows in layers that `attention_layers` calls local, and scores that are not scaled."""
    kinds, count, c = c.texts("attention_layers"), num_layers(c), widened(c)
    if not kinds:
        kinds = ["local" if layer % 2 else "global" for layer in range(count)]
    if len(kinds) != count or {*kinds} - {"global", "local"}:
        raise c.refusal("attention_layers", f"global or local for each of the {count} layers")
    window = c.integer("window_size", 256)

    def mixers(norm: Norm) -> list[Attention]:
        return [
            attention(c, window if kind == "local" else None, rope=None, o_bias=True, scale=1.0, norm=norm)
            for kind in kinds
        ]

    return _of_gpt2(c, mixers)


def _biased(c: Fields, norm: Norm, **changes: Any) -> Attention:
    return attention(c, rope=None, qkv_bias=True, o_bias=True, norm=norm, **changes)


OF_OPT = (
    ("^model.decoder.", "model."),
    ("^decoder.", "model."),
    ("model.final_layer_norm.", "model.norm."),
    ("model.embed_positions.weight", "model.embeddings.positions"),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn_layer_norm.", ".input_layernorm."),
    (".final_layer_norm.", ".post_attention_layernorm."),
    (".fc1.", ".mlp.up_proj."),
    (".fc2.", ".mlp.down_proj."),
)
"""OPT's names -> ours"""


def opt(c: Fields) -> Described:
    """Describe OPT (arXiv 2205.01068), whose first token has the third embedding of positions."""
    for name, wanted in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        if c.flag(name, wanted) != wanted:
            raise c.refusal(name, str(wanted).lower())
    if c.integer("word_embed_proj_dim", c.integer("hidden_size")) != c.integer("hidden_size"):
        raise c.refusal("word_embed_proj_dim", f"hidden_size ({c.integer('hidden_size')})")
    affine, bias, count = c.flag("layer_norm_elementwise_affine", True), c.flag("enable_bias", True), num_layers(c)
    c = widened(c)
    norm = Norm("layer", 1e-5, weight=affine, bias=affine)
    mixer = attention(c, rope=None, qkv_bias=bias, o_bias=bias, norm=norm)
    block = dense(c, bias=bias, gated=False)
    return alike([mixer] * count, [block] * count, Norms(norm=norm), names=OF_OPT, text_embedding=learned(c, 2))


def gptj(c: Fields) -> Described:
    """Describe GPT-J: one norm for both branches, neighbours rotated in the first part of each head, and a head with
    biases."""
    if c.flag("tie_word_embeddings"):
        raise c.refusal("tie_word_embeddings", "false")
    norm, count, c = layer_norm(c, bias=True), num_layers(c), widened(c)
    share = c.integer("rotary_dim", 64, maximum=head_dim(c)) / head_dim(c)
    mixer = attention(c, rope=replace(read_rope(c, share=share), interleaved=True), norm=norm)
    block = dense(c, bias=True, gated=False)
    return alike([mixer] * count, [block] * count, replace(PARALLEL, norm=norm), names=OF_GPT2, head_bias=True)


OF_MLP = ((".dense_h_to_4h.", ".up_proj."), (".dense_4h_to_h.", ".down_proj."))
OF_NEOX = (
    ("^gpt_neox.", ""),
    ("embed_in.", "embed_tokens."),
    ("embed_out.", "lm_head."),
    ("final_layer_norm.", "norm."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    *OF_MLP,
)
"""GPT-NeoX's names -> ours"""


def gpt_neox(c: Fields) -> Described:
    """Describe GPT-NeoX and Pythia (arXiv 2304.01373): both branches read norms of the same sum."""
    norm, bias, count, c = layer_norm(c, bias=True), c.flag("attention_bias", True), num_layers(c), widened(c)
    share, theta = c.number("rotary_pct", 0.25, above=0, maximum=1), c.number("rotary_emb_base", 10000.0, above=1)
    rope = read_rope(c, theta=theta, share=share)
    mixer = attention(c, rope=rope, qkv_bias=bias, o_bias=bias, by_kv_head=True, norm=norm)
    norms = TWO_NORMS if c.flag("use_parallel_residual", True) else USUAL
    block = dense(c, bias=True, gated=False)
    return alike([mixer] * count, [block] * count, replace(norms, norm=norm), names=OF_NEOX)


OF_FALCON = (
    ("^transformer.", ""),
    ("word_embeddings.", "embed_tokens."),
    ("ln_f.", "norm."),
    ("^h.", "layers."),
    (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".ln_attn.", ".input_layernorm."),
    (".ln_mlp.", ".post_attention_layernorm."),
    *OF_MLP,
)
"""Falcon's names -> ours"""


def falcon(c: Fields) -> Described:
    """Describe Falcon (arXiv 2311.16867): 40B has a norm for each branch, 7B one for both and one KV head."""
    if c.flag("alibi"):
        raise c.refusal("alibi", "false, for no kernel here lets scores fall with the distance of keys")
    newer, parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn", True)
    kv_heads = c.integer("num_key_value_heads", c.integer("num_attention_heads"))
    norm, bias, count, c = layer_norm(c, bias=True), c.flag("bias"), num_layers(c), widened(c)
    if newer or c.flag("multi_query", True):
        c = c.changed({"num_key_value_heads": kv_heads if newer else 1})
    norms = PARALLEL if parallel else USUAL
    norms = TWO_NORMS if newer and c.integer("num_ln_in_parallel_attn", 2) == 2 else norms
    mixer = attention(c, rope=read_rope(c), qkv_bias=bias, o_bias=bias, by_kv_head=True, norm=norm)
    block = dense(c, bias, activation="activation", gated=False)
    return alike([mixer] * count, [block] * count, replace(norms, norm=norm), names=OF_FALCON)


FALCON: dict[str, Any] = {"activation": "gelu", "tie_word_embeddings": True}
OPT: dict[str, Any] = {"hidden_act": "relu", "tie_word_embeddings": True}


# ---- InternLM

OF_INTERNLM2 = (
    ("model.tok_embeddings.", "model.embed_tokens."),
    ("^output.", "lm_head."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".attention.wqkv.", ".self_attn.qkv_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
)
"""InternLM 2's names -> ours"""


def internlm2(c: Fields) -> Described:
    """Describe InternLM 2 and 2.5 (arXiv 2403.17297): Llama with queries, keys and values in one linear."""
    bias = c.flag("bias", True)
    plain = with_mixers(llama(c, qkv_bias=bias, o_bias=bias, mlp_bias=False), lambda _: {"by_kv_head": True})
    return replace(plain, names=OF_INTERNLM2)
