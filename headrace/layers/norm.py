"""Defines RMS norm (arXiv 1910.07467) of the sum of a layer's output and the residual.

models/fusion.py decides whether the layer that reads the norm computes it instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.norm import Unsummed, whole
from headrace.kernels.table import KernelTable
from headrace.layers.layer import Layer, empty_parameter
from headrace.layers.pending import Pending


class RMSNorm(Layer):
    """Adds to the residual, and norms the sum."""

    def __init__(self, size: int, eps: float, kernels: KernelTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps
        self.rms_norm = kernels.rms_norm
        self.deferred = False
        """The one layer that reads it norms its input itself."""

    def forward(self, hidden: Tensor | Pending, residual: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return the norm of hidden + residual [num_tokens, size], and the sum itself, written over `residual`. Without
        a residual, `hidden` is the sum. If the norm is deferred, the first is not normed: it is the sum as the layer
        that norms it takes it, perhaps HalfNormed, or Unsummed, which is the sum only after that layer has run."""
        total: Any = hidden
        if residual is not None:
            total = hidden.added_to(residual) if isinstance(hidden, Pending) else residual.add_(hidden)
        if self.deferred:
            return total, whole(total)
        delta = total.delta if isinstance(total, Unsummed) else None
        return self.rms_norm(whole(total), self.weight, self.eps, delta), whole(total)
