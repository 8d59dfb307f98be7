"""Computes RMS norm (arXiv 1910.07467), whole or half (a half norm is finished by the linear that reads it), and layer
norm (arXiv 1607.06450), of sums that the same pass makes, one of whose parts may be normed before it is added."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.fp8 import (
    LARGEST,
    Quantized,
    Rounding,
    empty_quantized,
    quantize_reference,
    quantize_row,
    row_arguments,
    warps_of_row,
)
from headrace.kernels.peers import ALONE, Peers, all_reduce_reference, sum_over_ranks


@triton.jit
def times_weight(normed, weight, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """Return a normed row times the weight, in fp32; an RMS norm is first rounded to the weight's type, if that is
    x's."""
    if not CENTERED and weight.dtype == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return normed * weight.to(tl.float32)


@triton.jit(do_not_specialize=["rank", "most_looks"])
def _rms_norm_kernel(
    out_ptr,
    scales_ptr,
    zeros_ptr,
    given_ptr,
    bound_ptr,
    x_ptr,
    delta_ptr,
    delta_weight_ptr,
    weight_ptr,
    bias_ptr,
    x_stride,
    hidden,
    eps,
    delta_eps,
    addresses_ptr,
    turns_ptr,
    alarm_ptr,
    rank,
    room,
    most_looks,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm a row; `out` is quantized if there are `scales`, and not made if it is None. `delta`, contiguous, is first
    added to x, itself RMS-normed by `delta_weight` if there is one, and before that summed over the RANKS, if there are
    several. CENTERED: it is a layer norm, which subtracts the mean."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if delta_weight_ptr is not None:
        delta_weight = tl.load(delta_weight_ptr + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * hidden + columns, mask=inside, other=0.0)
        if RANKS > 1:
            delta = sum_over_ranks(
                delta, row * hidden + columns, inside, addresses_ptr, turns_ptr, alarm_ptr, rank, room, most_looks,
                RANKS,
            )  # fmt: skip
        delta = delta.to(tl.float32)
        if delta_weight_ptr is not None:
            normed = delta * tl.rsqrt(tl.sum(delta * delta, axis=0) / hidden + delta_eps)
            delta = times_weight(normed, delta_weight, dtype, False)
            delta = delta.to(dtype).to(tl.float32)
        rounded = (x + delta).to(dtype)
        tl.store(x_ptr + row * x_stride + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if out_ptr is not None:
        if CENTERED:
            x = tl.where(inside, x - tl.sum(x, axis=0) / hidden, 0.0)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
        if weight_ptr is not None:
            normed = times_weight(normed, weight, dtype, CENTERED)
        if bias_ptr is not None:
            normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        normed = normed.to(dtype)
        if scales_ptr is None:
            tl.store(out_ptr + row * hidden + columns, normed, mask=inside)
        else:
            quantize_row(
                out_ptr, scales_ptr, zeros_ptr, given_ptr, bound_ptr, normed.to(tl.float32), row, columns, inside,
                hidden, LARGEST, GROUP,
            )  # fmt: skip


ROUNDED_TWICE = {"enable_fp_fusion": False}
"""Launch options of a kernel that adds a product which it has rounded: the compiler would make them one instruction,
which rounds the sum alone, so that a quarter of the sums were a bit away from the reference's."""


def _launch(
    out: Tensor | Quantized | None,
    x: Tensor | HalfNormed | Unsummed,
    weight: Tensor | None = None,
    eps: float = 0.0,
    to: Rounding | None = None,
    bias: Tensor | None = None,
    centered: bool = False,
) -> None:
    rows, delta, delta_weight, delta_eps, peers = x if isinstance(x, Unsummed) else (whole(x), None, None, 0.0, None)
    if rows.shape[0]:
        hidden = rows.shape[1]
        block = next_power_of_2(hidden)
        results = row_arguments(out, to) if isinstance(out, Quantized) and to else (out, None, None, None, None)
        _rms_norm_kernel[(rows.shape[0],)](
            *results, rows, delta, delta_weight, weight, bias, rows.stride(0), hidden, eps, delta_eps,
            *(ALONE if peers is None or delta is None else peers.arguments(delta.dtype)),
            BLOCK=block, CENTERED=centered, LARGEST=0.0 if to is None else LARGEST[to.dtype],
            GROUP=0 if to is None else to.group, RANKS=1 if peers is None else peers.ranks,
            num_warps=warps_of_row(block), **ROUNDED_TWICE, **overlap(),
        )  # fmt: skip


@triton.jit
def half_norm_row(out, column, inside, scaled_ptr, square_ptr, next_weight_ptr):
    """Store what the next norm needs of `out` [columns], a part of one row; `square_ptr` is that of the part."""
    weight = tl.load(next_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + column, (out * weight).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr, tl.sum(tl.where(inside, out * out, 0.0), axis=0))


HALF_NORMED_DTYPE = torch.bfloat16
"""the only type of half norms: x times the norm's weight can be too large for float16"""


class HalfNormed(NamedTuple):
    """Holds x and its RMS norm without the factor of each row: norm(x) = scaled / sqrt(squares.sum(1) / hidden + eps).
    A linear that reads it may apply the factor to its outputs instead."""

    x: Tensor
    """[num_tokens, hidden]"""
    scaled: Tensor
    """[num_tokens, hidden]: x times the norm's weight, rounded once, in x's dtype"""
    squares: Tensor
    """[num_tokens, parts] fp32: sums of squares of x over parts of its rows"""

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def factor(self, eps: float) -> Tensor:
        """Return the factor of each row # [num_tokens, 1] fp32."""
        return torch.rsqrt(self.squares.sum(1, keepdim=True) / self.shape[1] + eps)

    def normed(self, eps: float) -> Tensor:
        """Return the norm in fp32."""
        return self.scaled.float() * self.factor(eps)


def half_normed_over(
    out: Tensor, next_norm: Tensor | None, parts: int
) -> tuple[Tensor | HalfNormed, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Prepare the result of a kernel that writes `out` # [num_tokens, hidden] with `parts` programs to a row. Returns
    the result, HalfNormed if there is a `next_norm`, and the kernel's arguments for it: scaled, squares and the norm's
    weight, or three None."""
    if next_norm is None:
        return out, (None, None, None)
    half = HalfNormed(out, torch.empty_like(out), out.new_empty((out.shape[0], parts), dtype=torch.float32))
    return half, (half.scaled, half.squares, next_norm)


class Unsummed(NamedTuple):
    """Holds x + delta not yet added up: whoever norms it first writes the sum over x in the same pass."""

    x: Tensor
    """[num_tokens, hidden]"""
    delta: Tensor
    """[num_tokens, hidden], contiguous"""
    weight: Tensor | None = None
    """[hidden]: delta is RMS-normed by it before it is added; None: it is added as it is"""
    eps: float = 0.0
    """of that norm"""
    peers: Peers | None = None
    """sum delta, of which this rank has a share, over the ranks before all else; None: delta is whole"""

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def whole(x: Tensor | HalfNormed | Unsummed) -> Tensor:
    """Return x itself; of Unsummed it is the sum only after that was normed."""
    return x if isinstance(x, Tensor) else x.x


def summed(x: Tensor | HalfNormed | Unsummed) -> Tensor:
    """Return x itself; of Unsummed, add it up (it must not have been normed)."""
    if not isinstance(x, Unsummed):
        return whole(x)
    delta = x.delta if x.peers is None else all_reduce_reference(x.delta, x.peers)
    return x.x.add_(delta if x.weight is None else rms_norm_reference(delta, x.weight, x.eps))


def half_norm_reference(x: Tensor, weight: Tensor, parts: int = 1) -> HalfNormed:
    """Return x [num_tokens, hidden] half normed; `parts` divides hidden."""
    squares = x.float().square().unflatten(1, (parts, -1)).sum(-1)
    return HalfNormed(x, (x.float() * weight.float()).to(x.dtype), squares)


def rms_norm(x: Tensor | HalfNormed | Unsummed, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., hidden] / rms(x) * weight [hidden], contiguous, in x's dtype.

    x is normalized in fp32, rounded to its dtype, then multiplied by the weight, as Hugging Face models do; if the
    weight is in fp32 and x is not, the product alone is rounded, as Gemma does. Unsummed is added up first, and
    HalfNormed normed anew.
    """
    rows = x
    if isinstance(x, Tensor) and x.dim() != 2:
        rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=whole(rows).dtype, device=whole(rows).device)
    _launch(out, rows, weight, eps)
    return out if rows is x else out.view(x.shape)


def rms_norm_quantized(x: Tensor | HalfNormed | Unsummed, weight: Tensor, eps: float, to: Rounding) -> Quantized:
    """Return what `rms_norm` does for x [num_tokens, hidden], rounded as `to` says."""
    num_tokens, hidden = x.shape
    out = empty_quantized(num_tokens, hidden, to, whole(x).device)
    _launch(out, x, weight, eps, to)
    return out


def layer_norm(x: Tensor | Unsummed, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / standard deviation * weight + bias for x [num_tokens, hidden], computed in fp32 and rounded
    once. `weight` and `bias` [hidden] may be None. Unsummed is added up first."""
    out = torch.empty(x.shape, dtype=whole(x).dtype, device=whole(x).device)
    _launch(out, x, weight, eps, None, bias, centered=True)
    return out


def add_up(x: Unsummed) -> Tensor:
    """Return the sum, written over x.x, of which nothing else is made."""
    _launch(None, x)
    return x.x


def of_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`. Where it is so already, asking torch for that costs as much as a small operation."""
    return x if x.dtype == dtype else x.to(dtype)


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], device=device)


def rms_norm_reference(x: Tensor | HalfNormed | Unsummed, weight: Tensor, eps: float) -> Tensor:
    x = summed(x)
    # mean square = norm squared / hidden; half as many operations as F.rms_norm, which counts on a CPU
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if weight.dtype != x.dtype:
        return (x * scale * weight).to(x.dtype)
    return of_type(x * scale, x.dtype).mul_(weight)  # rounds before it multiplies


def rms_norm_quantized_reference(
    x: Tensor | HalfNormed | Unsummed, weight: Tensor, eps: float, to: Rounding
) -> Quantized:
    return quantize_reference(rms_norm_reference(x, weight, eps), to)


def layer_norm_reference(x: Tensor | Unsummed, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    x = summed(x)
    wide_weight, wide_bias = (None if one is None else one.float() for one in (weight, bias))
    return of_type(F.layer_norm(x.float(), x.shape[-1:], wide_weight, wide_bias, eps), x.dtype)


def add_up_reference(x: Unsummed) -> Tensor:
    return summed(x)
