"""A layer's output that is not computed yet, so that the norm behind it can have it computed into the residual."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Adds(Protocol):
    """What can compute its output of x alone, or into a residual."""

    def computed(self, x: Any) -> Tensor:
        """The output on its own, summed over ranks."""

    def added_to(self, x: Any, residual: Tensor) -> Any:
        """The sum with `residual`, written over it: as a tensor, HalfNormed, or Unsummed."""


class Pending(NamedTuple):
    """What `layer` makes of x. It has one reader, which asks for it once: each time computes it anew.

    It holds the output of all ranks' tokens; sums over ranks are made when it is computed.
    """

    layer: Adds
    x: Any

    def whole(self) -> Tensor:
        return self.layer.computed(self.x)

    def added_to(self, residual: Tensor) -> Any:
        return self.layer.added_to(self.x, residual)
