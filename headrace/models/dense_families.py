"""Describes dense families that differ from Llama in norms, rotation, windows or multipliers. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.feed_forwards import DenseMLP
from headrace.layer_parts import Norm, Norms, Rope
from headrace.mixers import Attention
from headrace.model_config import Fields, head_dim, num_layers
from headrace.models.descriptions import (
    Describe,
    Described,
    alike,
    attention,
    dense,
    head,
    layer_types,
    llama,
    rms_norm,
    rotated_layers,
)
from headrace.models.ropes import read_rope

USUAL = Norms()
"""norms before mixer and feed-forward"""
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
"""norms before and behind mixer and feed-forward"""
BEHIND = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
"""norms behind them alone"""
PARALLEL = Norms("input_layernorm", "", "", "", parallel=True)
"""one norm for both, which read the same"""


def every_nth(c: Fields, n: int) -> list[str]:
    """Return the type of each layer: as `layer_types` says, else a window in all but every n-th."""
    usual = ["sliding_attention" if (i + 1) % n else "full_attention" for i in range(num_layers(c))]
    return layer_types(c) or usual


def window_of(c: Fields, kind: str, default: int = 4096) -> int | None:
    """Return the window of layers of a type; `default` where the field is absent."""
    if kind == "full_attention":
        return None
    return c.optional("sliding_window") if "sliding_window" in c.values else default


def rope_of_type(c: Fields, kind: str, theta: float, local_theta: float | None = None) -> Rope:
    """Return the rope of layers of a type, where older files have one set, for full attention alone: windows then
    rotate by `local_theta`, unscaled."""
    nested = any(isinstance(value, dict) for value in c.object("rope_parameters").values.values())
    if kind == "full_attention" or nested:
        return read_rope(c, kind, theta if kind == "full_attention" else local_theta or theta)
    base = c.number("rope_theta", theta, above=1) if local_theta is None else local_theta
    return Rope(base)


# ---- Cohere


def cohere(c: Fields) -> Described:
    """Describe Command R: both branches of a layer read one norm, and heads may be normed by weights of their own."""
    norm, bias, count = layer_norm(c), c.flag("attention_bias"), num_layers(c)
    qk_norm = "heads" if c.flag("use_qk_norm") else "none"
    rope = replace(read_rope(c, theta=500000.0), interleaved=True)
    mixer = attention(c, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, norm=norm)
    return _cohere(c, [mixer] * count, norm)


def cohere2(c: Fields) -> Described:
    """Describe Command A and R7B: windows in three layers of four, and the fourth without positions."""
    norm, bias = layer_norm(c), c.flag("attention_bias")
    kinds = every_nth(c, c.integer("sliding_window_pattern", 4))
    rope = replace(read_rope(c), interleaved=True)
    mixers = []
    for kind in kinds:
        window = window_of(c, kind)
        turns = None if window is None else rope
        mixers.append(attention(c, window, rope=turns, qkv_bias=bias, o_bias=bias, norm=norm))
    return _cohere(c, mixers, norm)


def layer_norm(c: Fields, bias: bool = False, eps: str = "layer_norm_eps", plus_one: bool = False) -> Norm:
    """Return the layer norm of the epsilon in the field `eps`."""
    return Norm("layer", c.number(eps, 1e-5, above=0), bias=bias, plus_one=plus_one)


def _cohere(c: Fields, mixers: list[Any], norm: Norm) -> Described:
    scale = c.number("logit_scale", 0.0625, above=0)
    return alike(mixers, [dense(c)] * len(mixers), replace(PARALLEL, norm=norm), logit_scale=scale)


# ---- rotation of a part of each head


def glm(c: Fields, norms: Norms = USUAL) -> Described:
    """Describe GLM-4 of 2024, which rotates pairs of neighbours in the first half of each head."""
    norm, count = rms_norm(c, 1.5625e-7), num_layers(c)
    rope = replace(read_rope(c, share=0.5), interleaved=True)
    mixer = attention(c, rope=rope, qkv_bias=c.flag("attention_bias", True), norm=norm)
    return alike([mixer] * count, [dense(c)] * count, replace(norms, norm=norm))


GLM4_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm4(c: Fields) -> Described:
    """Describe GLM-4-0414: the same with norms behind mixer and feed-forward too."""
    return glm(c, GLM4_NORMS)


def phi3(c: Fields) -> Described:
    """Describe Phi-3 and Phi-4, whose checkpoints hold queries, keys and values as one linear."""
    norm, count = rms_norm(c, 1e-5), num_layers(c)
    mixer = attention(c, c.optional("sliding_window"), rope=read_rope(c), norm=norm)
    return alike([mixer] * count, [dense(c)] * count, Norms(norm=norm))


def stablelm(c: Fields) -> Described:
    """Describe StableLM, with layer norms."""
    if c.flag("qk_layernorm"):
        raise c.refusal("qk_layernorm", "false")
    norm, count = layer_norm(c, bias=True), num_layers(c)
    norms = PARALLEL if c.flag("use_parallel_residual") else USUAL
    mixer = attention(c, rope=read_rope(c, share=0.25), qkv_bias=c.flag("use_qkv_bias"), norm=norm)
    return alike([mixer] * count, [dense(c)] * count, replace(norms, norm=norm))


def phi(c: Fields) -> Described:
    """Describe Phi-1 and Phi-2: a layer norm for attention and feed-forward, half of each head rotated, and biases, of
    the head too."""
    for name in ("qk_layernorm", "tie_word_embeddings"):
        if c.flag(name):
            raise c.refusal(name, "false")
    norm, count = layer_norm(c, bias=True), num_layers(c)
    mixer = attention(c, rope=read_rope(c, share=0.5), qkv_bias=True, o_bias=True, norm=norm)
    block = dense(c, bias=True, gated=False, names=("fc1", "fc2"))
    names = ((".self_attn.dense.", ".self_attn.o_proj."), ("final_layernorm.", "norm."))
    return alike([mixer] * count, [block] * count, replace(PARALLEL, norm=norm), names=names, head_bias=True)


def interleaved(c: Fields, theta: float, eps: float, bias: str, o_bias: bool, **of_norm: bool) -> Described:
    """Describe Llama with neighbours rotated together, as Helium and ERNIE 4.5 are. `bias`: the field that says whether
    linears have biases; `o_bias`: those of attention's output and of the feed-forward do too."""
    norm, count, biased = rms_norm(c, eps, **of_norm), num_layers(c), c.flag(bias)
    rope = replace(read_rope(c, theta=theta), interleaved=True)
    mixer = attention(c, rope=rope, qkv_bias=biased, o_bias=biased and o_bias, norm=norm)
    mlp_bias = biased if o_bias else c.flag("mlp_bias")
    return alike([mixer] * count, [dense(c, mlp_bias)] * count, Norms(norm=norm))


