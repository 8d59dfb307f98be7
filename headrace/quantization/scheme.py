"""What a weights format is to a linear layer: it creates the tensors, says where the checkpoint's go, and applies them.

A format knows one linear by its `LinearSpec` alone: sizes on this rank, and the parts it is made of. It knows neither
layers nor models, nor that ranks exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.norm import Unsummed, whole
from headrace.kernels.table import KernelTable

Product = Callable[[Any], Tensor]
"""[num_tokens, in_features], a tensor or Quantized (kernels/fp8.py) -> [num_tokens, out_features]"""
Compute = Callable[[Any, Tensor | None], Any]
"""(x [num_tokens, in_features], residual or None) -> what the linear and what is around it give, added to the residual
in place if there is one. x is a tensor, or what the scheme's `input_dtype` asks for, or where the linear norms perhaps
HalfNormed or Unsummed (kernels/norm.py). The result is Quantized where the activation gives that; where a norm follows,
it may be HalfNormed or Unsummed."""


@dataclass(frozen=True)
class Around:
    """What a linear does beside its product, so that a format may do it in the same pass."""

    norm_weight: Tensor | None = None
    """[in_features]: x goes through an RMS norm first; None: it does not"""
    norm_eps: float = 0.0
    rms_norm: Callable[..., Any] | None = None
    next_norm: Tensor | None = None
    """[out_features]: weight of the norm that the sum with the residual goes through next, by a linear that takes it
    HalfNormed or Unsummed; None: another, or none"""
    activation: Callable[[Tensor], Any] | None = None
    """silu of the outputs' first half times their second half, Quantized if the next linear asks for it; None: no
    activation"""

    def norm(self) -> Callable[[Tensor], Any] | None:
        """x -> x normed; None where it is not."""
        weight, eps, rms_norm = self.norm_weight, self.norm_eps, self.rms_norm
        if weight is None or rms_norm is None:
            return None
        return lambda x: rms_norm(whole(x), weight, eps, x.delta if isinstance(x, Unsummed) else None)

    def wrap(self, product: Product) -> Compute:
        """One after the other."""
        norm, activation, defers = self.norm(), self.activation, self.next_norm is not None

        def compute(x: Any, residual: Tensor | None) -> Any:
            out = product(x if norm is None else norm(x))
            if activation is not None:
                out = activation(out)
            if residual is None:
                return out
            return Unsummed(residual, out) if defers else residual.add_(out)

        return compute


@dataclass(frozen=True)
class Slot:
    """Room for one tensor of the checkpoint, or for the slice of it that this rank holds."""

    shape: tuple[int, ...]
    """as it must be in the checkpoint"""
    source: tuple[slice, ...]
    """this rank's slice of it"""
    destination: Tensor | None
    """a view of that slice's size in the model's memory; None: this rank has no use for the tensor"""
    optional: bool = False
    """a checkpoint may lack the tensor; one of shape [1] may also be a scalar there"""
    store: Callable[[Tensor], None] | None = None
    """takes the slice, of any floating type and on any device, where more than a copy to `destination` is to be done"""
    dtype: torch.dtype | None = None
    """of the slice that `store` wants; None: the destination's"""

    def put(self, values: Tensor) -> None:
        """`values`: this rank's slice of the checkpoint's tensor."""
        if self.store is not None:
            self.store(values)
        elif self.destination is not None:
            self.destination.copy_(values)

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

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        """Before anything else: all the linears it will serve, and with which kernels (default: the device's own)."""

    def refusal(self, spec: LinearSpec) -> str:
        """Why it cannot serve this linear, which then keeps the checkpoint's type; "": it can. Before `prepare`."""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        """In which type whoever makes the linear's input had best give it, with a scale a token; None: as it is."""

    def create_weights(self, spec: LinearSpec, device: torch.device) -> dict[str, Tensor]:
        """Uninitialized tensors, by the name that the checkpoint gives them (`weight`, `bias`)."""

    def slots(self, spec: LinearSpec, weights: dict[str, Tensor]) -> Iterator[tuple[Part, str, Slot]]:
        """For each part and tensor name: where it goes."""

    def finalize(self, spec: LinearSpec, weights: dict[str, Tensor], around: Around) -> Compute:
        """After loading: the function that applies the weights and what is around them. It may hold them in another
        form, and only so."""
