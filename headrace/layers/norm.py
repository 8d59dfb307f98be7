"""Defines norms of the sum of a layer's output and the residual: RMS norm (arXiv 1910.07467) and layer norm (arXiv
1607.06450).

models/fusion.py decides whether the layer that reads an RMS norm computes it instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace import layer_parts
from headrace.kernels.norm import Unsummed, whole
from headrace.kernels.table import KernelTable
from headrace.layers.layer import Layer, empty_parameter, whole_slot
from headrace.layers.pending import Pending
from headrace.quantization.scheme import Slot


class Sum(Layer):
    """Adds to the residual, and norms nothing."""

    def forward(self, hidden: Tensor | Pending, residual: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return hidden + residual [num_tokens, size] twice, written over `residual`. Without a residual, `hidden` is
        the sum."""
        total: Any = hidden
        if residual is not None:
            total = hidden.added_to(residual) if isinstance(hidden, Pending) else residual.add_(hidden)
        return total, whole(total)


class Scale(Layer):
    """Multiplies by a number that the checkpoint has under the layer's own name."""

    opaque = ("forward",)

    def __init__(self, width: int, kernels: KernelTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.scale = width, kernels.scale
        self.factor = empty_parameter(1, dtype=dtype)

    def slots(self, path: str) -> dict[str, Slot]:
        return {path: whole_slot(self.factor)}

    def forward(self, x: Tensor) -> Tensor:
        """Return x [num_tokens, width] times the number, written over it."""
        return self.scale(x, self.factor)


class RMSNorm(Layer):
    """Adds to the residual, and norms the sum."""

    def __init__(self, size: int, eps: float, kernels: KernelTable, dtype: torch.dtype, plus_one: bool = False) -> None:
        """Build the norm, with a weight of `dtype`; `plus_one`: the checkpoint holds it less one."""
        super().__init__()
        self.plus_one = plus_one
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps
        self.rms_norm, self.add_up = kernels.rms_norm, kernels.add_up
        self.deferred = False
        """The layers that read it norm their input themselves."""
        self.half_is_left = False
        """So they do, and they can finish a norm that is half done."""
        self.sum_is_left = False
        """There is one such layer, and it can also make a sum that is not made yet."""
        self.pending = False
        """It has no residual, and its output has one reader, a norm or a sum, which calls `added_to`."""
        self.next_makes_sum = False
        """That reader can also make the sum."""

    def slots(self, path: str) -> dict[str, Slot]:
        return {f"{path}.weight": weight_slot(self.weight, self.plus_one)}

    def forward(self, hidden: Tensor | Pending, residual: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return the norm of hidden + residual [num_tokens, size], and the sum itself, written over `residual`. Without
        a residual, `hidden` is the sum. If the norm is deferred, the first is not normed: it is the sum as the layer
        that norms it takes it, perhaps HalfNormed, or Unsummed, which is the sum only after that layer has run."""
        if self.pending:
            assert isinstance(hidden, Tensor)
            return Pending(self, hidden), hidden
        total = _total(hidden, residual, leaves=self.sum_is_left or not self.deferred)
        if self.deferred and not self.sum_is_left and isinstance(total, Unsummed):
            total = self.add_up(total)
        return total if self.deferred else self.rms_norm(total, self.weight, self.eps), whole(total)

    def computed(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps)

    def added_to(self, x: Tensor, residual: Tensor) -> Tensor | Unsummed:
        """Return the sum of x's norm and `residual`, written over it; perhaps not yet made."""
        total = Unsummed(residual, x, self.weight, self.eps)
        return total if self.next_makes_sum else self.add_up(total)


class LayerNorm(Layer):
    """Adds to the residual, and norms the sum about its mean."""

    def __init__(self, size: int, norm: layer_parts.Norm, kernels: KernelTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.plus_one = norm.plus_one
        self.weight = empty_parameter(size, dtype=torch.float32 if norm.float32 else dtype) if norm.weight else None
        self.bias = empty_parameter(size, dtype=dtype) if norm.bias else None
        self.size, self.eps = size, norm.eps
        self.layer_norm = kernels.layer_norm

    def slots(self, path: str) -> dict[str, Slot]:
        weight = {} if self.weight is None else {f"{path}.weight": weight_slot(self.weight, self.plus_one)}
        return super().slots(path) | weight

    def forward(self, hidden: Tensor | Pending, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of hidden + residual [num_tokens, size], and the sum itself, written over `residual`. Without
        a residual, `hidden` is the sum."""
        total = _total(hidden, residual, leaves=True)
        return self.layer_norm(total, self.weight, self.bias, self.eps), whole(total)


def make_norm(norm: layer_parts.Norm, size: int, kernels: KernelTable, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """Return the layer that a description asks for."""
    if norm.kind == "layer":
        return LayerNorm(size, norm, kernels, dtype)
    return RMSNorm(size, norm.eps, kernels, torch.float32 if norm.float32 else dtype, norm.plus_one)


def weight_slot(weight: Tensor, plus_one: bool) -> Slot:
    """Return the slot of a norm's weight, of which checkpoints hold one less if `plus_one`."""

    def store(values: Tensor) -> None:
        weight.copy_(values).add_(1)

    slot = whole_slot(weight)
    return replace(slot, store=store) if plus_one else slot


def _total(hidden: Tensor | Pending, residual: Tensor | None, leaves: bool) -> Any:
    """Return hidden + residual, written over `residual`; if `leaves`, perhaps Unsummed, for whoever reads it to add up
    in the same pass."""
    if residual is None:
        return hidden
    if isinstance(hidden, Pending):
        return hidden.added_to(residual)
    return Unsummed(residual, hidden) if leaves else residual.add_(hidden)