# ---- feed-forwards without a gate


def arcee(c: Fields) -> Described:
    """Describe Arcee's AFM: Llama with a feed-forward without a gate."""
    return _ungated(llama(c), dense(c, c.flag("mlp_bias"), gated=False))


def apertus(c: Fields) -> Described:
    """Describe Apertus (arXiv 2509.14233), with norms of heads and an activation that has learned numbers."""
    norm, bias, rope = rms_norm(c, 1e-5), c.flag("attention_bias"), read_rope(c, theta=12e6)
    mixer = attention(c, rope=rope, qk_norm="head", qkv_bias=bias, o_bias=bias, norm=norm)
    norms = Norms("attention_layernorm", "", "feedforward_layernorm", norm=norm)
    return alike([mixer] * num_layers(c), [dense(c, gated=False)] * num_layers(c), norms)


def nemotron(c: Fields) -> Described:
    """Describe Nemotron-4 and Minitron, with layer norms and half of each head rotated."""
    norm, bias = layer_norm(c, bias=True, eps="norm_eps", plus_one=True), c.flag("attention_bias")
    mixer = attention(c, rope=read_rope(c, share=0.5), qkv_bias=bias, o_bias=bias, norm=norm)
    return _alike(c, mixer, dense(c, c.flag("mlp_bias"), gated=False), norm)


def jais2(c: Fields) -> Described:
    """Describe Jais 2, with layer norms and biases."""
    norm, bias = layer_norm(c, bias=True), c.flag("attention_bias", True)
    mixer = attention(c, qkv_bias=bias, o_bias=bias, norm=norm)
    return _alike(c, mixer, dense(c, c.flag("mlp_bias", True), gated=False), norm)


def starcoder2(c: Fields) -> Described:
    """Describe StarCoder 2 (arXiv 2402.19173), with layer norms and biases."""
    norm, bias = layer_norm(c, bias=True, eps="norm_epsilon"), c.flag("use_bias", True)
    mixer = attention(c, c.optional("sliding_window"), qkv_bias=bias, o_bias=bias, norm=norm)
    return _alike(c, mixer, dense(c, bias, gated=False, names=("c_fc", "c_proj")), norm)


STARCODER2: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
"""Values of fields that config.json may leave out"""


def _ungated(plain: Described, block: DenseMLP) -> Described:
    return replace(plain, layers=tuple(replace(layer, feed_forward=block) for layer in plain.layers))


def _alike(c: Fields, mixer: Attention, block: DenseMLP, norm: Norm) -> Described:
    return alike([mixer] * num_layers(c), [block] * num_layers(c), Norms(norm=norm))


# ---- norms elsewhere, layers without positions


def olmo(c: Fields) -> Described:
    """Describe OLMo, with layer norms without weights."""
    norm, bias, count = Norm("layer", 1e-5, weight=False), c.flag("attention_bias"), num_layers(c)
    clip = None if c.values.get("clip_qkv") is None else c.number("clip_qkv", above=0)
    mixer = attention(c, qkv_bias=bias, o_bias=bias, norm=norm, clip=clip)
    return alike([mixer] * count, [dense(c)] * count, Norms(norm=norm))


def olmo2(c: Fields) -> Described:
    """Describe OLMo 2: norms behind mixer and feed-forward, and one of all heads."""
    return _olmo2(c, ["full_attention"] * num_layers(c), lambda kind: read_rope(c))


