"""Defines `Pending`, a layer's output not yet computed: the norm behind it has it computed into the residual."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Adds(Protocol):
    """Computes an output and may add it to a residual in the same pass."""

    def computed(self, x: Any) -> Tensor:
        """Return the output alone, summed over ranks."""

    def added_to(self, x: Any, residual: Tensor) -> Any:
        """Return the sum with `residual`, written over it: a tensor, HalfNormed, or Unsummed (kernels/norm.py)."""


class Pending(NamedTuple):
    """Stands for the output of `layer` for x. It may be asked for once only, since each time computes it anew.

    Sums over ranks are made when it is computed.
    """

    layer: Adds
    x: Any

    def whole(self) -> Tensor:
        return self.layer.computed(self.x)

    def added_to(self, residual: Tensor) -> Any:
        return self.layer.added_to(self.x, residual)
