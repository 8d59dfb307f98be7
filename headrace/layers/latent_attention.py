"""Defines multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads share a token's latent and one key.

What is cached of a token is its latent, normed, and the rotated part of its key. The attention backend decides whether
it projects queries into the latent's space (the absorbed form) or each head's own keys and values out of it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace import mixers
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.distributed.mesh import Group
from headrace.kernels.latent import LatentHeads
from headrace.layers.context import LayerContext
from headrace.layers.indexer import Indexer
from headrace.layers.layer import Layer
from headrace.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, column_spec
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.layers.rotary import NO_ANGLES, Angles


def _not_applied(x: Any, residual: Tensor | None) -> Tensor:
    raise RuntimeError("kv_b_proj is applied by attention alone")


class HeadsOfLatents(ColumnParallelLinear):
    """Holds kv_b_proj, which turns latents into keys and values, as attention applies it: in the model's type, whatever
    the checkpoint's format."""

    applied = False
    heads: LatentHeads

    def __init__(self, mixer: mixers.LatentAttention, group: Group, dtype: torch.dtype) -> None:
        self.nope_dim, self.per_head = mixer.nope_dim, mixer.nope_dim + mixer.v_head_dim
        super().__init__(mixer.latent_dim, mixer.num_heads * self.per_head, group, dtype, bias=False)

    def finalize(self) -> None:
        weight = self.scheme.layout.dequantize(self.spec, self.weights)["weight"].to(self.spec.dtype)
        self.heads = LatentHeads(weight.view(-1, self.per_head, self.spec.in_features), self.nope_dim)
        self.weights, self.compute = {"weight": weight}, _not_applied  # nothing needs the weight as it was loaded


CHOSEN = "chosen keys"
"""where a step's plan keeps which keys the last layer with an index has chosen, for it and for layers without"""


class LatentAttention(Layer):
    """Computes one layer's latent attention on one rank."""

    opaque = ("_rotated", "_attend")

    def __init__(self, mixer: mixers.LatentAttention, spec: AttentionSpec, context: LayerContext) -> None:
        """Build the layer that `mixer` describes; this rank has the heads that `spec` says."""
        super().__init__()
        eps = mixer.norm.eps
        group, dtype, hidden, q_rank = context.mesh.tp, context.dtype, mixer.hidden_size, mixer.q_rank
        self.mixer, self.spec, self.turns = mixer, spec, mixer.turns
        self.heated = self.turns is not None and self.turns.temperature is not None
        if q_rank is None:
            self.q_width = spec.num_heads * mixer.head_dim
            q = ("q_proj", mixer.num_heads * mixer.head_dim, self.q_width, group.rank)
        else:
            self.q_width = q_rank
            q = ("q_a_proj", q_rank, q_rank, 0)
            self.q_a_layernorm = RMSNorm(q_rank, eps, context.kernels, dtype)
            self.q_b_proj = ColumnParallelLinear(q_rank, mixer.num_heads * mixer.head_dim, group, dtype, bias=False)
        parts = [q, ("kv_a_proj_with_mqa", mixer.latent_values, mixer.latent_values, 0)]
        self.indexer: Indexer | None = None
        if mixer.index_heads:
            self.indexer = Indexer(mixer, spec, context)
            keys, heads = mixer.index_dim, mixer.index_heads
            # in an order in which as many as may be begin at a multiple of a format's blocks
            parts[1:] = [("indexer.wk", keys, keys, 0), parts[1], ("indexer.weights_proj", heads, heads, 0)]
        self.widths = [width for _, _, width, _ in parts]
        self.qkv_a_proj = Linear(column_spec(hidden, parts, dtype, mixer.bias))
        self.kv_a_layernorm = RMSNorm(mixer.latent_dim, eps, context.kernels, dtype)
        self.kv_b_proj = HeadsOfLatents(mixer, group, dtype)
        self.o_proj = RowParallelLinear(mixer.num_heads * mixer.v_head_dim, hidden, group, dtype, mixer.bias)
        self.rotary_and_cache = context.kernels.latent_rotary_and_cache
        self.attend = context.backend.latent
        self.kv_scale: Tensor | None = None
        """[2] float32: what numbers in an fp8 cache are multiplied by (the first one); constant once loading is over"""

    def create_weights(self, device: torch.device) -> None:
        super().create_weights(device)
        if self.spec.quantized_cache:
            self.kv_scale = torch.full((2,), torch.nan, device=device)  # NaN: the checkpoint brings none

    def forward(self, x: Any, angles: Angles, metadata: AttentionMetadata, kv_cache: Any) -> Tensor | Pending:
        """Return attention's output for x [num_tokens, hidden_size], of the same shape; write latents and keys to
        `kv_cache` # [1, num_blocks, block_size, 1, rope_dim + latent_dim], or with an index to the first of two, whose
        second has its keys. `angles` are those of rope_dim."""
        qkv = self.qkv_a_proj(x)
        ends = accumulate(self.widths)
        q, *others = (qkv[:, end - width : end] for end, width in zip(ends, self.widths, strict=True))
        kv, latent = others[len(others) // 2], None
        index: Any = ()
        if self.mixer.q_rank is not None:
            latent = self.q_a_layernorm(q)[0]
            q = self.q_b_proj(latent)
        if self.indexer is not None:
            kv_cache, index_keys = kv_cache
            index = *self.indexer(latent, others[0]), others[2], index_keys, angles
        q = self._rotated(q, kv, kv_cache, metadata, angles)
        if metadata.cut is None:
            attended = self._attend(q, kv_cache, metadata, *index)
        else:
            shape = (self.spec.num_heads, self.mixer.v_head_dim)
            attended = metadata.cut(self._attend, q, kv_cache, metadata, *index, shape=shape)
        return self.o_proj(attended.view(x.shape[0], -1))

    def _rotated(self, q: Tensor, kv: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, angles: Angles) -> Tensor:
        """Rotate queries, write latents and keys to the cache; return # [num_tokens, num_heads, head_dim]."""
        q = q.view(-1, self.spec.num_heads, self.mixer.head_dim)
        cos_sin, positions, temperature = angles
        slots, weight = metadata.slot_mappings[self.spec.group], self.kv_a_layernorm.weight
        return self.rotary_and_cache(
            q, kv, weight, self.kv_a_layernorm.eps, cos_sin, positions, kv_cache, slots, self.kv_scale,
            self.spec.interleaved, temperature,
        )  # fmt: skip

    def _attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        index_q: Tensor | None = None,
        index_key: Tensor | None = None,
        index_weights: Tensor | None = None,
        index_keys: Tensor | None = None,
        angles: Angles = NO_ANGLES,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return # [num_tokens, num_heads, v_head_dim]; `index_...`: what the layer's own index makes of the tokens,
        and its cache."""
        chosen = None
        if self.spec.sparse_top_k is not None:
            if self.indexer is not None:
                assert index_q is not None
                assert index_key is not None
                assert index_weights is not None
                assert index_keys is not None
                index = index_q, index_key, index_weights
                metadata.plan[CHOSEN] = self.indexer.choose(index, index_keys, metadata, angles)
            chosen = metadata.plan[CHOSEN]
        return self.attend(q, self.kv_b_proj.heads, kv_cache, metadata, self.spec, self.kv_scale, out, chosen)