def olmo3(c: Fields) -> Described:
    """Describe OLMo 3: OLMo 2 with windows in three layers of four, whose rope is not scaled."""
    return _olmo2(c, every_nth(c, 4), lambda kind: rope_of_type(c, kind, 500000.0))


def _olmo2(c: Fields, kinds: list[str], rope: Callable[[str], Rope]) -> Described:
    norm, bias = rms_norm(c, 1e-5, rounds_once=True), c.flag("attention_bias")
    changes: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": "wide", "norm": norm}
    mixers = {kind: attention(c, window_of(c, kind), rope=rope(kind), **changes) for kind in {*kinds}}
    return alike([mixers[kind] for kind in kinds], [dense(c)] * len(kinds), replace(BEHIND, norm=norm))


def exaone4(c: Fields) -> Described:
    """Describe EXAONE 4: norms behind mixer and feed-forward."""
    mixers = exaone4_attention(c)
    return alike(mixers, [dense(c)] * len(mixers), replace(BEHIND, norm=rms_norm(c, 1e-5)))


def exaone4_attention(c: Fields) -> list[Attention]:
    """Return the attention of each layer: where some layers have windows, the others have no positions."""
    norm, mixers = rms_norm(c, 1e-5), []
    slides = c.values.get("sliding_window") is not None
    pattern = c.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # such as LLLG
        pattern = len(pattern)
        c = c.changed({"sliding_window_pattern": pattern})
    kinds = every_nth(c, c.integer("sliding_window_pattern", 4)) if slides else ["full_attention"] * num_layers(c)
    for kind in kinds:
        rope = read_rope(c) if kind == "sliding_attention" or not slides else None
        mixers.append(attention(c, window_of(c, kind), rope=rope, qk_norm="head", norm=norm))
    return mixers


def smollm3(c: Fields) -> Described:
    """Describe SmolLM3: Llama with every fourth layer without positions."""
    count, norm, bias = num_layers(c), rms_norm(c), c.flag("attention_bias")
    rotates = rotated_layers(c)
    slides = c.flag("use_sliding_window") and c.values.get("sliding_window") is not None
    usual = ["sliding_attention" if slides and not turns else "full_attention" for turns in rotates]
    rope, mixers = read_rope(c, theta=2e6), []
    for kind, turns in zip(layer_types(c) or usual, rotates, strict=True):
        window = c.optional("sliding_window") if slides and kind == "sliding_attention" else None
        mixers.append(attention(c, window, rope=rope if turns else None, qkv_bias=bias, o_bias=bias, norm=norm))
    return alike(mixers, [dense(c, c.flag("mlp_bias"))] * count, Norms(norm=norm))


def cwm_window(c: Fields) -> list[int | None]:
    """Follow CWM: windows as `layer_types` says, else in all but every fourth layer, from the first."""
    kinds = layer_types(c) or ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers(c))]
    return [window_of(c, kind, 8192) for kind in kinds]


def ministral_window(c: Fields) -> list[int | None]:
    """Follow Ministral: windows as `layer_types` says, else everywhere."""
    kinds = layer_types(c) or ["sliding_attention"] * num_layers(c)
    return [window_of(c, kind) for kind in kinds]


# ---- norms behind the rotation

AFTER_TURNING = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
"""Hunyuan's names of norms of heads -> ours"""


def hunyuan(c: Fields) -> Described:
    """Describe Hunyuan's dense models: Llama with norms of queries and keys that are rotated."""
    norm = rms_norm(c, 1e-5)
    mixer, count = hunyuan_attention(c), num_layers(c)
    return alike([mixer] * count, [dense(c)] * count, Norms(norm=norm), names=AFTER_TURNING)


def hunyuan_attention(c: Fields) -> Attention:
    """Return Hunyuan's attention. Where its rope is dynamic and has an `alpha`, that stretches the base whatever the
    length."""
    scaling, bias, rope = (
        c.object("rope_scaling") or c.object("rope_parameters"),
        c.flag("attention_bias"),
        read_rope(c),
    )
    if rope.kind == "dynamic" and scaling.values.get("alpha"):
        dim = head_dim(c)
        rope = Rope(rope.theta * scaling.number("alpha", above=0) ** (dim / (dim - 2)))
    return attention(c, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm="head", norm_last=True, norm=rms_norm(c, 1e-5))


# ---- heads for further tokens

MIMO_HEAD = {
    "embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "fc": "input_proj", "norm": "final_layernorm",
}  # fmt: skip
"""Names of the parts of MiMo's head for further tokens, beside its layer"""


def with_mimo_head(describe: Describe, c: Fields) -> Described:
    """Return what `describe` says, with MiMo's head for further tokens (arXiv 2505.07608)."""
    described, of = describe(c), "model.mtp_layers.0"
    if not c.integer("num_nextn_predict_layers", 0, 0):
        return described
    paths = {part: f"{of}.{name}" for part, name in MIMO_HEAD.items()} | {"layer": of}
    own = head(c, described.layers[-1], paths, joins="hidden_first", hands_on_normed=True)
    return replace(described, head=own)
