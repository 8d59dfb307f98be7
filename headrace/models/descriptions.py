"""Describes the layers of each family from the fields of its config.json.

A description is a function from fields to layers. It imports no torch, so that a family can be planned before there are
modules that serve it. The table of families is in registry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from headrace.feed_forwards import Activation, DenseMLP, ExpertNames, Experts, FeedForward
from headrace.layer_parts import Norm, Norms, Rope, TextEmbedding
from headrace.mixers import Attention, Mixer
from headrace.model_config import Fields, head_dim, num_layers
from headrace.model_spec import HeadSpec, LayerSpec
from headrace.models.ropes import read_rope, read_temperature


@dataclass(frozen=True)
class Described:
    """Holds what a description says of a model."""

    layers: tuple[LayerSpec, ...]
    vision_weights: int = 0
    head: HeadSpec | None = None
    norm: Norm = Norm()
    """the last one"""
    ends_normed: bool = False
    """the last layer norms its output, so that there is no last norm"""
    text_embedding: TextEmbedding | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logit_scale: float = 1.0
    head_bias: bool = False
    logit_cap: float | None = None
    names: tuple[tuple[str, str], ...] = ()
    """(part of a tensor's name in published files, what it is here)"""
    transposed: tuple[str, ...] = ()
    """ends of the names, in published files, of weights that are there [in, out]"""


Describe = Callable[[Fields], Described]
"""Describes a model. Raises UnsupportedModelError for a field that is missing or has no valid value."""
Windows = Callable[[Fields], list[int | None]]
"""Gives each layer's sliding window, the keys that a query sees, its own included; None: all keys"""


def attention(c: Fields, window: int | None = None, **changes: Any) -> Attention:
    """Return grouped-query attention, whose sizes most families name alike, and which rotates whole heads."""
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    if "rope" not in changes:
        changes["rope"] = whole_rope(c)
    return Attention(c.integer("hidden_size"), heads, kv_heads, head_dim(c), window, **changes)


def whole_rope(c: Fields, theta: float = 10000.0) -> Rope:
    """Return the rope of families that rotate whole heads; `theta`: that of files without one."""
    rope = read_rope(c, theta=theta)
    if rope.share != 1.0:
        raise c.refusal("partial_rotary_factor", "1.0")
    return rope


def rms_norm(c: Fields, default: float = 1e-6, **changes: Any) -> Norm:
    """Return the RMS norm of the epsilon in `rms_norm_eps`, `default` where the field is absent, with `changes`."""
    eps = c.number("rms_norm_eps", None if "rms_norm_eps" in c.values else default, above=0)
    return Norm(eps=eps, **changes)


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "xielu": "xielu",
    "relu2": "relu2",
}
"""what config.json calls an activation -> what it is here"""


def dense(
    c: Fields, bias: bool = False, width: str = "intermediate_size", activation: str = "hidden_act", **changes: Any
) -> DenseMLP:
    """Return a dense feed-forward of the width and activation in the fields `width` and `activation`."""
    name = c.text(activation, "silu")
    if name not in ACTIVATIONS:
        raise c.refusal(activation, f"one of {', '.join(ACTIVATIONS)}")
    if name == "xielu" and changes.get("gated", True):
        raise c.refusal(activation, "another activation for a feed-forward with a gate")
    return DenseMLP(c.integer("hidden_size"), c.integer(width), bias, ACTIVATIONS[name], **changes)


def experts(c: Fields, count: str = "num_local_experts", width: str = "intermediate_size", **changes: Any) -> Experts:
    """Return a mixture of experts, whose number and width are in the fields `count` and `width`."""
    if c.text("hidden_act", "silu") not in ("silu", "swish"):
        raise c.refusal("hidden_act", "silu")
    number = c.integer(count)
    per_token = c.integer("num_experts_per_tok", maximum=number)
    return Experts(c.integer("hidden_size"), number, per_token, c.integer(width), **changes)


W1_W3_W2 = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
"""Names of experts in the checkpoints of Mixtral and MiniMax"""


# ---- sliding windows


def no_window(c: Fields) -> list[int | None]:
    """Let every layer see all keys."""
    return [None] * num_layers(c)


