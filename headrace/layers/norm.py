"""RMS norm of the sum of a layer's output and the residual. Whether its reader makes it, models/fusion.py decides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.norm import Unsummed, whole
from headrace.kernels.table import KernelTable
from headrace.layers.layer import Layer, empty_parameter
from headrace.layers.pending import Pending


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float, kernels: KernelTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps
        self.rms_norm = kernels.rms_norm
        self.deferred = False
        """its one reader norms what it is handed, in its own pass"""

    def forward(self, hidden: Tensor | Pending, residual: Tensor | None = None) -> tuple[Any, Tensor]:
        """hidden, residual [num_tokens, size] -> (their sum normed, their sum), the sum being written over `residual`;
        without one, `hidden` is the sum. Where the norm is deferred, the first is the sum as the reader takes it:
        perhaps HalfNormed, or Unsummed until it is read."""
        total: Any = hidden
        if residual is not None:
            total = hidden.added_to(residual) if isinstance(hidden, Pending) else residual.add_(hidden)
        if self.deferred:
            return total, whole(total)
        delta = total.delta if isinstance(total, Unsummed) else None
        return self.rms_norm(whole(total), self.weight, self.eps, delta), whole(total)
