"""What an attention backend is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec


class Backend(Protocol):
    """What it can serve, and inside which graphs, stands in table.py."""

    name: str

    def forward(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of q # [T, Hq, D] over kv_cache # [2, num_blocks, block_size, Hkv, D], whose blocks may lie apart,
        the step's own k and v already in it, divided by kv_scale # [2] if the cache is fp8; returns # [T, Hq, D]
        contiguous: `out` if given. Tokens of requests with seq_len 0 get zeros. One that serves sinks takes `sinks`
        # [Hq] too; one that serves latents, a cache # [1, num_blocks, block_size, 1, D], and returns
        # [T, Hq, latent_dim]. What all layers of a spec share is worked out once, and kept in `metadata.plan`."""
        ...


class FusedDecode(Protocol):
    """What a backend may offer beside: steps of one token a request in one launch."""

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """q # [R, Hq, D], k and v # [R, Hkv, D] as projected: norms and rotates them, writes k and v to the cache, and
        attends; -> # [R, Hq, D] contiguous."""
        ...
