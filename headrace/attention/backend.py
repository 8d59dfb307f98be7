"""Defines what an attention backend is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.latent import LatentHeads


class Backend(Protocol):
    """Computes attention over the paged cache. table.py says which layers it can serve, and inside which graphs.

    A backend may also have `decode`, for steps of one token a request in one launch (triton_attn.py), which serves the
    same layers.
    """

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
        """Attend with q # [T, Hq, D] to kv_cache # [2, num_blocks, block_size, Hkv, D], whose blocks may lie apart.

        The step's own keys and values are already in the cache, divided by kv_scale # [2] if it is fp8. Returns
        # [T, Hq, D] contiguous, which is `out` if given. Tokens of requests with seq_len 0 get zeros. A backend that
        serves sinks takes `sinks` # [Hq] too. What the layers of a spec share is kept in `metadata.plan`.
        """
        ...

    def latent(
        self,
        q: Tensor,
        heads: LatentHeads,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attend with q # [T, Hq, nope_dim + rope_dim], rotated, to latents # [1, num_blocks, block_size, 1, D] of
        which `heads` makes keys and values; return # [T, Hq, v_head_dim], which is `out` if given.

        A row of the cache is the rotated part of a key and its latent. With `chosen` # [T, n] int32 a query sees those
        positions of its own request alone, in any order; -1 stands behind the last one, and a query at position p has
        at most p + 1 of them. All else is as in `forward`, and kv_scale[0] is that of all numbers.
        """
        ...
