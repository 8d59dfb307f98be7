"""Defines what layers are built with: who shares the work, which kernels do it, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headrace.attention.spec import AttentionSpec
from headrace.distributed.mesh import Mesh
from headrace.kernels.table import KernelTable
from headrace.layers.exchange import Exchange
from headrace.stages import WHOLE, Stage


@dataclass(frozen=True)
class LayerContext:
    """Holds what all layers of a model have in common on a rank."""

    mesh: Mesh
    kernels: KernelTable
    backend: Any
    specs: tuple[AttentionSpec | None, ...]
    """what each layer asks of attention on this rank; None: it has no attention"""
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False
    """A token's result must not depend on what else is in the batch."""
    positions: int | None = None
    """the most positions that a token can have, fewer than the model's own; None: not known"""
    whole_experts: bool = False
    """A rank holds whole experts, its share of a layer's (expert parallelism), in place of a slice of each."""
    groups: Mapping[int, int] = field(default_factory=dict)
    """layer that caches something -> the cache group whose block table it uses"""
    stage: Stage = WHOLE
    """the layers of the model that the rank holds; `specs` and `groups` count from the first of them"""
    seat: Callable[[str, Any], None] | None = None
    """gives the layer of a path its place for adapters (layers/adapters.py); None: there are none"""
    kept_states: int = 1
    """recurrent states that a request keeps, one for each token of its decodes, so that guesses can be taken back"""
    exchange: Exchange = field(default_factory=Exchange)
    """the way to the experts that other engines hold"""

    def layers(self, first: int, last: int | None = None) -> LayerContext:
        """Return the context of the layers from `first` to `last`, which count from 0 in it."""
        groups = {layer - first: group for layer, group in self.groups.items() if layer >= first}
        return replace(self, specs=self.specs[first:last], groups=groups)
