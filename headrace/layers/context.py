"""What layers are built with: who shares the work, which kernels do it, and where. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
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
    spec: AttentionSpec
    """attention on this rank; the model replaces `sliding_window` by each layer's own"""
    dtype: torch.dtype
    device: torch.device
