"""Describes families that scale embeddings, logits, and what layers add to the residual (arXiv 2203.03466). It imports
no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.feed_forwards import ExpertNames, FeedForward
from headrace.layer_parts import Rope
from headrace.mixers import Attention
from headrace.model_config import Fields, head_dim, num_layers
from headrace.models.dense_families import window_of
from headrace.models.descriptions import Described, FeedForwards, all_dense, experts, layer_types, llama
from headrace.models.latent_families import youtu
from headrace.models.ropes import read_rope


def scaled(plain: Described, embeddings: float, residual: float, logits: float) -> Described:
    """Return a model like `plain` with factors of embeddings, of what layers add to the residual, and of logits.

    Since an RMS norm does not depend on the size of its input but for epsilon, the residual is kept divided by its
    factor: then what layers add needs none. Norms of what is added keep their epsilon.
    """
    norm = replace(plain.norm, eps=plain.norm.eps / residual**2)
    layers = tuple(
        replace(layer, norms=replace(layer.norms, norm=norm, behind=layer.norms.norm)) for layer in plain.layers
    )
    return replace(plain, layers=layers, norm=norm, embedding_scale=embeddings / residual, logit_scale=logits)


# ---- Granite


def granite(c: Fields, feed_forwards: FeedForwards = all_dense) -> Described:
    """Describe Granite 3, which scales scores too."""
    scale = c.number("attention_multiplier", 1.0, above=0)
    return _multiplied(c, with_mixers(llama(c, feed_forwards=feed_forwards), lambda _: {"scale": scale}))


def with_mixers(plain: Described, changes: Callable[[int], dict[str, Any]]) -> Described:
    """Return a model like `plain` whose attention is changed, layer by layer."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, **changes(index))) if isinstance(layer.mixer, Attention) else layer
        for index, layer in enumerate(plain.layers)
    )
    return replace(plain, layers=layers)


def _multiplied(c: Fields, plain: Described) -> Described:
    embeddings, residual, logits = (
        c.number(name, 1.0, above=0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    return scaled(plain, embeddings, residual, 1 / logits)


IN_EXPERTS = (
    ("block_sparse_moe.input_linear.", "mlp.experts.gate_up_proj."),
    ("block_sparse_moe.output_linear.", "mlp.experts.down_proj."),
    ("block_sparse_moe.router.layer.", "mlp.gate."),
    ("shared_mlp.input_linear.", "mlp.shared_expert.gate_up_proj."),
    ("shared_mlp.output_linear.", "mlp.shared_expert.down_proj."),
)
"""Granite's names of experts -> ours"""
DENSE = (("shared_mlp.input_linear.", "mlp.gate_up_proj."), ("shared_mlp.output_linear.", "mlp.down_proj."))
"""Its names of a feed-forward where there are no experts"""


def granite_moe(c: Fields) -> Described:
    """Describe Granite 3 with experts, perhaps beside a shared one."""
    return replace(granite(c, _granite_experts), names=IN_EXPERTS)


def _granite_experts(c: Fields, bias: bool) -> list[FeedForward]:
    return [experts(c, intermediate_size=c.integer("shared_intermediate_size", 0, 0))] * num_layers(c)


def granite_hybrid(c: Fields) -> Described:
    """Describe Granite 4 where no layer is Mamba-2's: perhaps without experts, and perhaps without positions."""
    kinds = ["mamba" if kind == "linear_attention" else kind for kind in c.texts("layer_types")]
    if "mamba" in kinds or not kinds:
        raise c.refusal("layer_types", "attention in every layer, for there are no kernels here for Mamba-2's scan")
    if c.integer("num_local_experts", 8, minimum=0):
        plain = granite_moe(c)
    else:
        width = c.integer("shared_intermediate_size", 1024)
        plain = replace(granite(c.changed({"intermediate_size": width})), names=DENSE)
    turns = c.values.get("position_embedding_type") == "rope"
    return plain if turns else with_mixers(plain, lambda _: {"rope": None})


def granite_swa(c: Fields, sparse: bool = False) -> Described:
    """Describe Granite with sinks, windows in all but every fourth layer, from the first, and bases of its rope that
    may differ from layer to layer; 0: a layer without positions. `sparse`: layers have experts."""
    kinds = first_of_four(c)
    thetas = c.values.get("layer_rope_theta") or [read_rope(c).theta] * len(kinds)
    if len(thetas) != len(kinds) or not all(isinstance(one, int | float) and (one == 0 or one > 1) for one in thetas):
        raise c.refusal("layer_rope_theta", f"0 or a number above 1 for each of the {len(kinds)} layers")

    def changes(index: int) -> dict[str, Any]:
        rope: Rope | None = replace(read_rope(c), theta=float(thetas[index])) if thetas[index] else None
        return {"window": window_of(c, kinds[index], 128), "rope": rope, "sinks": True}

    if not sparse:
        return with_mixers(granite(c), changes)
    names = ExpertNames("block_sparse_moe", router="router")

    def blocks(c: Fields, bias: bool) -> list[FeedForward]:
        shared = c.integer("shared_intermediate_size", 0, 0)
        return [experts(c, intermediate_size=shared, names=names)] * len(kinds)

    of_shared = tuple((theirs, ours.replace("mlp.", "block_sparse_moe.")) for theirs, ours in IN_EXPERTS[3:])
    return replace(with_mixers(granite(c, blocks), changes), names=of_shared)


def first_of_four(c: Fields) -> list[str]:
    """Return the type of each layer: as `layer_types` says, else a window in all but every fourth, from the first."""
    return layer_types(c) or ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers(c))]


# ---- others


def hyperclovax(c: Fields) -> Described:
    """Describe HyperCLOVA X SEED, with norms behind mixer and feed-forward too, whose factor of logits multiplies."""
    scale = c.number("attention_multiplier", head_dim(c) ** -0.5, above=0)
    plain = with_mixers(llama(c), lambda _: {"scale": scale})
    if c.flag("use_post_norm", True):
        norms = replace(plain.layers[0].norms, after_mixer="post_norm1", after_block="post_norm2")
        plain = replace(plain, layers=tuple(replace(layer, norms=norms) for layer in plain.layers))
    return replace(_multiplied(c, plain), logit_scale=c.number("logits_scaling", 1.0, above=0))


def minicpm(c: Fields) -> Described:
    """Describe MiniCPM (arXiv 2404.06395) and MiniCPM 4."""
    return _minicpm(c, llama(c))


def minicpm3(c: Fields) -> Described:
    """Describe MiniCPM 3, which attends to latents as DeepSeek V2 does, without turning neighbours."""
    return _minicpm(c, youtu(c.changed({"rope_interleave": False})))


def _minicpm(c: Fields, plain: Described) -> Described:
    depth = c.number("scale_depth", math.sqrt(num_layers(c)), above=0)
    width = c.integer("hidden_size")
    logits = c.number("dim_model_base", width, above=0) / width
    return scaled(plain, c.number("scale_emb", 1.0, above=0), depth / math.sqrt(num_layers(c)), logits)
