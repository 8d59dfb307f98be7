"""RMS norm, alone or fused with the residual sum before it."""

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
        self.add_rms_norm = kernels.add_rms_norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [num_tokens, size] -> (normed sum, sum). The sum is x where there is no residual yet, else it is written
        over `residual`."""
        if residual is None:
            return self.rms_norm(x, self.weight, self.eps), x
        return self.add_rms_norm(x, residual, self.weight, self.eps)
