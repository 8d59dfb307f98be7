"""Allocates the caches of a rank's layers in one arena. The scheduler knows which request owns which block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.attention.spec import AttentionSpec
from headrace.cache_groups import CacheLayout, cache_layout
from headrace.errors import ConfigError
from headrace.kernels._triton import fp8_dtype
from headrace.model_spec import STATE_BYTES, ModelSpec
from headrace.step import SchedulerOutput

E4M3_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs that convert e4m3"""


def cache_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch type of a `kv_cache_dtype` that the planner has resolved. Raises ConfigError where `device` has
    no such type."""
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
class CacheShape:
    """Describes what the layers of one rank cache."""

    layout: CacheLayout
    specs: tuple[AttentionSpec | None, ...]
    """of each layer; None: the layer caches a recurrent state, or nothing"""
    dtype: torch.dtype
    """of keys and values"""
    num_drafting: int = 0
    """how many of the layers, the last ones, are not the model's own but guess tokens"""

    @property
    def num_layers(self) -> int:
        return len(self.specs)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def block(self, layer: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and type of what a block holds of a layer.

        The shape is (planes, block_size, num_kv_heads, head_dim), whose planes are K and V, or a latent alone, and (1,
        numbers) for a recurrent state.
        """
        spec = self.specs[layer]
        if spec is None:
            group = self.layout.groups[self.layout.group_of[layer]]
            return (1, group.block_bytes // len(group.layers) // STATE_BYTES), torch.float32
        planes = 1 if spec.latent_dim is not None else 2
        return (planes, spec.block_size, spec.num_kv_heads, spec.head_dim), self.dtype


def cache_shape(
    model: ModelSpec,
    specs: tuple[AttentionSpec | None, ...],
    ranks: int,
    block_size: int,
    dtype: torch.dtype,
    num_drafting: int = 0,
) -> CacheShape:
    """Return what one of `ranks` caches, whose layers have the attention `specs`."""
    return CacheShape(cache_layout(model, ranks, dtype.itemsize, block_size), specs, dtype, num_drafting)


@dataclass(frozen=True)
class KVCache:
    """Holds the arena, and each layer's cache as a view of it."""

    shape: CacheShape
    arena: Tensor
    """[num_pages + 1, page_bytes] uint8; the last page is scratch for padding"""
    layers: list[Tensor | None]
    """[2 (K, V), num_blocks, block_size, num_kv_heads, head_dim] for attention, [1, ...] for latent attention, whose
    values are part of its keys; [num_blocks, numbers] float32 for a recurrent state; None: the layer caches nothing"""

    @property
    def of_model(self) -> list[Tensor | None]:
        """The caches of the model's own layers."""
        return self.layers[: len(self.layers) - self.shape.num_drafting]

    @property
    def of_drafter(self) -> list[Tensor | None]:
        """The caches of the layers that guess tokens."""
        return self.layers[len(self.layers) - self.shape.num_drafting :]

    @property
    def scratch_blocks(self) -> list[int]:
        """The first block of the scratch page, for each group."""
        return [(len(self.arena) - 1) * group.blocks_per_page for group in self.shape.layout.groups]

    def prepare(self, step: SchedulerOutput) -> None:
        """Clear pages that pass to another group and copy states, before the step computes."""
        for page in step.cleared_pages:
            self.arena[page].zero_()
        for copy in step.state_copies:
            blocks = self.arena.view(-1, self.shape.layout.groups[copy.group].block_stride)
            blocks[copy.target].copy_(blocks[copy.source])


def allocate_kv_cache(shape: CacheShape, num_pages: int, device: torch.device) -> KVCache:
    """Allocate the caches, filled with zeros: uninitialized memory may hold NaN, and a masked probability of zero times
    NaN is NaN.

    Where all layers are one group, pages never pass to another; then each layer's cache lies in one piece, instead of
    each block, so that a layer's reads are spread over less memory.
    """
    layout = shape.layout
    arena = torch.zeros((num_pages + 1, layout.page_bytes), dtype=torch.uint8, device=device)
    layers: list[Tensor | None] = [None] * shape.num_layers
    for group in layout.groups:
        num_blocks = (num_pages + 1) * group.blocks_per_page
        for place, layer in enumerate(group.layers):
            size, dtype = shape.block(layer)
            planes, *inner = size
            numbers = arena.view(-1).view(dtype)
            to_plane, to_block = math.prod(inner), group.block_stride // dtype.itemsize
            offset = place * planes * to_plane
            if len(layout.groups) == 1 and not group.is_state:
                to_plane, to_block, offset = num_blocks * to_plane, to_plane, num_blocks * offset
            strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
            view = numbers.as_strided((planes, num_blocks, *inner), (to_plane, to_block, *strides), offset)
            layers[layer] = view[0] if group.is_state else view
    return KVCache(shape, arena, layers)


def allocate_alone(shape: CacheShape, layer: int, num_blocks: int, device: torch.device) -> Tensor | None:
    """Allocate a cache of `num_blocks` zeroed blocks for one layer alone; None: the layer caches nothing."""
    if layer not in shape.layout.group_of:
        return None
    (planes, *inner), dtype = shape.block(layer)
    cache = torch.zeros((planes, num_blocks, *inner), dtype=dtype, device=device)
    return cache if shape.specs[layer] is not None else cache[0]
