"""Self-attention over the paged KV cache: project, rotate and cache, attend, project back."""

from __future__ import annotations

from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.table import AttentionSpec
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import QKVParallelLinear, RowParallelLinear
from headrace.layers.norm import RMSNorm
from headrace.model_config import ModelConfig

Angles = tuple[Tensor, Tensor | None]
"""What the kernel table's `step_angles` made of the rope table and the step's positions."""


class Attention(Layer):
    def __init__(
        self,
        config: ModelConfig,
        spec: AttentionSpec,
        context: LayerContext,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
    ) -> None:
        """`spec` says what is on this rank; `qk_norm`: RMS norm over each head of q and k before rotating."""
        super().__init__()
        group, dtype, width = context.mesh.tp, context.dtype, config.num_heads * config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, group, dtype, qkv_bias
        )
        self.o_proj = RowParallelLinear(width, config.hidden_size, group, dtype, o_bias)
        if qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context.kernels, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context.kernels, dtype)
        self.qk_norm = qk_norm
        self.eps = config.rms_norm_eps
        self.spec = spec
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.rotary_and_cache = context.kernels.rotary_and_cache
        self.attend = context.backend.forward
        self.decode = None if spec.batch_invariant else getattr(context.backend, "decode", None)
        """attention/backend.FusedDecode, where the backend has it; it sums in another order than prompts do"""

    def forward(self, x: Tensor, angles: Angles, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same; this step's keys and values go into `kv_cache`."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.spec.head_dim)
        q, k, v = qkv.split(self.heads, dim=1)
        norms = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else (None, None)
        if metadata.max_query_len == 1 and self.decode is not None and metadata.cut is None:
            attended = self.decode(q, k, v, angles[0], kv_cache, metadata, self.spec, *norms, self.eps)
            return self.o_proj(attended.view(x.shape[0], -1))
        q = self.rotary_and_cache(q, k, v, *angles, kv_cache, metadata.slot_mapping, *norms, self.eps)
        if metadata.cut is None:
            attended = self.attend(q, kv_cache, metadata, self.spec)
        else:
            attended = metadata.cut(self.attend, q, kv_cache, self.spec)
        return self.o_proj(attended.view(x.shape[0], -1))
