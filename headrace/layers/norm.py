"""RMS norm. Where a linear follows, the linear is told of it and may norm in its own pass (layers/linear.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.table import KernelTable
from headrace.layers.layer import Layer, empty_parameter


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float, kernels: KernelTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps
        self.rms_norm = kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same."""
        return self.rms_norm(x, self.weight, self.eps)
