"""Defines what a weight format is to a layer: a `Scheme`, made of a `Layout` (what is stored) and a `Product` (what is
computed).

A layout names the checkpoint's tensors of one linear layer, allocates memory for them and fills it. A product turns
that memory into a function from activations to outputs. The two vary apart: several layouts may share a product.

Both see a linear layer as a `LinearSpec`: its sizes on this rank, and the linears of the checkpoint that it is made of.
They know no layers, models or ranks. The experts of a sparse layer are linears of one size whose tensors have one more
dimension, the expert's number, in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.kernels.adapters import Adapted
from headrace.kernels.fp8 import Rounding
from headrace.kernels.gemm_config import GemmConfig
from headrace.kernels.norm import Unsummed
from headrace.kernels.table import KernelTable
from headrace.quantization.formats import WeightFormat

Multiply = Callable[[Any], Tensor]
"""x [num_tokens, in_features], a tensor or Quantized (kernels/fp8.py) -> x @ weight.T + bias # [num_tokens, out]"""
GemmTable = list[GemmConfig | None]
"""Entry t is the kernel configuration for t tokens; None, and beyond the end: the vendor's library. All linears of one
size share a table, so an entry that is set to None takes effect for all of them (but not in graphs captured before)."""
Compute = Callable[[Any, Tensor | None], Any]
"""(x [num_tokens, in_features], residual or None) -> the product with its fused operations; with a residual
[num_tokens, out_features], the sum with it, written over it.

x is a tensor or, if the product's `rounding` asked for it, Quantized; where the linear applies a norm first, x may
also be HalfNormed or Unsummed (kernels/norm.py). The result is a tensor, or Quantized if the activation quantizes;
where a norm follows, it may be HalfNormed or Unsummed."""


class Addend(Protocol):
    """Adds to a linear's product what adapters make of its input."""

    @property
    def wanted(self) -> bool:
        """Tell whether this step has adapters; else nothing differs from a linear without any."""

    def add(self, x: Any, out: Tensor) -> None:
        """Add to out # [num_tokens, outputs] what is made of x # [num_tokens, inputs], which may be Quantized."""

    @property
    def fuses(self) -> bool:
        """Tell whether a kernel may add it by itself, given what `given` returns."""

    def given(self, x: Any, shrinks: bool) -> Adapted:
        """Return what the kernel is to add that multiplies x, which may be HalfNormed. `shrinks`: it multiplies by
        first matrices too."""


@dataclass(frozen=True)
class FusedOps:
    """Lists the operations that a linear layer performs besides its product, so that one kernel may do them all.

    In order: RMS norm of the input, product, plus `addend`, activation, plus residual, first half of the next norm.
    """

    norm_weight: Tensor | None = None
    """[in_features]: the input's RMS norm; None: the input is not normed here"""
    norm_eps: float = 0.0
    rms_norm: Callable[..., Any] | None = None
    """the kernel table's `rms_norm`, for products that norm in a pass of their own"""
    next_norm: Tensor | None = None
    """[out_features]: weight of the norm that reads the sum with the residual, if the layer behind that norm takes the
    sum HalfNormed or Unsummed; None: the sum is handed on whole"""
    addend: Addend | None = None
    """what adds to the product before the activation, given the (normed) input; kernels that cannot add it by
    themselves fuse nothing in steps that want it"""
    activation: Callable[[Tensor], Any] | None = None
    """outputs -> gate(first half) * second half, Quantized if the next linear asked for that; None: no activation"""
    gate: str = "silu"
    """what the activation does to the first half, by its name in kernels/activation.py"""

    def norm(self, rms_norm: Callable[..., Any] | None = None) -> Callable[[Any], Any] | None:
        """Return the function that norms the input in a pass of its own, by `rms_norm` if given; None if the input is
        not normed here."""
        weight, eps, kernel = self.norm_weight, self.norm_eps, rms_norm or self.rms_norm
        if weight is None or kernel is None:
            return None
        return lambda x: kernel(x, weight, eps)

    @property
    def apart(self) -> bool:
        """Tell whether adapters add to products in this step."""
        return self.addend is not None and self.addend.wanted

    def wrap(self, multiply: Multiply) -> Compute:
        """Return `multiply` with the operations done around it one after the other, none of them fused."""
        norm, addend, activation, defers = self.norm(), self.addend, self.activation, self.next_norm is not None

        def compute(x: Any, residual: Tensor | None) -> Any:
            x = x if norm is None else norm(x)
            out = multiply(x)
            if addend is not None and addend.wanted:
                addend.add(x, out)
            if activation is not None:
                out = activation(out)
            if residual is None:
                return out
            return Unsummed(residual, out) if defers else residual.add_(out)

        return compute


