"""Allocates the paged KV cache of one rank. Knows shapes and bytes, not who owns which block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVCacheShape:
    num_layers: int
    num_kv_heads: int
    """on this rank"""
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        elements = 2 * self.block_size * self.num_kv_heads * self.head_dim
        return self.num_layers * elements * self.dtype.itemsize


def allocate_kv_cache(shape: KVCacheShape, num_blocks: int, device: torch.device) -> list[Tensor]:
    """One tensor a layer # [2 (K, V), num_blocks + 1, block_size, num_kv_heads, head_dim].

    The extra block at the end is scratch for padding. Zeroed: uninitialized memory may hold NaN, and a masked
    probability of zero times NaN is NaN.
    """
    size = (2, num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
