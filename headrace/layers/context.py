"""What layers are built with: who shares the work, which kernels do it, and where. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.attention.backend import Backend
from headrace.distributed.mesh import Mesh
from headrace.kernels.table import KernelTable


@dataclass(frozen=True)
class LayerContext:
    mesh: Mesh
    kernels: KernelTable
    backend: Backend
    block_size: int
    dtype: torch.dtype
    device: torch.device
