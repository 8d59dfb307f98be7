"""Describes the families of multi-head latent attention: DeepSeek and those shaped like it. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.feed_forwards import Experts
from headrace.layer_parts import Norms, Temperature
from headrace.mixers import LatentAttention
from headrace.model_config import Fields, num_layers
from headrace.model_spec import LayerSpec
from headrace.models.descriptions import Described, alike, dense, encoder, head_behind, rms_norm
from headrace.models.encoders import kimi_vision
from headrace.models.expert_families import (
    behind_dense,
    renormalized_experts,
    sigmoid_experts,
    softmax_experts,
    sparse_layers,
)
from headrace.models.ropes import read_rope, read_temperature


def latent_attention(c: Fields) -> LatentAttention:
    """Return the attention that a config.json of DeepSeek's form describes, without an index."""
    rope = replace(read_rope(c), interleaved=c.flag("rope_interleave", True))
    nope, rotated = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
    bias, q_rank = c.flag("attention_bias"), c.optional("q_lora_rank")
    if bias and q_rank is None:  # q_proj has none, and is one linear with kv_a_proj_with_mqa
        raise c.refusal("attention_bias", "false where `q_lora_rank` is null")
    return LatentAttention(
        hidden_size=c.integer("hidden_size"),
        num_heads=c.integer("num_attention_heads"),
        latent_dim=c.integer("kv_lora_rank"),
        rope_dim=rotated,
        nope_dim=nope,
        v_head_dim=c.integer("v_head_dim"),
        q_rank=q_rank,
        bias=bias,
        temperature=_temperature(c),
        rope=rope,
        scale=(nope + rotated) ** -0.5 * _stretched(dict(rope.scaling)),
    )


def _stretched(scaling: dict[str, float]) -> float:
    """Return by which factor scores grow where YaRN (arXiv 2309.00071) stretches the context."""
    factor, share = scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0)
    return (0.1 * share * math.log(factor) + 1.0) ** 2 if factor > 1 and share else 1.0


def _temperature(c: Fields) -> Temperature | None:
    """Return how queries grow with their positions; tools that read Mistral's own params.json write it in an object."""
    if not (own := c.object("llama_4_scaling")):
        return read_temperature(c)
    return Temperature(own.number("beta"), own.integer("original_max_position_embeddings"))


def _described(
    c: Fields, routed: Experts, sparse: list[bool], mixers: list[LatentAttention] | None = None
) -> Described:
    """Return a model whose layers have dense feed-forwards where they are not sparse; `mixers` None: all layers attend
    alike, to all keys."""
    hidden, plain, norms = c.integer("hidden_size"), dense(c), Norms(norm=rms_norm(c))
    mixers = [latent_attention(c)] * len(sparse) if mixers is None else mixers
    blocks = [routed if one else plain for one in sparse]
    vision = encoder(c, kimi_vision, hidden)
    return alike(mixers, blocks, norms, vision_weights=vision, head=head_behind(c, LayerSpec(mixers[0], routed, norms)))


def _indexed(c: Fields, interleaved: bool) -> list[LatentAttention]:
    """Return the attention of each layer of a model whose keys an index chooses; some layers may use what the one
    before them chose (arXiv 2603.12201). `interleaved`: how the family's index rotates where config.json does not say.
    """
    mixer = replace(
        latent_attention(c),
        q_rank=c.integer("q_lora_rank"),
        sparse_top_k=c.integer("index_topk"),
        index_heads=c.integer("index_n_heads"),
        index_dim=c.integer("index_head_dim", minimum=c.integer("qk_rope_head_dim")),
        index_interleaved=c.flag("indexer_rope_interleave", interleaved),
    )
    if mixer.bias:  # the index's projections have none, and are one linear with the others
        raise c.refusal("attention_bias", "false")
    if {*c.texts("layer_types")} - {"indexed_attention", "deepseek_sparse_attention"}:  # the name it had before
        raise c.refusal("layer_types", "indexed_attention for every layer")
    shared = replace(mixer, index_heads=0, index_dim=0)
    return [mixer if own else shared for own in _own_indexes(c)]


def _own_indexes(c: Fields) -> list[bool]:
    """Tell which layers have an index of their own."""
    count, letters = num_layers(c), {"F": "full", "S": "shared"}
    name = "indexer_types" if c.values.get("indexer_types") is not None else "index_topk_pattern"
    if c.values.get(name) is None:
        every, first = c.integer("index_topk_freq", 1), c.integer("index_skip_topk_offset", 2, 0)
        return [max(layer - first + 1, 0) % every == 0 for layer in range(count)]
    given = c.values[name]
    types = [letters.get(one, one) for one in given] if isinstance(given, str) else c.texts(name)
    if len(types) != count or {*types} - {*letters.values()} or types[0] != "full":
        raise c.refusal(name, f"full or shared for each of the {count} layers, and full for the first")
    return [one == "full" for one in types]


def deepseek_v2(c: Fields) -> Described:
    """Describe DeepSeek V2 and V2-Lite (arXiv 2405.04434), whose first layers are dense."""
    return _described(c, softmax_experts(c), behind_dense(c, 0))


def deepseek_v3(c: Fields) -> Described:
    """Describe DeepSeek V3, V3.1 and R1, and Kimi K2: first dense layers, then routed and shared experts."""
    return _described(c, sigmoid_experts(c), behind_dense(c, 3))


def glm4_moe_lite(c: Fields) -> Described:
    """Describe GLM-4.7-Flash, of whose layers by default the first alone is dense."""
    return _described(c, sigmoid_experts(c), sparse_layers(c, 1))


def deepseek_v32(c: Fields, interleaved: bool = False) -> Described:
    """Describe DeepSeek V3.2 (arXiv 2512.02556): V3 with sparse attention; and GLM-5, whose index is interleaved."""
    return _described(c, sigmoid_experts(c), sparse_layers(c, 3), _indexed(c, interleaved))


def mistral_large3(c: Fields) -> Described:
    """Describe Mistral Large 3 and Small 4: DeepSeek V3 with a softmax router, and queries that grow with their
    positions."""
    return _described(c, renormalized_experts(c), behind_dense(c, 0))


def youtu(c: Fields) -> Described:
    """Describe Youtu-LLM: latent attention and dense feed-forwards."""
    count = num_layers(c)
    return alike([latent_attention(c)] * count, [dense(c)] * count, Norms(norm=rms_norm(c)))


def axk1(c: Fields) -> Described:
    """Describe A.X K1: DeepSeek V3 with norms behind experts."""
    sparse = sparse_layers(c, 1)
    plain = _described(c, sigmoid_experts(c), sparse)
    behind = replace(plain.layers[0].norms, after_block="post_mlp_layernorm")
    layers = (
        replace(layer, norms=behind) if routed else layer for layer, routed in zip(plain.layers, sparse, strict=True)
    )
    return replace(plain, layers=tuple(layers))
