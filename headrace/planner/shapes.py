"""What a model weighs and caches, layer by layer, counted from its config.json alone.

Pure arithmetic on published fields: no weights are looked at. Knows nothing of GPUs, of weight formats' bytes, nor of how
layers are spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError

PARTS = ("attention", "dense", "experts")
"""What a weight format may apply to"""


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention. Of `weights`, `kv_weights` are split over KV heads, `replicated_weights` are on every rank,
    and what is left is split over query heads."""

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


@dataclass(frozen=True)
class ModelShape:
    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    groups: tuple[LayerGroup, ...]
    embedding_weights: int
    head_weights: int
    """0: the embedding serves as head"""
    extra_weights: int
    """not read by a step of text: vision encoder, layers that predict further tokens"""
    dtype: str
    """bfloat16, float16 or float32: of activations, and of weights without a format"""
    weight_format: str
    """as the checkpoint holds the linears: bf16 (the dtype as it is), fp8, mxfp4, int4, int8"""
    source: str
    """where config.json comes from"""
    final_weights: int = 0
    """the last norm"""
    draft_weights: int = 0
    """of `extra_weights`: layers that predict further tokens, loaded for speculation alone"""
    format_parts: tuple[str, ...] = PARTS
    """what the checkpoint holds in `weight_format`; the rest is in `dtype`"""
    fp8_kv_cache: bool = False
    """the checkpoint brings scales for an fp8 cache"""

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def total_weights(self) -> int:
        layers = sum(group.weights for group in self.groups)
        return layers + self.embedding_weights + self.head_weights + self.final_weights + self.extra_weights

    @property
    def active_weights(self) -> int:
        """Parameters that one token reads: one row of the embedding, the chosen experts, the head."""
        layers = sum(group.active_weights for group in self.groups)
        head = self.head_weights or self.embedding_weights
        return layers + self.hidden_size + head + self.final_weights

    @property
    def is_moe(self) -> bool:
        return any(group.mlp.num_experts for group in self.groups)

    @property
    def is_mla(self) -> bool:
        return any(group.attention.kind == "mla" for group in self.groups)

    @property
    def num_experts(self) -> int:
        return max(group.mlp.num_experts for group in self.groups)

    @property
    def num_heads(self) -> int:
        return max(group.attention.num_heads for group in self.groups)

    @property
    def num_kv_heads(self) -> int:
        return max(group.attention.num_kv_heads for group in self.groups)

    @property
    def intermediate_size(self) -> int:
        """of the widest dense MLP or shared experts; 0 where there are none"""
        return max(group.mlp.intermediate_size for group in self.groups)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers cached for a token in all layers together, windows not counted."""
        return sum(group.count * group.attention.kv_values for group in self.groups)

    @property
    def quantizable(self) -> int:
        """Parameters that a weight format may apply to: linears of attention, MLPs and experts, not router, norms, biases,
        embedding and head."""
        return sum(
            group.count
            * (
                group.attention.weights
                - group.attention.plain_weights
                + group.mlp.dense_weights
                - group.mlp.router_weights
                + group.mlp.num_experts * (group.mlp.expert_weights - group.mlp.expert_plain_weights)
            )
            for group in self.groups
        )

    def parts_in(self, weight_format: str) -> tuple[str, ...]:
        """The parts that are held in `weight_format` when it is asked for: as the checkpoint has it, else all."""
        return self.format_parts if weight_format == self.weight_format else PARTS


def shape_of(config: dict[str, Any], name: str) -> ModelShape:
    """Count a raw config.json. Raises ConfigError naming the architecture where no family here knows it."""
    raise ConfigError(f"{name}: not counted yet: {config.get('architectures')}")
