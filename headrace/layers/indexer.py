"""Defines the index of sparse attention (DeepSeek-V3.2, arXiv 2512.02556), which chooses the keys that a query reads.

It has queries and keys of its own, of which the keys are cached. As long as queries see no more keys than it would
choose, it chooses nothing, and attention reads all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace import layer_parts, mixers
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.latent_config import MOST_SCORES
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear, column_spec
from headrace.layers.norm import LayerNorm
from headrace.layers.rotary import Angles

IndexInput = tuple[Tensor, Tensor, Tensor]
"""what `Indexer.forward` returns of a step's tokens, and how much each head counts # [num_tokens, heads]"""


class Indexer(Layer):
    """Computes one layer's index, the same on every rank."""

    def __init__(self, mixer: mixers.LatentAttention, spec: AttentionSpec, context: LayerContext) -> None:
        super().__init__()
        assert mixer.q_rank is not None
        assert mixer.sparse_top_k is not None
        self.heads, self.dim, self.top_k = mixer.index_heads, mixer.index_dim, mixer.sparse_top_k
        self.spec, self.interleaved = spec, mixer.index_interleaved
        outputs, kernels = self.heads * self.dim, context.kernels
        self.wq_b = Linear(column_spec(mixer.q_rank, [(None, outputs, outputs, 0)], context.dtype))
        self.k_norm = LayerNorm(self.dim, layer_parts.Norm("layer", bias=True), kernels, context.dtype)
        self.rotary_and_cache = kernels.rotary_and_cache
        self.index_scores, self.top_keys = kernels.index_scores, kernels.top_keys
        self.unscaled = torch.ones(2, device=context.device)
        """the scale of keys in an fp8 cache, which a norm keeps in its range"""

    def forward(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries # [num_tokens, heads * dim] made of their latents [num_tokens, q_rank], and the normed key
        # [num_tokens, dim]."""
        return self.wq_b(latent), self.k_norm(key)[0]

    def choose(
        self, index: IndexInput, index_keys: Tensor, metadata: AttentionMetadata, angles: Angles
    ) -> Tensor | None:
        """Write the keys of `index` to `index_keys` # [1, num_blocks, block_size, 1, dim], and return
        the positions of the keys that each query is to read # [num_tokens, sparse_top_k] int32, behind them -1 where
        it sees fewer; None: every query sees so few keys that it reads them all."""
        top_k, (q, key, weights) = self.top_k, index
        q, key = q.unflatten(1, (self.heads, self.dim)), key.unsqueeze(1)
        slots = metadata.slot_mappings[self.spec.group]
        scale = self.unscaled if index_keys.dtype.itemsize == 1 else None
        q = self.rotary_and_cache(
            q, key, None, angles.cos_sin, angles.positions, index_keys, slots, kv_scale=scale,
            interleaved=self.interleaved,
        )  # fmt: skip
        if metadata.max_seq_len <= top_k:
            return None
        chosen = torch.empty((len(q), top_k), dtype=torch.int32, device=q.device)
        sequences, longest = metadata.sequences(self.spec.group), -(-metadata.max_seq_len // 16) * 16
        rows = max(1, MOST_SCORES // longest)
        scores = torch.empty((min(rows, len(q)), longest), device=q.device)
        decodes = metadata.max_query_len == 1
        for first in range(0, len(q), rows):
            out = chosen[first : first + rows]
            part = self.index_scores(
                q, weights, index_keys, sequences, scores[: len(out)], first, top_k, decodes=decodes
            )
            self.top_keys(part, sequences, out, first)
        return chosen
