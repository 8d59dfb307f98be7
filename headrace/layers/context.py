"""What layers are built with: who shares the work, which kernels do it, and where. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.attention.spec import AttentionSpec
from headrace.distributed.mesh import Mesh
from headrace.kernels.table import KernelTable


@dataclass(frozen=True)
class LayerContext:
    mesh: Mesh
    kernels: KernelTable
    backend: Any
    specs: tuple[AttentionSpec | None, ...]
    """attention of each layer on this rank; None: it has none"""
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False
    """A token's result must not depend on what else is in the batch"""
    groups: Mapping[int, int] = field(default_factory=dict)
    """layer -> the group whose block table is its own, of layers that cache something"""
