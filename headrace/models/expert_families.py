"""Describes families with ordinary attention and experts, and the routers of DeepSeek, which they share with it.

It imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from headrace.feed_forwards import ExpertNames, Experts
from headrace.layer_parts import Norms, Temperature
from headrace.model_config import Fields, head_dim, num_layers
from headrace.model_spec import LayerSpec
from headrace.models.dense_families import (
    AFTER_TURNING,
    BEHIND,
    PARALLEL,
    USUAL,
    every_nth,
    exaone4_attention,
    hunyuan_attention,
    layer_norm,
    rope_of_type,
    window_of,
)
from headrace.models.descriptions import (
    W1_W3_W2,
    Described,
    alike,
    attention,
    dense,
    encoder,
    experts,
    head,
    head_behind,
    layer_types,
    rms_norm,
    rotated_layers,
)
from headrace.models.encoders import llama4_vision
from headrace.models.ropes import read_rope

SHARED = ExpertNames(shared="shared_experts")
"""Names of experts in checkpoints of DeepSeek's form"""


def behind_dense(c: Fields, default: int) -> list[bool]:
    """Tell which layers have experts: those behind the first `first_k_dense_replace`."""
    first = c.integer("first_k_dense_replace", default, minimum=0)
    return [layer >= first for layer in range(num_layers(c))]


def sparse_layers(c: Fields, default: int) -> list[bool]:
    """Tell which layers have experts: as `mlp_layer_types` says, else those behind the first ones."""
    types, count = c.texts("mlp_layer_types"), num_layers(c)
    if types and (len(types) != count or {*types} - {"dense", "sparse"}):
        raise c.refusal("mlp_layer_types", f"dense or sparse for each of the {count} layers")
    return [one == "sparse" for one in types] if types else behind_dense(c, default)


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


def glm4_moe(c: Fields, share: float = 0.5, dense_layers: int = 1) -> Described:
    """Describe GLM-4.5 and 4.6, which rotate the first half of each head, and with other defaults Solar Open."""
    norm = rms_norm(c, 1e-5)
    qk_norm: Literal["head", "none"] = "head" if c.flag("use_qk_norm") else "none"
    rope, bias = read_rope(c, share=share), c.flag("attention_bias")
    mixer = attention(c, rope=rope, qk_norm=qk_norm, qkv_bias=bias, norm=norm)
    routed, sparse, norms = sigmoid_experts(c), behind_dense(c, dense_layers), Norms(norm=norm)
    blocks = [routed if one else dense(c) for one in sparse]
    return alike([mixer] * len(blocks), blocks, norms, head=head_behind(c, LayerSpec(mixer, routed, norms)))


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


def phimoe(c: Fields) -> Described:
    """Describe Phi-3.5-MoE, whose router weighs an expert against those with near logits alone (arXiv 2409.12136)."""
    if c.integer("num_experts_per_tok", 2) != 2:
        raise c.refusal("num_experts_per_tok", "2")
    norm, count, bias = layer_norm(c, bias=True, eps="rms_norm_eps"), num_layers(c), c.flag("attention_bias")
    rope, scaling = read_rope(c, theta=1e6), c.object("rope_scaling") or c.object("rope_parameters")
    if rope.kind == "longrope":
        held = dict(rope.scaling)
        name = "long_mscale" if held["factor"] > 1 else "short_mscale"
        rope = replace(rope, scaling=tuple(sorted({**held, "attention_factor": scaling.number(name)}.items())))
    elif rope.kind != "default":
        raise scaling.refusal("rope_type", "default or longrope")
    mixer = attention(c, c.optional("sliding_window"), rope=rope, qkv_bias=bias, o_bias=bias, norm=norm)
    block = experts(c, renormalize=False, near=2 * c.number("router_jitter_noise", 0.01, above=0), names=W1_W3_W2)
    return alike([mixer] * count, [block] * count, Norms(norm=norm), head_bias=c.flag("lm_head_bias"))


def olmoe(c: Fields, norms: Norms = USUAL, eps: float = 1e-5, **of_norm: bool) -> Described:
    """Describe OLMoE (arXiv 2409.02060), with experts in every layer and norms of all heads together, and with norms
    elsewhere FlexOlmo (arXiv 2507.07024)."""
    norm, count, bias = rms_norm(c, eps, **of_norm), num_layers(c), c.flag("attention_bias")
    if c.values.get("clip_qkv") is not None:  # it would follow the norms
        raise c.refusal("clip_qkv", "null")
    mixer = attention(c, qk_norm="wide", qkv_bias=bias, o_bias=bias, norm=norm)
    block = experts(c, "num_experts", renormalize=c.flag("norm_topk_prob"))
    return alike([mixer] * count, [block] * count, replace(norms, norm=norm))


