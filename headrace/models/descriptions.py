"""What each family's layers are made of, read from the fields of its config.json.

A description is a function from fields to layers. It imports no torch, so that a family can be planned before there are
modules that serve it. The table of families is registry.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from headrace.model_config import Fields, head_dim, num_layers
from headrace.model_spec import (
    Attention,
    DenseMLP,
    ExpertNames,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
)
from headrace.models.encoders import Config, gemma3_vision, kimi_vision, llama4_vision, qwen3_vision


@dataclass(frozen=True)
class Described:
    layers: tuple[LayerSpec, ...]
    vision_weights: int = 0
    draft_weights: int = 0


Describe = Callable[[Fields], Described]
"""Raises UnsupportedModelError for a field that is missing or holds no value of its kind."""
Windows = Callable[[Fields], list[int | None]]
"""-> each layer's sliding window: the keys a query may look back on, itself included; None: all"""


def attention(c: Fields, window: int | None = None, **changes: Any) -> Attention:
    """Grouped-query attention with the sizes that most families name alike."""
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", heads)
    return Attention(c.integer("hidden_size"), heads, kv_heads, head_dim(c), window, **changes)


def dense(c: Fields, bias: bool = False, width: str = "intermediate_size") -> DenseMLP:
    return DenseMLP(c.integer("hidden_size"), c.integer(width), bias)


# ---- sliding windows


def no_window(c: Fields) -> list[int | None]:
    return [None] * num_layers(c)


def same_window(c: Fields) -> list[int | None]:
    """Mistral's rule: `sliding_window` on every layer (4096 where the field is absent, none where it is null)."""
    return [_window(c)] * num_layers(c)


def upper_window(c: Fields) -> list[int | None]:
    """Qwen's rule: `layer_types` if given, else the layers from `max_window_layers` (28) on; only with
    `use_sliding_window`."""
    first = c.integer("max_window_layers", 28, minimum=0)
    usual = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers(c))]
    return _typed_windows(c, usual)


def raw_window(c: Fields) -> list[int | None]:
    """Mixtral's rule: `sliding_window` on every layer, none where the field is absent."""
    return [c.optional("sliding_window")] * num_layers(c)


def switched_window(c: Fields) -> list[int | None]:
    """Qwen3-MoE's rule: `sliding_window` (4096) on every layer, only with `use_sliding_window`."""
    return [_switched(c)] * num_layers(c)


def alternate_window(c: Fields) -> list[int | None]:
    """Qwen2-MoE's rule: `layer_types` if given, else every other layer below `max_window_layers` (28), from the first;
    only with `use_sliding_window`."""
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


def layer_types(c: Fields) -> list[str]:
    """One for each layer; empty where config.json names none."""
    types, count = c.texts("layer_types"), num_layers(c)
    if types and (len(types) != count or {*types} - {"full_attention", "sliding_attention"}):
        raise c.refusal("layer_types", f"full_attention or sliding_attention for each of the {count} layers")
    return types


# ---- the Llama family and those shaped like it

FeedForwards = Callable[[Fields, bool], list[FeedForward]]
"""(fields, whether dense ones have biases) -> each layer's"""


def all_dense(c: Fields, bias: bool) -> list[FeedForward]:
    return [dense(c, bias)] * num_layers(c)


def mixtral_experts(c: Fields, bias: bool) -> list[FeedForward]:
    count = c.integer("num_local_experts")
    one = Experts(
        hidden_size=c.integer("hidden_size"),
        num_experts=count,
        experts_per_token=c.integer("num_experts_per_tok", maximum=count),
        expert_intermediate_size=c.integer("intermediate_size"),
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )
    return [one] * num_layers(c)


def qwen_experts(c: Fields, bias: bool, shared: bool = False) -> list[FeedForward]:
    """Every `decoder_sparse_step`-th layer but `mlp_only_layers`. transformers 5 writes `num_local_experts`."""
    renamed = c.values.get("num_experts") is None and "num_local_experts" in c.values
    count = c.integer("num_local_experts" if renamed else "num_experts")
    step, plain = c.integer("decoder_sparse_step", 1), c.integers("mlp_only_layers")
    one = Experts(
        hidden_size=c.integer("hidden_size"),
        num_experts=count,
        experts_per_token=c.integer("num_experts_per_tok", maximum=count),
        expert_intermediate_size=c.integer("moe_intermediate_size"),
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
    qk_norm: Literal["none", "head"] = "none",
    feed_forwards: FeedForwards = all_dense,
) -> Described:
    """Llama, and with other windows, biases, norms and experts Mistral, Mixtral and Qwen 2 and 3. A bias that is None
    is as config.json's `attention_bias` or `mlp_bias` says."""

    def biased(quirk: bool | None, name: str) -> bool:
        return c.flag(name) if quirk is None else quirk

    biases = {"qkv_bias": biased(qkv_bias, "attention_bias"), "o_bias": biased(o_bias, "attention_bias")}
    mixers = [attention(c, window, qk_norm=qk_norm, **biases) for window in windows(c)]
    blocks = feed_forwards(c, biased(mlp_bias, "mlp_bias"))
    return Described(tuple(map(LayerSpec, mixers, blocks)))


# ---- families that have no modules yet


def _routed(c: Fields, experts: int, width: int, shared_width: int = 0, bias: bool = False, **names: str) -> Experts:
    return Experts(
        hidden_size=c.integer("hidden_size"),
        num_experts=experts,
        experts_per_token=c.integer("num_experts_per_tok", maximum=experts),
        expert_intermediate_size=width,
        intermediate_size=shared_width,
        bias=bias,
        names=ExpertNames(**names),
    )