def same_window(c: Fields) -> list[int | None]:
    """Follow Mistral: `sliding_window` on every layer (4096 where the field is absent, none where it is null)."""
    return [_window(c)] * num_layers(c)


def upper_window(c: Fields) -> list[int | None]:
    """Follow Qwen: windows as `layer_types` says, else from layer `max_window_layers` (28) on; only with
    `use_sliding_window`."""
    first = c.integer("max_window_layers", 28, minimum=0)
    usual = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers(c))]
    return _typed_windows(c, usual)


def raw_window(c: Fields) -> list[int | None]:
    """Follow Mixtral: `sliding_window` on every layer, none where the field is absent."""
    return [c.optional("sliding_window")] * num_layers(c)


def switched_window(c: Fields) -> list[int | None]:
    """Follow Qwen3-MoE: `sliding_window` (4096) on every layer, only with `use_sliding_window`."""
    return [_switched(c)] * num_layers(c)


def alternate_window(c: Fields) -> list[int | None]:
    """Follow Qwen2-MoE: windows as `layer_types` says, else in every other layer below `max_window_layers` (28), from
    the first; only with `use_sliding_window`."""
    below = c.integer("max_window_layers", 28, minimum=0)
    usual = ["sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in range(num_layers(c))]
    return _typed_windows(c, usual)


def _window(c: Fields) -> int | None:
    return c.optional("sliding_window") if "sliding_window" in c.values else 4096


def _switched(c: Fields) -> int | None:
    return _window(c) if c.flag("use_sliding_window") else None


def _typed_windows(c: Fields, usual: list[str]) -> list[int | None]:
    window = _switched(c)
    return [window if kind == "sliding_attention" else None for kind in layer_types(c) or usual]


def layer_types(c: Fields, kinds: Sequence[str] = ("full_attention", "sliding_attention")) -> list[str]:
    """Return the type of each layer, one of `kinds`; empty where config.json names none."""
    types, count = c.texts("layer_types"), num_layers(c)
    if types and (len(types) != count or {*types} - {*kinds}):
        raise c.refusal("layer_types", f"{' or '.join(kinds)} for each of the {count} layers")
    return types


def rotated_layers(c: Fields) -> list[int]:
    """Return 1 for each layer that rotates queries and keys, else 0: as `no_rope_layers` says, else 0 for every
    `no_rope_layer_interval`-th layer (4)."""
    count, interval = num_layers(c), c.integer("no_rope_layer_interval", 4)
    rotates = c.integers("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if len(rotates) < count:
        raise c.refusal("no_rope_layers", f"a number for each of the {count} layers")
    return rotates[:count]


# ---- the Llama family and those shaped like it

FeedForwards = Callable[[Fields, bool], list[FeedForward]]
"""Gives each layer's feed-forward from the fields and whether dense ones have biases"""


def all_dense(c: Fields, bias: bool) -> list[FeedForward]:
    """Give every layer a dense feed-forward."""
    return [dense(c, bias)] * num_layers(c)


def mixtral_experts(c: Fields, bias: bool) -> list[FeedForward]:
    """Give every layer experts."""
    return [experts(c, names=W1_W3_W2)] * num_layers(c)


def qwen_experts(c: Fields, bias: bool, shared: bool = False) -> list[FeedForward]:
    """Give experts to every `decoder_sparse_step`-th layer except `mlp_only_layers`, and a dense feed-forward to the
    others. (transformers 5 writes `num_local_experts` for `num_experts`.)"""
    renamed = c.values.get("num_experts") is None and "num_local_experts" in c.values
    step, plain = c.integer("decoder_sparse_step", 1), c.integers("mlp_only_layers")
    one = experts(
        c,
        "num_local_experts" if renamed else "num_experts",
        "moe_intermediate_size",
        renormalize=c.flag("norm_topk_prob"),
        intermediate_size=c.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )
    return [one if (i + 1) % step == 0 and i not in plain else dense(c, bias) for i in range(num_layers(c))]


qwen_experts_and_shared = partial(qwen_experts, shared=True)


def llama(
    c: Fields,
    windows: Windows = no_window,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    mlp_bias: bool | None = None,
    o_bias_field: str = "attention_bias",
    qk_norm: Literal["none", "head", "wide"] = "none",
    theta: float = 10000.0,
    feed_forwards: FeedForwards = all_dense,
) -> Described:
    """Describe Llama, and with other windows, biases, norms and feed-forwards Mistral, Mixtral, Qwen 2 and Qwen 3.

    A bias that is None follows config.json's `attention_bias` (that of attention's output: `o_bias_field`) or
    `mlp_bias`. Embedders made of such models may see later tokens too: `is_causal` is false.
    """

    def biased(quirk: bool | None, name: str) -> bool:
        return c.flag(name) if quirk is None else quirk

    norm, rope = rms_norm(c), whole_rope(c, theta)
    biases = {"qkv_bias": biased(qkv_bias, "attention_bias"), "o_bias": biased(o_bias, o_bias_field)}
    causal, temperature = c.flag("is_causal", True), read_temperature(c)
    if not causal and any(windows(c)):  # how far such a window reaches behind a token is not said
        raise c.refusal("is_causal", "true with sliding windows")
    mixers = [
        attention(c, window, rope=rope, qk_norm=qk_norm, norm=norm, temperature=temperature, causal=causal, **biases)
        for window in windows(c)
    ]
    blocks = feed_forwards(c, biased(mlp_bias, "mlp_bias"))
    return alike(mixers, blocks, Norms(norm=norm))


def alike(mixers: Sequence[Mixer], blocks: Sequence[FeedForward], norms: Norms, **of_model: Any) -> Described:
    """Return a model whose layers have norms in the same places, and whose last norm is like theirs. `of_model`:
    further fields of Described."""
    layers = tuple(LayerSpec(mixer, block, norms) for mixer, block in zip(mixers, blocks, strict=True))
    return Described(layers, norm=norms.norm, **of_model)


def head(c: Fields, layer: LayerSpec, paths: Mapping[str, str], **changes: Any) -> HeadSpec:
    """Return a head that a model's own checkpoint holds, one layer of which guesses further tokens (DeepSeek V3, arXiv
    2412.19437). `paths`: its parts -> their names in the checkpoint."""
    norms: dict[str, Any] = {"input_norm": layer.norms.norm, "last_norm": layer.norms.norm} | changes
    positions = c.integer("max_position_embeddings", 2048)
    return HeadSpec(layer, positions, paths=tuple(paths.items()), in_model=True, **norms)


def head_behind(c: Fields, layer: LayerSpec) -> HeadSpec | None:
    """Return the head of checkpoints in DeepSeek's form: the first of the layers behind the model's own; None: there
    is none."""
    if not c.integer("num_nextn_predict_layers", 0, 0):
        return None
    of = f"model.layers.{num_layers(c)}"
    parts = {"embed_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
    paths = {part: f"{of}.{name}" for part, name in parts.items()} | {"layer": of}
    return head(c, layer, paths, shared=(f"{of}.embed_tokens.", f"{of}.shared_head.head."))


def gpt_oss(c: Fields) -> Described:
    """Describe gpt-oss, with windows in every other layer from the first, sinks, and biases everywhere."""
    kinds = layer_types(c) or ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(c))]
    window = c.optional("sliding_window") if "sliding_window" in c.values else 128
    bias = c.flag("attention_bias", True)
    norm = rms_norm(c, rounds_once=True)
    sliding, full = (attention(c, keys, qkv_bias=bias, o_bias=bias, sinks=True, norm=norm) for keys in (window, None))
    clamp = c.number("swiglu_alpha", 1.702), c.number("swiglu_limit", 7.0, above=0)
    names = ExpertNames(router="router", stacked="gate_up_proj")
    block = experts(c, bias=True, clamp=clamp, names=names)
    mixers = [sliding if kind == "sliding_attention" else full for kind in kinds]
    return alike(mixers, [block] * len(kinds), Norms(norm=norm))


def encoder(c: Fields, count: Callable[..., int], *sizes: int) -> int:
    """Return the parameters of the vision encoder, 0 where there is none."""
    vision = c.object("vision_config")
    return count(vision, *sizes) if vision else 0
