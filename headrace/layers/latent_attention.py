"""Multi-head latent attention (DeepSeek-V2): of a token, one latent and one rotated key are cached for all heads.

Queries are brought to the latent's side, so that a head's own keys and values are never made, in prompts and decodes
alike: attention sees one KV head, whose values are the latent's part of its keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace import model_spec
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.distributed.mesh import Group
from headrace.layers.attention import Angles
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.quantization.scheme import LinearSpec, Part


class AbsorbedLinear(ColumnParallelLinear):
    """What would make a latent's keys and values, used from its other side: on queries, and on what was attended to."""

    to_latent: Tensor
    """# [num_heads, nope_dim, latent_dim]"""
    from_latent: Tensor
    """# [num_heads, latent_dim, v_head_dim]"""

    def __init__(self, mixer: model_spec.LatentAttention, group: Group, dtype: torch.dtype) -> None:
        self.nope_dim, self.per_head = mixer.nope_dim, mixer.nope_dim + mixer.v_head_dim
        super().__init__(mixer.latent_dim, mixer.num_heads * self.per_head, group, dtype, bias=False)

    def finalize(self) -> None:
        device, latent = self.weights["weight"].device, self.spec.in_features
        super().finalize()
        units = torch.eye(latent, dtype=self.spec.dtype, device=device)
        heads = self.compute(units, None).view(latent, -1, self.per_head)  # the weight, whatever its format
        self.to_latent = heads[..., : self.nope_dim].permute(1, 2, 0).contiguous()
        self.from_latent = heads[..., self.nope_dim :].transpose(0, 1).contiguous()


class LatentAttention(Layer):
    opaque = ("_queries_and_key", "_rotate_and_attend", "_values")

    def __init__(
        self, mixer: model_spec.LatentAttention, spec: AttentionSpec, context: LayerContext, eps: float
    ) -> None:
        """`mixer` describes the layer, `spec` what of it is on this rank; `eps` is of norms."""
        super().__init__()
        group, dtype, hidden, q_rank = context.mesh.tp, context.dtype, mixer.hidden_size, mixer.q_rank
        self.mixer, self.spec = mixer, spec
        self.cached = mixer.latent_dim + mixer.rope_dim
        own = spec.num_heads * mixer.head_dim
        columns = slice(0, hidden)
        if q_rank is None:
            rows, self.q_width = slice(group.rank * own, (group.rank + 1) * own), own
            q = Part("q_proj", (mixer.num_heads * mixer.head_dim, hidden), rows, columns, 0)
        else:
            q, self.q_width = Part("q_a_proj", (q_rank, hidden), slice(0, q_rank), columns, 0), q_rank
            self.q_a_layernorm = RMSNorm(q_rank, eps, context.kernels, dtype)
            self.q_b_proj = ColumnParallelLinear(q_rank, mixer.num_heads * mixer.head_dim, group, dtype, bias=False)
        kv = Part("kv_a_proj_with_mqa", (self.cached, hidden), slice(0, self.cached), columns, self.q_width)
        self.qkv_a_proj = Linear(LinearSpec(hidden, self.q_width + self.cached, (q, kv), dtype))
        self.kv_a_layernorm = RMSNorm(mixer.latent_dim, eps, context.kernels, dtype)
        self.kv_b_proj = AbsorbedLinear(mixer, group, dtype)
        self.o_proj = RowParallelLinear(mixer.num_heads * mixer.v_head_dim, hidden, group, dtype, bias=False)
        self.rotary_and_cache = context.kernels.rotary_and_cache
        self.attend = context.backend.forward

    def forward(self, x: Any, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor | Pending:
        """x [num_tokens, hidden_size] -> the same; this step's latents and keys go into `kv_cache`
        # [1, num_blocks, block_size, 1, rope_dim + latent_dim]. `angles` are of rope_dim."""
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
        """# [num_tokens, num_heads + 1, rope_dim + latent_dim]: queries on the latent's side, then the key that is
        cached. What will be rotated comes first."""
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
        """-> # [num_tokens, num_heads, latent_dim]"""
        q, key = qk[:, :-1], qk[:, -1:]
        q = self.rotary_and_cache(q, key, None, *angles, kv_cache, metadata.slot_mappings[self.spec.group])
        return self.attend(q, kv_cache, metadata, self.spec, None, out)

    def _values(self, attended: Tensor) -> Tensor:
        """-> # [num_tokens, num_heads * v_head_dim]"""
        return torch.einsum("thl,hlv->thv", attended, self.kv_b_proj.from_latent).flatten(1)