_LISTS_OF_ENCODERS = {"merge_kernel_size": 2, "deepstack_visual_indexes": 0}
"""and how many integers they have at least"""


class _Encoder(Config):
    """`vision_config` for encoders.py: whatever is looked up is a size, or a list of integers."""

    def __init__(self, vision: Fields) -> None:
        super().__init__(vision.values)
        self._vision = vision

    def __getitem__(self, name: str) -> Any:
        least = _LISTS_OF_ENCODERS.get(name)
        return self._vision.integer(name) if least is None else self._vision.integers(name, least)


def _encoder(c: Fields, count: Callable[..., int], *sizes: int) -> int:
    """Parameters of the vision encoder, 0 where there is none."""
    vision = c.object("vision_config")
    return count(_Encoder(vision), *sizes) if vision else 0


def _latent(c: Fields) -> LatentAttention:
    q_rank, top_k = c.optional("q_lora_rank"), c.optional("index_topk")
    indexed = top_k is not None
    if indexed:
        q_rank = c.integer("q_lora_rank")
    return LatentAttention(
        hidden_size=c.integer("hidden_size"),
        num_heads=c.integer("num_attention_heads"),
        latent_dim=c.integer("kv_lora_rank"),
        rope_dim=c.integer("qk_rope_head_dim"),
        nope_dim=c.integer("qk_nope_head_dim"),
        v_head_dim=c.integer("v_head_dim"),
        q_rank=q_rank,
        sparse_top_k=top_k,
        index_heads=c.integer("index_n_heads") if indexed else 0,
        index_dim=c.integer("index_head_dim") if indexed else 0,
    )


def deepseek(c: Fields) -> Described:
    """Dense layers first, then experts and shared ones; layers for further tokens are drafts (their embedding and head
    are the model's own)."""
    hidden, width = c.integer("hidden_size"), c.integer("moe_intermediate_size")
    mixer, first = _latent(c), c.integer("first_k_dense_replace", minimum=0)
    shared = width * c.integer("n_shared_experts", 0, 0)
    routed = _routed(c, c.integer("n_routed_experts"), width, shared, shared="shared_experts")
    plain = dense(c)
    layers = tuple(LayerSpec(mixer, plain if i < first else routed) for i in range(num_layers(c)))
    draft = LayerSpec(mixer, routed).weights + 2 * hidden**2 + 3 * hidden
    return Described(layers, _encoder(c, kimi_vision, hidden), c.integer("num_nextn_predict_layers", 0, 0) * draft)


def llama4(c: Fields) -> Described:
    """Experts in every n-th layer beside a shared one; every fourth layer sees all keys, without positions, the others
    those of their chunk."""
    width, step = c.integer("intermediate_size"), c.integer("interleave_moe_layer_step")
    everything, chunked = attention(c, rotary=False), attention(c, c.optional("attention_chunk_size"), chunked=True)
    routed = _routed(c, c.integer("num_local_experts"), width, width, block="feed_forward", router="router")
    plain = dense(c, width="intermediate_size_mlp")
    layers = tuple(
        LayerSpec(chunked if (i + 1) % 4 else everything, plain if (i + 1) % step else routed)
        for i in range(num_layers(c))
    )
    return Described(layers, _encoder(c, llama4_vision, c.integer("hidden_size")))


def gpt_oss(c: Fields) -> Described:
    """Windows in every other layer, from the first; sinks; biases everywhere."""
    kinds = c.texts("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(c))]
    window = c.optional("sliding_window")
    sliding, full = (attention(c, keys, qkv_bias=True, o_bias=True, sinks=True) for keys in (window, None))
    experts = _routed(c, c.integer("num_local_experts"), c.integer("intermediate_size"), bias=True, router="router")
    return Described(tuple(LayerSpec(sliding if kind == "sliding_attention" else full, experts) for kind in kinds))


def gemma3(c: Fields) -> Described:
    """Five layers with a window, then one without; four norms a layer."""
    pattern = c.integer("sliding_window_pattern")
    sliding, full = attention(c, c.integer("sliding_window"), qk_norm="head"), attention(c, qk_norm="head")
    block = dense(c)
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    names = tuple(f"{name}_layernorm" for name in norms)
    layers = tuple(LayerSpec(sliding if (i + 1) % pattern else full, block, names) for i in range(num_layers(c)))
    return Described(layers, _encoder(c, gemma3_vision, c.integer("hidden_size")))


def minimax(c: Fields) -> Described:
    """Experts in every layer. The layers for further tokens that config.json speaks of are in no checkpoint."""
    mixer = attention(c, qk_norm="wide" if c.flag("use_qk_norm", True) else "none")
    experts = _routed(
        c, c.integer("num_local_experts"), c.integer("intermediate_size"), block="block_sparse_moe", gate="w1", up="w3",
        down="w2",
    )  # fmt: skip
    return Described((LayerSpec(mixer, experts),) * num_layers(c))


GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
"""what Gemma 3's config.json leaves out"""


def qwen3_vl(c: Fields) -> Described:
    """Qwen3-MoE behind a vision encoder."""
    text = llama(c, switched_window, mlp_bias=False, qk_norm="head", feed_forwards=qwen_experts)
    return Described(text.layers, _encoder(c, qwen3_vision))
