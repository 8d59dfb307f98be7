"""Defines multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads share a token's latent and one key.

Queries are projected into the latent's space (the absorbed form), in prompts and decodes alike, so that no head's own
keys and values are ever made: attention sees one KV head, whose values are the latent part of its keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace import model_spec
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.distributed.mesh import Group
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, column_spec
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.layers.rotary import Angles


def _absorbed(x: Any, residual: Tensor | None) -> Tensor:
    raise RuntimeError("an absorbed linear layer is applied by its two weights alone")


class AbsorbedLinear(ColumnParallelLinear):
    """Holds kv_b_proj, which would turn latents into keys and values, as two weights: the first is applied to queries
    instead, the second to attention's output."""

    to_latent: Tensor
    """# [num_heads, nope_dim, latent_dim]"""
    from_latent: Tensor
    """# [num_heads, latent_dim, v_head_dim]"""

    def __init__(self, mixer: model_spec.LatentAttention, group: Group, dtype: torch.dtype) -> None:
        self.nope_dim, self.per_head = mixer.nope_dim, mixer.nope_dim + mixer.v_head_dim
        super().__init__(mixer.latent_dim, mixer.num_heads * self.per_head, group, dtype, bias=False)

    def finalize(self) -> None:
        device, latent = next(iter(self.weights.values())).device, self.spec.in_features
        super().finalize()
        units = torch.eye(latent, dtype=self.spec.dtype, device=device)
        heads = self.compute(units, None).view(latent, -1, self.per_head)  # the weight, whatever its format
        self.to_latent = heads[..., : self.nope_dim].permute(1, 2, 0).contiguous()
        self.from_latent = heads[..., self.nope_dim :].transpose(0, 1).contiguous()
        self.weights, self.compute = {}, _absorbed  # nothing else needs the weight as it was loaded


class LatentAttention(Layer):
    """Computes one layer's latent attention on one rank."""

    opaque = ("_queries_and_key", "_rotate_and_attend", "_values")

    def __init__(self, mixer: model_spec.LatentAttention, spec: AttentionSpec, context: LayerContext) -> None:
        """Build the layer that `mixer` describes; this rank has the heads that `spec` says."""
        super().__init__()
        eps = mixer.norm.eps
        group, dtype, hidden, q_rank = context.mesh.tp, context.dtype, mixer.hidden_size, mixer.q_rank
        self.mixer, self.spec = mixer, spec
        self.cached = mixer.latent_dim + mixer.rope_dim
        if q_rank is None:
            self.q_width = spec.num_heads * mixer.head_dim
            q = ("q_proj", mixer.num_heads * mixer.head_dim, self.q_width, group.rank)
        else:
            self.q_width = q_rank
            q = ("q_a_proj", q_rank, q_rank, 0)
            self.q_a_layernorm = RMSNorm(q_rank, eps, context.kernels, dtype)
            self.q_b_proj = ColumnParallelLinear(q_rank, mixer.num_heads * mixer.head_dim, group, dtype, bias=False)
        kv = ("kv_a_proj_with_mqa", self.cached, self.cached, 0)
        self.qkv_a_proj = Linear(column_spec(hidden, (q, kv), dtype))
        self.kv_a_layernorm = RMSNorm(mixer.latent_dim, eps, context.kernels, dtype)
        self.kv_b_proj = AbsorbedLinear(mixer, group, dtype)
        self.o_proj = RowParallelLinear(mixer.num_heads * mixer.v_head_dim, hidden, group, dtype, bias=False)
        self.rotary_and_cache = context.kernels.rotary_and_cache
        self.attend = context.backend.forward

    def forward(self, x: Any, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor | Pending:
        """Return attention's output for x [num_tokens, hidden_size], of the same shape; write latents and keys to
        `kv_cache` # [1, num_blocks, block_size, 1, rope_dim + latent_dim]. `angles` are those of rope_dim."""
        qkv = self.qkv_a_proj(x)
        q, kv = qkv[:, : self.q_width], qkv[:, self.q_width :]
        if self.mixer.q_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q.contiguous())[0])
        qk = self._queries_and_key(q, kv)
        if metadata.cut is None:
            attended = self._rotate_and_attend(qk, kv_cache, metadata, angles)
        else:
            shape = (self.spec.num_heads, self.mixer.latent_dim)
            attended = metadata.cut(self._rotate_and_attend, qk, kv_cache, metadata, angles, shape=shape)
        return self.o_proj(self._values(attended))

    def _queries_and_key(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return # [num_tokens, num_heads + 1, rope_dim + latent_dim]: queries in the latent's space, then the key that
        is cached. In each, what will be rotated comes first."""
        heads, nope, latent = self.spec.num_heads, self.mixer.nope_dim, self.mixer.latent_dim
        q = q.view(-1, heads, self.mixer.head_dim)
        qk = q.new_empty((len(q), heads + 1, self.cached))
        qk[:, :heads, :-latent] = q[..., nope:]
        qk[:, :heads, -latent:] = torch.einsum("thn,hnl->thl", q[..., :nope], self.kv_b_proj.to_latent)
        qk[:, heads, :-latent] = kv[:, latent:]
        qk[:, heads, -latent:] = self.kv_a_layernorm(kv[:, :latent])[0]
        return qk

    def _rotate_and_attend(
        self, qk: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, angles: Angles, out: Tensor | None = None
    ) -> Tensor:
        """Return # [num_tokens, num_heads, latent_dim]."""
        q, key = qk[:, :-1], qk[:, -1:]
        cos_sin, positions, _ = angles
        slots = metadata.slot_mappings[self.spec.group]
        turned = self.spec.interleaved
        q = self.rotary_and_cache(q, key, None, cos_sin, positions, kv_cache, slots, interleaved=turned)
        return self.attend(q, kv_cache, metadata, self.spec, None, out)

    def _values(self, attended: Tensor) -> Tensor:
        """Return # [num_tokens, num_heads * v_head_dim]."""
        return torch.einsum("thl,hlv->thv", attended, self.kv_b_proj.from_latent).flatten(1)
