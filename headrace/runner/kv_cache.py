"""Allocates the caches of a rank's layers in one arena. The scheduler knows which request owns which block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.attention.spec import AttentionSpec
from headrace.cache_groups import CacheLayout, cache_layout
from headrace.errors import ConfigError
from headrace.kernels._triton import fp8_dtype
from headrace.mixers import STATE_BYTES
from headrace.model_spec import ModelSpec
from headrace.stages import WHOLE, Stage
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

    def blocks(self, layer: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each thing that a block holds of a layer.

        The shape is (planes, block_size, num_kv_heads, head_dim), whose planes are K and V, or a latent alone; (1,
        numbers) for a recurrent state. A layer with an index has its keys too, (1, block_size, 1, index_dim).
        """
        spec = self.specs[layer]
        if spec is None:
            group = self.layout.groups[self.layout.group_of[layer]]
            return [((1, group.block_bytes // len(group.layers) // STATE_BYTES), torch.float32)]
        planes = 1 if spec.latent_dim is not None else 2
        shapes = [(planes, spec.block_size, spec.num_kv_heads, spec.head_dim)]
        if spec.index_dim:
            shapes.append((1, spec.block_size, 1, spec.index_dim))
        return [(shape, self.dtype) for shape in shapes]


def cache_shape(
    model: ModelSpec,
    specs: tuple[AttentionSpec | None, ...],
    ranks: int,
    block_size: int,
    dtype: torch.dtype,
    num_drafting: int = 0,
    stage: Stage = WHOLE,
) -> CacheShape:
    """Return what one of `ranks` of a pipeline stage caches of `model`; its own layers have the attention `specs`."""
    return CacheShape(cache_layout(model, ranks, dtype.itemsize, block_size, stage), specs, dtype, num_drafting)


class IndexedCache(NamedTuple):
    """Holds what a layer with an index caches."""

    latents: Tensor
    """[1, num_blocks, block_size, 1, head_dim]"""
    index_keys: Tensor
    """[1, num_blocks, block_size, 1, index_dim]"""


LayerCache = Tensor | IndexedCache


def without_index(cache: LayerCache) -> Tensor:
    """Return what attention itself reads of a layer's cache."""
    return cache.latents if isinstance(cache, IndexedCache) else cache


@dataclass(frozen=True)
class KVCache:
    """Holds the arena, and each layer's cache as a view of it."""

    shape: CacheShape
    arena: Tensor
    """[num_pages + 1, page_bytes] uint8; the last page is scratch for padding"""
    layers: list[LayerCache | None]
    """[2 (K, V), num_blocks, block_size, num_kv_heads, head_dim] for attention, [1, ...] for latent attention, whose
    values are part of its keys, an IndexedCache where it has an index; [num_blocks, numbers] float32 for a recurrent
    state; None: the layer caches nothing"""

    @property
    def of_model(self) -> list[LayerCache | None]:
        """The caches of the model's own layers."""
        return self.layers[: len(self.layers) - self.shape.num_drafting]

    @property
    def of_drafter(self) -> list[Any]:
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
    layers: list[LayerCache | None] = [None] * shape.num_layers
    for group in layout.groups:
        num_blocks = (num_pages + 1) * group.blocks_per_page
        place = 0  # in a block, in bytes
        for layer in group.layers:
            views = []
            for (planes, *inner), dtype in shape.blocks(layer):
                numbers = arena.view(-1).view(dtype)
                to_plane, to_block = math.prod(inner), group.block_stride // dtype.itemsize
                offset = place // dtype.itemsize
                place += planes * to_plane * dtype.itemsize
                if len(layout.groups) == 1 and not group.is_state:
                    to_plane, to_block, offset = num_blocks * to_plane, to_plane, num_blocks * offset
                strides = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
                views.append(numbers.as_strided((planes, num_blocks, *inner), (to_plane, to_block, *strides), offset))
            layers[layer] = _of_layer(views, group.is_state)
    return KVCache(shape, arena, layers)


def allocate_alone(shape: CacheShape, layer: int, num_blocks: int, device: torch.device) -> LayerCache | None:
    """Allocate a cache of `num_blocks` zeroed blocks for one layer alone; None: the layer caches nothing."""
    if layer not in shape.layout.group_of:
        return None
    views = [
        torch.zeros((planes, num_blocks, *inner), dtype=dtype, device=device)
        for (planes, *inner), dtype in shape.blocks(layer)
    ]
    return _of_layer(views, shape.specs[layer] is None)


def _of_layer(views: list[Tensor], is_state: bool) -> LayerCache:
    """Return the views of what a layer caches as the layer takes them."""
    if len(views) > 1:
        return IndexedCache(*views)
    return views[0][0] if is_state else views[0]
