"""What a weight format is to a layer: a layout, which says which tensors the checkpoint holds and makes of them what is
kept, and a product, which applies that.

Both know one linear by its `LinearSpec` alone: sizes on this rank, and the parts it is made of. They know neither
layers nor models, nor that ranks exist. Experts are so many linears of one size: what is kept of them has one dimension
more, in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.gemm_config import GemmConfig
from headrace.kernels.norm import Unsummed, whole
from headrace.kernels.table import KernelTable
from headrace.quantization.formats import WeightFormat

Multiply = Callable[[Any], Tensor]
"""[num_tokens, in_features], a tensor or Quantized (kernels/fp8.py) -> [num_tokens, out_features]"""
Table = list[GemmConfig | None]
"""Entry t serves t tokens. All linears of a size share it: an entry that becomes None goes to the library from then on,
but for graphs captured before."""
Compute = Callable[[Any, Tensor | None], Any]
"""(x [num_tokens, in_features], residual or None) -> what the linear and what is around it give, added to the residual
in place if there is one. x is a tensor, or what the product's `input_dtype` asks for, or where the linear norms perhaps
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
    addend: Callable[[Any], Tensor] | None = None
    """of what the product is made of, normed: is added to it before the activation (an adapter's part)"""
    activation: Callable[[Tensor], Any] | None = None
    """silu of the outputs' first half times their second half, Quantized if the next linear asks for it; None: no
    activation"""

    def norm(self) -> Callable[[Tensor], Any] | None:
        """x -> x normed; None where it is not."""
        weight, eps, rms_norm = self.norm_weight, self.norm_eps, self.rms_norm
        if weight is None or rms_norm is None:
            return None
        return lambda x: rms_norm(whole(x), weight, eps, x.delta if isinstance(x, Unsummed) else None)

    def wrap(self, multiply: Multiply) -> Compute:
        """One after the other."""
        norm, addend, activation, defers = self.norm(), self.addend, self.activation, self.next_norm is not None

        def compute(x: Any, residual: Tensor | None) -> Any:
            x = x if norm is None else norm(x)
            out = multiply(x)
            if addend is not None:
                out += addend(x)
            if activation is not None:
                out = activation(out)
            if residual is None:
                return out
            return Unsummed(residual, out) if defers else residual.add_(out)

        return compute


FLOATS = ("F16", "BF16", "F32", "F64")


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
    stored: tuple[str, ...] = FLOATS
    """Types that the tensor may have in the checkpoint, as safetensors calls them"""

    def put(self, values: Tensor) -> None:
        """`values`: this rank's slice of the checkpoint's tensor."""
        if self.store is not None:
            self.store(values)
        elif self.destination is not None:
            self.destination.copy_(values)


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

    def path(self, ours: str) -> str:
        """The checkpoint's full name, where that of our linear is `ours`."""
        return ours if self.name is None else f"{ours.rpartition('.')[0]}.{self.name}"


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


Weights = dict[str, Tensor]
"""What is kept of a linear, by names that its layout and its product share. Plain: `weight` [out, in] of the spec's
dtype, and perhaps `bias` [out]"""


class Layout(Protocol):
    """Which tensors a checkpoint holds for a linear, how they are packed and sliced, and what is kept of them."""

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        """Uninitialized, of as many experts as `experts` has in front."""

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        """For each part and tensor name, as the checkpoint calls it (`weight`, `bias`): where it goes. `weights`: of
        one linear."""

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        """The same, plain. Experts too."""


class Product(Protocol):
    """How activations meet what is kept: one object serves every linear of a model that is kept alike."""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        """Before anything else: all the linears it will serve, and with which kernels (default: the device's own)."""

    def refusal(self, spec: LinearSpec) -> str:
        """Why it cannot serve this linear, which then keeps the checkpoint's type; "": it can. Before `prepare`."""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        """In which type whoever makes the linear's input had best give it, with a scale a token; None: as it is."""

    def table(self, spec: LinearSpec) -> Table | None:
        """Which kernels of ours serve few tokens; None: none do, the library serves all."""

    def finalize(self, spec: LinearSpec, weights: Weights, around: Around) -> Compute:
        """After loading: the function that applies the weights and what is around them. It may hold them in another
        form, and only so."""

    def experts(self, spec: LinearSpec, weights: Weights) -> tuple[Tensor, Tensor | None]:
        """After loading: what kernels/moe.py takes, weight [experts, out, in] and scales [experts, out] or None."""


@dataclass(frozen=True, eq=False)
class Scheme:
    """How a linear or a layer of experts is held and computed. One object serves all of a model that are alike."""

    format: WeightFormat
    layout: Layout
    product: Product


@dataclass(frozen=True, eq=False)
class Dequantized:
    """A product for a layout that has none of its own here: what is kept is widened after loading, and `plain` applies
    it. What it takes is that of a plain model."""

    layout: Layout
    plain: Product

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        self.plain.prepare(specs, device, kernels)

    def refusal(self, spec: LinearSpec) -> str:
        return ""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        return None

    def table(self, spec: LinearSpec) -> Table | None:
        return self.plain.table(spec)

    def finalize(self, spec: LinearSpec, weights: Weights, around: Around) -> Compute:
        return self.plain.finalize(spec, self.layout.dequantize(spec, weights), around)

    def experts(self, spec: LinearSpec, weights: Weights) -> tuple[Tensor, Tensor | None]:
        return self.plain.experts(spec, self.layout.dequantize(spec, weights))
