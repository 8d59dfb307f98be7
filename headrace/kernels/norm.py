"""RMS norm. Knows nothing of layers or of tensor parallelism."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.fp8 import (
    LARGEST,
    Quantized,
    empty_quantized,
    quantize_per_token_reference,
    quantize_row,
    warps_of_row,
)


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    scales_ptr,
    x_ptr,
    delta_ptr,
    weight_ptr,
    x_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`out` is fp8 where there are `scales`. `delta`, contiguous, is first added to x."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if delta_ptr is not None:
        x += tl.load(delta_ptr + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(x_ptr + row * x_stride + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    normed = (normed * weight).to(dtype)
    if scales_ptr is None:
        tl.store(out_ptr + row * hidden + columns, normed, mask=inside)
    else:
        quantize_row(out_ptr, scales_ptr, normed.to(tl.float32), row, columns, inside, hidden, LARGEST)


def _launch(
    out: Tensor,
    scales: Tensor | None,
    rows: Tensor,
    weight: Tensor,
    eps: float,
    largest: float,
    delta: Tensor | None = None,
) -> None:
    if rows.shape[0]:
        hidden = rows.shape[1]
        block = next_power_of_2(hidden)
        _rms_norm_kernel[(rows.shape[0],)](
            out,
            scales,
            rows,
            delta,
            weight,
            rows.stride(0),
            hidden,
            eps,
            BLOCK=block,
            LARGEST=largest,
            num_warps=warps_of_row(block),
            **overlap(),
        )


@triton.jit
def half_norm_row(out, column, inside, scaled_ptr, square_ptr, next_weight_ptr):
    """Store what the next norm needs of `out` [columns], a part of one row: `scaled_ptr` is of the row, `square_ptr` of
    the part."""
    weight = tl.load(next_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + column, (out * weight).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr, tl.sum(tl.where(inside, out * out, 0.0), axis=0))


HALF_NORMED_DTYPE = torch.bfloat16
"""x times the norm's weight is too large for float16."""


class HalfNormed(NamedTuple):
    """x, and its RMS norm but for a factor a row, which whoever multiplies by a matrix may apply to the products:
    norm(x) = scaled / sqrt(squares.sum(1) / hidden + eps)."""

    x: Tensor
    """[num_tokens, hidden]"""
    scaled: Tensor
    """[num_tokens, hidden]: x times the norm's weight, rounded once, in x's dtype"""
    squares: Tensor
    """[num_tokens, parts] fp32: sums of squares of x over parts of a row"""

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def normed(self, eps: float) -> Tensor:
        """The whole norm, in fp32."""
        return self.scaled.float() * torch.rsqrt(self.squares.sum(1, keepdim=True) / self.shape[1] + eps)


def half_normed_over(
    out: Tensor, next_norm: Tensor | None, parts: int
) -> tuple[Tensor | HalfNormed, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """(the result of a kernel that writes `out` # [num_tokens, hidden], `parts` programs to a row; what it is told
    beside: where to leave the norm of weight `next_norm` half done, and that weight, each None without one)"""
    if next_norm is None:
        return out, (None, None, None)
    half = HalfNormed(out, torch.empty_like(out), out.new_empty((out.shape[0], parts), dtype=torch.float32))
    return half, (half.scaled, half.squares, next_norm)


class Unsummed(NamedTuple):
    """x + delta, which whoever norms it first writes over x, in the same pass."""

    x: Tensor
    """[num_tokens, hidden]"""
    delta: Tensor
    """the same"""

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def whole(x: Tensor | HalfNormed | Unsummed) -> Tensor:
    """x itself; of Unsummed, after it was normed."""
    return x if isinstance(x, Tensor) else x.x


def summed(x: Tensor | HalfNormed | Unsummed) -> Tensor:
    """x itself, before it is normed."""
    return x.x.add_(x.delta) if isinstance(x, Unsummed) else whole(x)


def half_norm_reference(x: Tensor, weight: Tensor, parts: int = 1) -> HalfNormed:
    """x [num_tokens, hidden]; `parts` divides hidden."""
    squares = x.float().square().unflatten(1, (parts, -1)).sum(-1)
    return HalfNormed(x, (x.float() * weight.float()).to(x.dtype), squares)


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """x [..., hidden] / rms(x) * weight [hidden], contiguous, in x's dtype; `delta`, contiguous and of the shape of an
    x of two dimensions, is first added to x.

    Normalized in fp32, rounded to x's dtype, then multiplied by the weight, as Hugging Face models do.
    """
    hidden = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, hidden)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, rows, weight, eps, 0.0, delta)
    return out if x.dim() == 2 else out.view(x.shape)


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, fp8: torch.dtype, delta: Tensor | None = None
) -> Quantized:
    """What `rms_norm` gives for x [num_tokens, hidden], in fp8; `delta`, of x's shape, is first added to x."""
    num_tokens, hidden = x.shape
    out = empty_quantized(num_tokens, hidden, fp8, x.device)
    _launch(*out, x, weight, eps, LARGEST[fp8], delta)
    return out


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], device=device)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    if delta is not None:
        x.add_(delta)
    # mean square = norm squared / hidden; half as many operations as F.rms_norm, which counts on a CPU
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)  # rounds before it multiplies


def rms_norm_quantized_reference(
    x: Tensor, weight: Tensor, eps: float, fp8: torch.dtype, delta: Tensor | None = None
) -> Quantized:
    return quantize_per_token_reference(rms_norm_reference(x, weight, eps, delta), fp8)
