"""What a weights format is to a linear layer: it creates the tensors, says where the checkpoint's go, and applies them.

A format knows one linear by its `LinearSpec` alone: sizes on this rank, and the parts it is made of. It knows neither
layers nor models, nor that ranks exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[Tensor], Tensor]
"""[num_tokens, in_features] -> [num_tokens, out_features]"""


@dataclass(frozen=True)
class Slot:
    """Room for one tensor of the checkpoint, or for the slice of it that this rank holds."""

    shape: tuple[int, ...]
    """as it must be in the checkpoint"""
    source: tuple[slice, ...]
    """this rank's slice of it"""
    destination: Tensor | None
    """a view of that slice's size in the model's memory; None: this rank has no use for the tensor"""

    @property
    def num_bytes(self) -> int:
        return 0 if self.destination is None else self.destination.numel() * self.destination.element_size()


@dataclass(frozen=True)
class Part:
    """One linear of the checkpoint inside a (fused) linear of ours."""

    name: str | None
    """the checkpoint's name beside ours (`q_proj` in `qkv_proj`); None: the name is ours"""
    shape: tuple[int, int]
    """[out, in] in the checkpoint"""
    rows: slice
    """this rank's output rows of the checkpoint's tensor"""
    columns: slice
    """this rank's input columns of it"""
    offset: int
    """the first of those rows in our weight"""


@dataclass(frozen=True)
class LinearSpec:
    """One linear as this rank holds it: y = x @ weight.T + bias, weight [out_features, in_features]."""

    in_features: int
    out_features: int
    parts: tuple[Part, ...]
    dtype: torch.dtype
    bias: bool = False
    adds_bias: bool = True
    """False where another rank adds the bias, after which the ranks' outputs are summed"""
    batch_invariant: bool = False
    """A token's outputs must not depend on how many others there are"""


class Scheme(Protocol):
    """One object serves every linear of a model."""

    def prepare(self, specs: list[LinearSpec], device: torch.device) -> None:
        """Before anything else: all the linears there will be."""

    def create_weights(self, spec: LinearSpec, device: torch.device) -> dict[str, Tensor]:
        """Uninitialized tensors, by the name that the checkpoint gives them (`weight`, `bias`)."""

    def slots(self, spec: LinearSpec, weights: dict[str, Tensor]) -> Iterator[tuple[Part, str, Slot]]:
        """For each part and tensor name: where it goes."""

    def finalize(self, spec: LinearSpec, weights: dict[str, Tensor]) -> Compute:
        """After loading: the function that applies the weights. It may hold them in another form, and only so."""