flex_olmo = partial(olmoe, norms=BEHIND, eps=1e-6, rounds_once=True)


CHUNKS = ("full_attention", "chunked_attention")
"""kinds of layers of Llama 4"""


def llama4(c: Fields) -> Described:
    """Describe Llama 4, with routed experts and a shared one in every n-th layer. Layers that rotate see the keys of
    their chunk; every fourth does not, sees all keys, and its queries grow with their positions."""
    norm, bias, count = rms_norm(c, 1e-5), c.flag("attention_bias"), num_layers(c)
    tuned = c.values.get("attn_temperature_tuning", True)  # early files have a number
    if not isinstance(tuned, int):
        raise c.refusal("attn_temperature_tuning", "true or false")
    heat = Temperature(c.number("attn_scale"), c.integer("floor_scale"), first=1) if tuned else None
    rope = replace(read_rope(c, theta=500000.0), interleaved=True)
    rotated: dict[str, Any] = {"rope": rope, "qk_norm": "head" if c.flag("use_qk_norm", True) else "none"}
    plain: dict[str, Any] = {"rope": None, "temperature": heat}
    chunks = c.values["attention_chunk_size"] is not None
    turning = rotated_layers(c)
    usual = ["chunked_attention" if turns and chunks else "full_attention" for turns in turning]
    mixers = []
    for kind, turns in zip(layer_types(c, CHUNKS) or usual, turning, strict=True):
        chunk = c.integer("attention_chunk_size") if kind == "chunked_attention" else None
        own = {"chunked": chunk is not None, "qkv_bias": bias, "o_bias": bias, "norm": replace(norm, weight=False)}
        mixers.append(attention(c, chunk, **own, **(rotated if turns else plain)))
    names = ExpertNames("feed_forward", router="router")
    shared = c.integer("intermediate_size")
    routed = experts(c, renormalize=False, sigmoid=True, scales_input=True, intermediate_size=shared, names=names)
    unrouted = replace(dense(c, width="intermediate_size_mlp"), block="feed_forward")
    step = c.integer("interleave_moe_layer_step", 1)
    sparse = c.integers("moe_layers") if c.values.get("moe_layers") is not None else range(step - 1, count, step)
    blocks = [routed if layer in sparse else unrouted for layer in range(count)]
    vision = encoder(c, llama4_vision, c.integer("hidden_size"))
    return alike(mixers, blocks, Norms(norm=norm), vision_weights=vision)


def dots1(c: Fields) -> Described:
    """Describe dots.llm1, with windows as `layer_types` says, else from layer `max_window_layers` (62) on."""
    norm, bias, count = rms_norm(c), c.flag("attention_bias"), num_layers(c)
    first = c.integer("max_window_layers", 62, minimum=0)
    kinds = layer_types(c) or ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    mixers = [attention(c, window_of(c, kind), qk_norm="head", qkv_bias=bias, o_bias=bias, norm=norm) for kind in kinds]
    routed, plain = sigmoid_experts(c), dense(c)
    return alike(mixers, [routed if sparse else plain for sparse in behind_dense(c, 0)], Norms(norm=norm))


ERNIE_HEAD = {
    "embed_norm": "model.mtp_emb_norm.0", "hidden_norm": "model.mtp_hidden_norm.0", "fc": "model.mtp_linear_proj.0",
    "layer": "model.mtp_block.0",
}  # fmt: skip
"""Names of the parts of ERNIE's head for further tokens, which has no last norm"""


def ernie_moe(c: Fields) -> Described:
    """Describe ERNIE 4.5 with experts, which are chosen by a softmax and biases, in layers `moe_layer_start_index` to
    `moe_layer_end_index`."""
    norm, count = rms_norm(c, 1e-5), num_layers(c)
    if c.flag("use_bias"):
        raise c.refusal("use_bias", "false")
    if c.number("moe_norm_min", 1e-12) > 1e-9:  # below that no sum of a token's weights lies
        raise c.refusal("moe_norm_min", "at most 1e-9")
    mixer = attention(c, rope=replace(read_rope(c, theta=500000.0), interleaved=True), norm=norm)
    c = c.changed({"num_experts_per_tok": c.integer("moe_k", 6)})
    shared = c.integer("moe_intermediate_size") * c.integer("moe_num_shared_experts", 2, 0)
    names = replace(SHARED, selection="moe_statics.e_score_correction_bias")
    sizes = ("moe_num_experts", "moe_intermediate_size")
    routed, plain = experts(c, *sizes, selection_bias=True, intermediate_size=shared, names=names), dense(c)
    first, every = c.integer("moe_layer_start_index", 1, minimum=0), c.integer("moe_layer_interval", 1)
    last = c.integer("moe_layer_end_index", -1, minimum=-1)
    last = count - 1 if last == -1 else last
    blocks = [routed if first <= i <= last and (i + 1) % every == 0 else plain for i in range(count)]
    norms, own = Norms(norm=norm), c.integer("num_nextn_predict_layers", 0, 0)
    guesses = head(c, LayerSpec(mixer, plain, norms), ERNIE_HEAD, last_norm=None) if own else None
    return alike([mixer] * count, blocks, norms, head=guesses)


