"""Allocates the paged KV cache of one rank. Knows shapes and bytes, not who owns which block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels._triton import fp8_dtype

E4M3_CAPABILITY = (8, 9)
"""The first NVIDIA GPUs that convert e4m3"""


def cache_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type of a `kv_cache_dtype` that the planner settled. Raises ConfigError where `device` cannot."""
    if name == "fp8_e5m2":
        return torch.float8_e5m2
    if name != "fp8_e4m3":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype {name} needs an NVIDIA GPU of compute capability 8.9 or above, this one has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; use fp8_e5m2 or auto"
        )
    return fp8_dtype(device)


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