FLOATS = ("F16", "BF16", "F32", "F64")
E8M0 = ("U8", "F8_E8M0")
"""types of scales 2 ** (byte - 127), of which 255 is NaN (OCP Microscaling Formats 1.0, 5.4.1)"""


@dataclass(frozen=True)
class Slot:
    """Says where one tensor of the checkpoint goes: which slice of it this rank reads, and into which memory."""

    shape: tuple[int, ...]
    """of the whole tensor in the checkpoint"""
    source: tuple[slice, ...]
    """the slice of it that this rank reads"""
    destination: Tensor | None
    """a view, of that slice's shape, of the model's memory; None: this rank does not need the tensor"""
    optional: bool = False
    """A checkpoint may lack the tensor. If the shape is [1], it may also be a scalar there."""
    store: Callable[[Tensor], None] | None = None
    """writes the slice where copying it to `destination` would not be enough; it takes any floating type and device"""
    dtype: torch.dtype | None = None
    """of the slice that `store` takes; None: that of `destination`"""
    stored: tuple[str, ...] = FLOATS
    """types that the tensor may have in the checkpoint, by their names in safetensors; those of E8M0 come together"""
    e8m0: bool = False
    """Of scales of E8M0 the bytes are kept; else they are converted."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """further shapes that the whole tensor may have in the checkpoint; `store` is then given what `slices` says"""
    dummy: float | None = None
    """what dummy weights are filled with; None: random numbers"""
    is_scale: bool = False
    """Its numbers are scales of floats, none of which may be negative. Those of integers may: AutoRound gives a group
    the sign with which its largest weight is the code that reaches furthest."""
    as_stored: bool = False
    """`store` takes the slice in the type that it has in the checkpoint, which counts for more than `dtype`."""

    def slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slice that this rank reads of a tensor of `shape`, one of `shapes`: as `source` says where its
        first dimension is that of `shape`, and else all of it."""
        if shape == self.shape:
            return self.source
        sliced = bool(shape) and shape[0] == self.shape[0]
        return tuple(self.source[0] if sliced and place == 0 else slice(0, size) for place, size in enumerate(shape))

    def nowhere(self) -> Slot:
        """Return the slot of a tensor like this one that the rank does not need."""
        return replace(self, destination=None, store=None)

    def put(self, values: Tensor) -> None:
        """Write `values`, this rank's slice of the checkpoint's tensor."""
        if self.store is not None:
            self.store(values)
        elif self.destination is not None:
            self.destination.copy_(values)


@dataclass(frozen=True)
class Part:
    """Describes one linear of the checkpoint within one of ours, which may be several of the checkpoint's, fused."""

    name: str | None
    """the last part of its name in the checkpoint, like `q_proj` in `qkv_proj`; None: it has our linear's name"""
    shape: tuple[int, int]
    """[out, in] of the whole weight in the checkpoint"""
    rows: slice
    """its outputs that this rank holds"""
    columns: slice
    """its inputs that this rank holds"""
    offset: int
    """the row of our weight where `rows` begin"""

    def path(self, ours: str) -> str:
        """Return the part's full name in the checkpoint, given the path of our linear in the model."""
        return ours if self.name is None else f"{ours.rpartition('.')[0]}.{self.name}"


@dataclass(frozen=True)
class LinearSpec:
    """Describes one linear as this rank holds it: y = x @ weight.T + bias, weight [out_features, in_features]."""

    in_features: int
    out_features: int
    parts: tuple[Part, ...]
    dtype: torch.dtype
    bias: bool = False
    adds_bias: bool = True
    """False where another rank adds the bias, because the ranks' outputs are summed"""
    batch_invariant: bool = False
    """A token's outputs must not depend on how many other tokens there are."""
    slices: int = 0
    """the products of so many slices of this rank's inputs are summed in fp32 as a tree, which ranks go on with before
    the bias is added (kernels/matmul.py); 0: the outputs are whole"""
    over_ranks: Callable[[Tensor], Tensor] | None = None
    """numbers [..., n] of this rank -> the largest that any rank has, where ranks divide the inputs (all of them must
    ask); None: they do not"""
    whole_groups: bool = False
    """Ranks divide them between groups of inputs that share a scale."""