AFMOE_NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


def afmoe(c: Fields) -> Described:
    """Describe AFMoE (Trinity), with gates of attention's output, positions in layers with windows alone, four norms a
    layer, and experts chosen by sigmoids and biases."""
    norm, rope = rms_norm(c, 1e-5, rounds_once=True), read_rope(c)
    if c.flag("attention_bias"):
        raise c.refusal("attention_bias", "false")
    mixers = []
    for kind in every_nth(c, c.integer("global_attn_every_n_layers", 4)):
        window = window_of(c, kind, 1024)
        turns = rope if kind == "sliding_attention" else None
        gate = {"output_gate": True, "gate_linear": "gate_proj"}
        mixers.append(attention(c, window, rope=turns, qk_norm="head", norm=norm, **gate))
    shared = c.integer("num_shared_experts", 2, 0) * c.integer("moe_intermediate_size")
    names = ExpertNames(router="router.gate", shared="shared_experts", selection="expert_bias")
    routed = experts(
        c, "num_experts", "moe_intermediate_size", sigmoid=True, selection_bias=True,
        scaling=c.number("route_scale", 1.0), intermediate_size=shared, names=names,
    )  # fmt: skip
    first = c.integer("num_dense_layers", 1, 0)
    blocks = [dense(c) if layer < first else routed for layer in range(len(mixers))]
    scale = math.sqrt(c.integer("hidden_size")) if c.flag("mup_enabled") else 1.0
    return alike(mixers, blocks, replace(AFMOE_NORMS, norm=norm), embedding_scale=scale)


def exaone_moe(c: Fields) -> Described:
    """Describe K-EXAONE: the attention of EXAONE 4, norms where they usually are, and experts of DeepSeek's form."""
    norm, mixers = rms_norm(c, 1e-5), exaone4_attention(c)
    fields = {"n_routed_experts": c.integer("num_experts"), "n_shared_experts": c.integer("num_shared_experts", 1, 0)}
    routed = sigmoid_experts(c.changed(fields))
    routed = replace(routed, names=replace(SHARED, selection="e_score_correction_bias"))
    blocks = [routed if sparse else dense(c) for sparse in sparse_layers(c, 1)]
    return alike(mixers, blocks, Norms(norm=norm))


def mellum(c: Fields) -> Described:
    """Describe Mellum 2: Qwen3 with experts, windows as `layer_types` says, and a rope for each type of layer."""
    kinds = layer_types(c) or ["full_attention"] * num_layers(c)
    norm, bias = rms_norm(c), c.flag("attention_bias")
    mixers = [
        attention(
            c, window_of(c, kind, 1024), rope=rope_of_type(c, kind, 500000.0, 10000.0), qk_norm="head",
            qkv_bias=bias, o_bias=bias, norm=norm,
        )
        for kind in kinds
    ]  # fmt: skip
    renormalize = c.flag("norm_topk_prob", True)
    routed = experts(c, width="moe_intermediate_size", renormalize=renormalize)
    blocks = [routed if sparse else dense(c) for sparse in sparse_layers(c, 0)]
    return alike(mixers, blocks, Norms(norm=norm))


def cohere2_moe(c: Fields) -> Described:
    """Describe Command with experts: Command A's layers, whose first ones may be dense and then turn queries and keys
    whatever they see. The shared experts may count as much as all others."""
    norm = layer_norm(c) if c.values.get("rms_norm_eps") is None else rms_norm(c)
    first = c.integer("first_k_dense_replace", 0, 0)
    periods = (c.integer("prefix_dense_sliding_window_pattern", 1), c.integer("sliding_window_pattern", 4))
    places = [(i, periods[0]) if i < first else (i - first, periods[1]) for i in range(num_layers(c))]
    usual = ["sliding_attention" if (i + 1) % period else "full_attention" for i, period in places]
    rope, bias, sparse = replace(read_rope(c), interleaved=True), c.flag("attention_bias"), sparse_layers(c, 0)
    mixers = []
    for kind, chooses in zip(layer_types(c) or usual, sparse, strict=True):
        window, forced = window_of(c, kind), not chooses and periods[0] == 1
        turns = rope if window is not None or forced else None
        mixers.append(attention(c, window, rope=turns, qkv_bias=bias, o_bias=bias, norm=norm))
    strategy, chosen_by = (
        c.text("shared_expert_combination_strategy", "average"),
        c.text("expert_selection_fn", "softmax"),
    )
    if strategy not in ("sum", "average"):
        raise c.refusal("shared_expert_combination_strategy", "sum or average")
    if chosen_by not in ("softmax", "sigmoid"):
        raise c.refusal("expert_selection_fn", "softmax or sigmoid")
    shared = c.integer("num_shared_experts", 0, 0) * c.integer("intermediate_size")
    share = 0.5 if shared and strategy == "average" else 1.0
    routed = experts(
        c, "num_experts", renormalize=chosen_by == "softmax" or c.flag("norm_topk_prob", True),
        sigmoid=chosen_by == "sigmoid", intermediate_size=shared, scaling=share, halves_shared=share < 1, names=SHARED,
    )  # fmt: skip
    blocks = [routed if one else dense(c, width="prefix_dense_intermediate_size") for one in sparse]
    scale = c.number("logit_scale", 0.0625, above=0)
    return alike(mixers, blocks, replace(PARALLEL, norm=norm), logit_scale=scale)


