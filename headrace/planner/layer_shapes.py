"""What one layer of a model weighs and caches, counted from fields of config.json.

The arithmetic that families share: attention of either kind, dense and sparse MLPs. Knows no family. Fields that are
missing or no sizes raise UnsupportedModelError, as their reader does.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.model_config import Fields, head_dim


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention. Of `weights`, `kv_weights` are split over KV heads, `replicated_weights` are on every
    rank, and what is left is split over query heads."""

    kind: str
    """gqa, mla (a latent shared by all heads) or linear (no cache that grows)"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """of queries and keys"""
    v_head_dim: int
    window: int | None
    """keys a query sees at most; None: all"""
    weights: int
    """parameters, all in all"""
    kv_values: int
    """numbers cached for a token (gqa: K and V; mla: latent, rotary part, and index keys)"""
    sparse_top_k: int | None = None
    """keys that are attended to after an index has chosen them; None: all in the window"""
    kv_weights: int = 0
    """of `weights`: the projections to K and V"""
    replicated_weights: int = 0
    """of `weights`: what every rank holds whole (down projections of latents, the indexer, norms of Q and K)"""
    plain_weights: int = 0
    """of `weights`: biases, norms, sinks: in the model's dtype whatever the weight format"""


@dataclass(frozen=True)
class MlpShape:
    dense_weights: int
    """parameters that every token uses: dense MLP, shared experts, router"""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    """of one expert"""
    router_weights: int = 0
    """of `dense_weights`: on every rank, in the model's dtype whatever the weight format"""
    expert_plain_weights: int = 0
    """of `expert_weights`: biases"""
    intermediate_size: int = 0
    """width of the dense MLP, or of all shared experts together"""
    expert_intermediate_size: int = 0

    @property
    def all_expert_weights(self) -> int:
        return self.num_experts * self.expert_weights

    @property
    def weights(self) -> int:
        return self.dense_weights + self.all_expert_weights

    @property
    def active_weights(self) -> int:
        return self.dense_weights + self.experts_per_token * self.expert_weights


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike, wherever they stand."""

    count: int
    attention: AttentionShape
    mlp: MlpShape
    other_weights: int
    """norms of one layer"""

    @property
    def weights(self) -> int:
        return self.count * (self.attention.weights + self.mlp.weights + self.other_weights)

    @property
    def active_weights(self) -> int:
        return self.count * (self.attention.weights + self.mlp.active_weights + self.other_weights)


def gqa(
    c: Fields,
    window: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    head_norms: bool = False,
    wide_norms: bool = False,
    sinks: bool = False,
) -> AttentionShape:
    """Grouped-query attention. `head_norms`: Q and K are normed a head at a time, `wide_norms`: all heads at once."""
    hidden, heads, dim = c.integer("hidden_size"), c.integer("num_attention_heads"), head_dim(c)
    kv_heads = c.integer("num_key_value_heads")
    q, kv = heads * dim, kv_heads * dim
    biases = (q + 2 * kv if qkv_bias else 0) + (hidden if o_bias else 0)
    norms = 2 * dim if head_norms else q + kv if wide_norms else 0
    return AttentionShape(
        kind="gqa",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        window=window,
        weights=2 * hidden * (q + kv) + biases + norms + (heads if sinks else 0),
        kv_values=2 * kv,
        kv_weights=2 * hidden * kv + (2 * kv if qkv_bias else 0),
        replicated_weights=(hidden if o_bias else 0) + (2 * dim if head_norms else 0),
        plain_weights=biases + norms + (heads if sinks else 0),
    )


def mla(c: Fields) -> AttentionShape:
    """DeepSeek's: keys and values come from a latent; with `index_topk`, an indexer chooses the keys."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    latent, q_rank = c.integer("kv_lora_rank"), c.optional("q_lora_rank")
    rope, nope, v_dim = c.integer("qk_rope_head_dim"), c.integer("qk_nope_head_dim"), c.integer("v_head_dim")
    q = heads * (nope + rope)
    up = (q_rank or hidden) * q + latent * heads * (nope + v_dim) + heads * v_dim * hidden
    norms = latent + (q_rank or 0)
    down = hidden * (latent + rope) + hidden * (q_rank or 0) + norms
    top_k, keys, index_plain, index = c.optional("index_topk"), 0, 0, 0
    if top_k is not None:
        index_heads, keys = c.integer("index_n_heads"), c.integer("index_head_dim")
        index_plain = 2 * keys + hidden * index_heads
        index = c.integer("q_lora_rank") * index_heads * keys + hidden * keys + index_plain
    return AttentionShape(
        kind="mla",
        num_heads=heads,
        num_kv_heads=1,
        head_dim=nope + rope,
        v_head_dim=v_dim,
        window=None,
        weights=up + down + index,
        kv_values=latent + rope + keys,
        sparse_top_k=top_k,
        replicated_weights=down + index,
        plain_weights=norms + index_plain,
    )


def dense(hidden: int, intermediate: int, bias: bool = False) -> MlpShape:
    weights = 3 * hidden * intermediate + (2 * intermediate + hidden if bias else 0)
    return MlpShape(dense_weights=weights, intermediate_size=intermediate)


def sparse(
    hidden: int, num: int, chosen: int, intermediate: int, shared: int = 0, router: int = 0, bias: bool = False
) -> MlpShape:
    """`shared`: width of all shared experts together; `router`: its parameters beside one row an expert."""
    expert_bias = 2 * intermediate + hidden if bias else 0
    router += hidden * num + (num if bias else 0)
    return MlpShape(
        dense_weights=router + 3 * hidden * shared,
        num_experts=num,
        experts_per_token=chosen,
        expert_weights=3 * hidden * intermediate + expert_bias,
        router_weights=router,
        expert_plain_weights=expert_bias,
        intermediate_size=shared,
        expert_intermediate_size=intermediate,
    )