class HeldExperts(NamedTuple):
    """Holds one linear of all experts as kernels/moe.py takes it."""

    weight: Any
    """[experts, out, in]: a tensor or a TiledWeight"""
    scales: Tensor | None = None
    """[experts, out] fp32 if the weight is fp8"""
    rounding: Rounding | None = None
    """how activations are rounded then, or on a CPU beside any weight"""


Weights = dict[str, Tensor]
"""A linear's tensors on this rank, under names that its layout and its product agree on. An unquantized linear has
`weight` [out, in] of the spec's dtype, and perhaps `bias` [out]."""


class Layout(Protocol):
    """Knows which tensors a checkpoint holds for a linear, how they are packed, and what is kept of them in memory."""

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        """Allocate a linear's tensors, uninitialized. `experts`: (their number,) for a sparse layer, else ()."""

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        """Yield (part, its tensor's name in the checkpoint: `weight`, `bias`, ..., where it goes in `weights`).
        `weights` are those of one linear: of experts, one expert's."""

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        """Return `weights`, of a linear or of experts, in the unquantized form."""


class Product(Protocol):
    """Computes with what a layout keeps. One object serves all linears of a model that have the same format. What is
    written out here holds for those that have nothing else to say."""

    sums_slices: bool = False
    """It can leave sums to ranks, as `LinearSpec.slices` says."""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        """Learn all the linears it will serve; called once, first. `kernels` None: those of the device's type."""

    def refusal(self, spec: LinearSpec) -> str:
        """Say why it cannot serve this linear, which then stays unquantized; "" if it can. May precede `prepare`."""
        return ""

    def rounding(self, spec: LinearSpec, weights: Weights) -> Rounding | None:
        """Return how the linear wants its input rounded, given its loaded weights; None: not at all."""
        return None

    def table(self, spec: LinearSpec) -> GemmTable | None:
        """Return the table of the kernels for few tokens; None if the library serves any number of them."""
        return None

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        """Return the function that applies the loaded weights and the fused operations. It may keep the weights in
        another form, and then does not keep what `weights` held: either it leaves them to the caller or, on a GPU, puts
        the tensors of that form in their place."""

    def widened(self, spec: LinearSpec, weights: Weights) -> Weights:
        """Return the unquantized form of `weights` as `finalize` left them on a GPU."""
        return weights

    def experts(self, spec: LinearSpec, weights: Weights) -> HeldExperts:
        """Return what kernels/moe.py takes, but for the bias, which stays in `weights`."""

    def notes(self) -> list[str]:
        """Say which weights take as much memory as unquantized ones, and why, once all are loaded."""
        return []


@dataclass(frozen=True, eq=False)
class Scheme:
    """Serves one weight format: a layout and a product, shared by all linears of a model that have the format."""

    format: WeightFormat
    layout: Layout
    product: Product


SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""types of scales in a checkpoint, to which tools round what they widen; the others count as the first"""


def store_scales(
    place: Tensor,
    kind: Tensor | None,
    values: Tensor,
    factor: float = 1.0,
    pick: Callable[[Tensor], Tensor] = lambda scales: scales,
) -> None:
    """Write what `pick` makes of a checkpoint's scales, times `factor`, and into `kind`, uint8, in which of SCALE_TYPES
    they are there."""
    if kind is not None:
        kind.fill_(SCALE_TYPES.index(values.dtype) if values.dtype in SCALE_TYPES else 0)
    place.copy_(pick(values.to(place.device).float())).mul_(factor)


def noted_type(places: Tensor) -> torch.dtype:
    """Return the type that `store_scales` has kept in all `places`; float32, which holds all others, if they differ."""
    found = places.unique().tolist()
    return SCALE_TYPES[found[0] if len(found) == 1 else 0]