# ---- Ling and Ring

LING = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""Their names of tensors -> ours"""


def bailing_moe2(c: Fields) -> Described:
    """Describe Ling 2 and Ring 2, with experts of DeepSeek's form."""
    if c.flag("use_bias"):
        raise c.refusal("use_bias", "false")
    if c.text("score_function", "sigmoid") != "sigmoid":
        raise c.refusal("score_function", "sigmoid")
    norm = rms_norm(c)
    qk_norm: Literal["head", "none"] = "head" if c.flag("use_qk_norm") else "none"
    share = c.integer("rotary_dim", head_dim(c), maximum=head_dim(c)) / head_dim(c)
    mixer = attention(c, rope=read_rope(c, share=share), qk_norm=qk_norm, qkv_bias=c.flag("use_qkv_bias"), norm=norm)
    shared = c.integer("num_shared_experts", 0, 0)
    c = c.changed({"n_routed_experts": c.integer("num_experts"), "n_shared_experts": shared})
    routed = sigmoid_experts(c)
    if c.values.get("moe_shared_expert_intermediate_size") is not None:
        routed = replace(routed, intermediate_size=shared * c.integer("moe_shared_expert_intermediate_size"))
    blocks = [routed if sparse else dense(c) for sparse in behind_dense(c, 0)]
    return alike([mixer] * len(blocks), blocks, Norms(norm=norm), names=LING)


# ---- Hunyuan


def hunyuan_moe(c: Fields) -> Described:
    """Describe Hunyuan-A13B, with experts and a shared one in every layer. Numbers of experts may be lists."""
    count, norm = num_layers(c), rms_norm(c, 1e-5)
    names = ExpertNames(router="gate.wg", shared="shared_mlp")

    def of_layer(name: str, layer: int, default: int | None = None) -> int:
        value = c.values.get(name)
        return c.integers(name, count)[layer] if isinstance(value, list) else c.integer(name, default)

    blocks = []
    for layer in range(count):
        width = of_layer("moe_intermediate_size", layer, c.integer("intermediate_size"))
        own = {"num_experts_per_tok": of_layer("moe_topk", layer), "moe_intermediate_size": width}
        own |= {"num_experts": of_layer("num_experts", layer)}
        shared = of_layer("num_shared_expert", layer, 1) * c.integer("intermediate_size")
        sizes = ("num_experts", "moe_intermediate_size")
        blocks.append(experts(c.changed(own), *sizes, intermediate_size=shared, names=names))
    return alike([hunyuan_attention(c)] * count, blocks, Norms(norm=norm), names=AFTER_TURNING)


def hunyuan3(c: Fields) -> Described:
    """Describe Hunyuan 3, whose experts are chosen by sigmoids and biases."""
    norm, bias = rms_norm(c, 1e-5), c.flag("attention_bias")
    if c.flag("mlp_bias"):
        raise c.refusal("mlp_bias", "false")
    mixer = attention(c, qk_norm="head", qkv_bias=bias, o_bias=bias, norm=norm)
    shared = c.integer("num_shared_experts", 1, 0) * c.integer("moe_intermediate_size")
    names = ExpertNames(router="router.gate", shared="shared_mlp", selection="expert_bias")
    routed = experts(
        c, "num_experts", "moe_intermediate_size", sigmoid=True, selection_bias=True,
        scaling=c.number("router_scaling_factor", 2.826), intermediate_size=shared, names=names,
    )  # fmt: skip
    blocks = [routed if sparse else dense(c) for sparse in sparse_layers(c, 1)]
    return alike([mixer] * len(blocks), blocks, Norms(norm=norm))
