"""Quantizes activations to fp8 or int8, holds weights of 8 bits, and computes linear layers over fp8 by the vendor's
library (W8A8).

The kernels that make a linear's input (norm.py, activation.py) round it in the same pass with `quantize_row`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, next_power_of_2, overlap, tl, triton, wait_for_inputs

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0, torch.int8: 127.5}
"""what a row's largest number becomes. The same bits mean half as much in e4m3fnuz as in e4m3fn: with scales twice as
large both hold the same numbers, so a model gives the same results; the range from 224 to 240 stays unused. Integers
go from -128 to 127: 127.5 is in the middle, as compressed-tensors has it."""
LEAST_GROUP = 32
"""inputs that the matrix units take at once: fewer cannot share a scale"""
SMALLEST = tl.constexpr(1e-12)
"""Rows whose largest number is smaller, like rows of zeros, are scaled as if it were this."""
FAST_ACCUM = True
"""NVIDIA's matrix units add up products of fp8 without going through a register in between."""
TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a small fp32 number and taken away again, it leaves the nearest integer, ties to even"""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Says how activations become numbers of 8 bits: each token with a scale of its own, unless a field says else."""

    dtype: torch.dtype
    """one of LARGEST"""
    group: int = 0
    """columns of a token that share a scale, a power of two; 0: all"""
    shift: int = 0
    """columns of the first group that come before the first column here: a rank's slice begins within a group"""
    given: Tensor | None = None
    """[2] fp32: the scale of all tokens, known beforehand, and their zero point; larger numbers are cut off"""
    bound: Tensor | None = None
    """[1] fp32: a token's largest number counts as at most this; larger numbers are cut off"""
    zeros: bool = False
    """int8 only: codes - zero points are what is scaled, so that both ends of the range are used"""
    over_ranks: Callable[[Tensor], Tensor] | None = None
    """makes of the largest numbers here # [num_tokens, num_groups] fp32 those of all ranks that hold a token's columns;
    kernels do not know it, references do; None: no other rank holds any"""

    def num_groups(self, width: int) -> int:
        """Return how many scales a token of `width` columns has."""
        return -(-(width + self.shift) // self.group) if self.group else 1


class Quantized(NamedTuple):
    """Holds x as (values - zeros) * scales; its shape is that of x."""

    values: Tensor
    """[num_tokens, size] fp8 or int8, contiguous"""
    scales: Tensor
    """[num_tokens, 1] fp32; with groups, [num_tokens, groups]"""
    zeros: Tensor | None = None
    """[num_tokens, 1] fp32"""
    group: int = 0
    """columns that share a scale; 0: all"""
    shift: int = 0
    """see Rounding"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return x in `dtype`."""
        wide, scales = self.values.float(), self.scales
        if self.zeros is not None:
            wide -= self.zeros
        if self.group:
            scales = scales.repeat_interleave(self.group, 1)[:, self.shift : self.shift + wide.shape[1]]
        return (wide * scales).to(dtype)


class NarrowWeight(NamedTuple):
    """Holds a weight as values * scales, for activations of the same type or of 16 bits."""

    values: Tensor
    """[out, in] fp8 or int8, contiguous"""
    scales: Tensor
    """fp32: [out]; or [row blocks, groups], where `group` inputs of `rows` outputs share a scale"""
    rows: int = 0
    """0: a scale an output"""
    group: int = 0
    """a power of two from LEAST_GROUP on"""
    sums: Tensor | None = None
    """[out] fp32: each output's values added up, for activations with zero points"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        """Return the weight in fp32."""
        wide = self.values.float()
        if not self.rows:
            return wide * self.scales[:, None]
        scales = self.scales.repeat_interleave(self.rows, 0)[: wide.shape[0]]
        return wide * scales.repeat_interleave(self.group, 1)[:, : wide.shape[1]]


def empty_quantized(num_tokens: int, size: int, to: Rounding, device: torch.device) -> Quantized:
    """Allocate a Quantized, uninitialized."""
    values = torch.empty((num_tokens, size), dtype=to.dtype, device=device)
    scales = torch.empty((num_tokens, to.num_groups(size)), dtype=torch.float32, device=device)
    zeros = torch.empty((num_tokens, 1), dtype=torch.float32, device=device) if to.zeros else None
    return Quantized(values, scales, zeros, to.group, to.shift)


def warps_of_row(block: int) -> int:
    """Return the warps for a program that holds a row of up to `block` numbers, or two such rows, in registers."""
    most = 32 if DEVICE_FAMILY == "cuda" and block > 16384 else 16  # 16 waves of 64 are all that AMD has (not measured)
    return min(most, max(1, block // 512))


@triton.jit
def _to_integer(x):
    """Return the nearest integer to each x, as fp32; ties go to the even one."""
    return (x + TO_INTEGER) - TO_INTEGER


@triton.jit
def quantize_row(
    values_ptr, scales_ptr, zeros_ptr, given_ptr, bound_ptr, x, row, columns, inside, width,
    LARGEST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store a row x [BLOCK] fp32, zero where not inside, as fp8 or int8 with its scale or scales: see Rounding. NaN
    becomes NaN; so does infinity, except where numbers are cut off. Without that nothing needs to be clamped:
    x * factor exceeds LARGEST by rounding at most."""
    BLOCK: tl.constexpr = x.shape[0]
    INTEGER: tl.constexpr = values_ptr.dtype.element_ty == tl.int8
    if GROUP > 0 and GROUP < BLOCK:
        parts = tl.reshape(x, [BLOCK // GROUP, GROUP])
        largest = tl.maximum(tl.max(tl.abs(parts), axis=1), SMALLEST)
        factor = tl.div_rn(tl.full([BLOCK // GROUP], LARGEST, tl.float32), largest)
        part = tl.arange(0, BLOCK // GROUP)
        groups = (width + GROUP - 1) // GROUP
        tl.store(scales_ptr + row * groups + part, largest * (1.0 / LARGEST), mask=part < groups)
        x = tl.reshape(parts * factor[:, None], [BLOCK])
    else:
        if given_ptr is not None:
            scale = tl.load(given_ptr)
            factor = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
        elif zeros_ptr is not None:
            low = tl.minimum(tl.min(x, axis=0), 0.0)
            scale = tl.maximum(tl.max(x, axis=0) - low, SMALLEST) * (1.0 / 255.0)
            factor = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
        else:
            largest = tl.maximum(tl.max(tl.abs(x), axis=0), SMALLEST)
            if bound_ptr is not None:
                largest = tl.minimum(largest, tl.load(bound_ptr))
            factor = tl.div_rn(tl.full((), LARGEST, tl.float32), largest)
            scale = largest * (1.0 / LARGEST)
        if INTEGER:
            scale += tl.sum(x * 0.0, axis=0)  # an integer cannot be NaN
        tl.store(scales_ptr + row, scale)
        x *= factor
        if zeros_ptr is not None:
            if given_ptr is not None:
                zero = tl.load(given_ptr + 1)
            else:
                zero = _to_integer(-128.0 - low * factor)
            tl.store(zeros_ptr + row, zero)
            x += zero
        if INTEGER or given_ptr is not None or bound_ptr is not None:
            lowest = -128.0 if INTEGER else -LARGEST
            highest = 127.0 if INTEGER else LARGEST
            x = tl.clamp(x, lowest, highest, propagate_nan=tl.PropagateNan.ALL)
    if INTEGER:
        x = _to_integer(x)
    tl.store(values_ptr + row * width + columns, x.to(values_ptr.dtype.element_ty), mask=inside)


def row_arguments(out: Quantized, to: Rounding) -> tuple[Any, ...]:
    """Return what a kernel that calls `quantize_row` is given: values, scales, zeros, given and bound."""
    return out.values, out.scales, out.zeros, to.given, to.bound


@triton.jit
def _quantize_kernel(
    values_ptr, scales_ptr, zeros_ptr, given_ptr, bound_ptr, x_ptr, x_stride, width,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    quantize_row(
        values_ptr, scales_ptr, zeros_ptr, given_ptr, bound_ptr, x, row, columns, inside, width, LARGEST, GROUP
    )


def quantize(x: Tensor, to: Rounding) -> Quantized:
    """Round x [num_tokens, size], whose rows are contiguous, as `to` says; it has no shift."""
    num_tokens, width = x.shape
    out = empty_quantized(num_tokens, width, to, x.device)
    if num_tokens:
        block = next_power_of_2(width)
        _quantize_kernel[(num_tokens,)](
            *row_arguments(out, to), x, x.stride(0), width,
            BLOCK=block, LARGEST=LARGEST[to.dtype], GROUP=to.group, num_warps=warps_of_row(block), **overlap(),
        )  # fmt: skip
    return out


def quantize_reference(x: Tensor, to: Rounding) -> Quantized:
    if to.group:
        return _in_groups(x, to)
    wide, highest, zeros = x.float(), LARGEST[to.dtype], None
    of_all = to.over_ranks or _same
    if to.given is not None:
        scales, given_zeros = to.given.expand(x.shape[0], 2).split(1, dim=1)
        factor, zeros = 1.0 / scales, given_zeros if to.zeros else None
    elif to.zeros:
        low = -of_all(-wide.amin(-1, keepdim=True).clamp_max(0.0))
        high = of_all(wide.amax(-1, keepdim=True).clamp_min(0.0))
        scales = (high - low).clamp_min(1e-12) * (1.0 / 255.0)
        factor = 1.0 / scales
        zeros = (-128.0 - low * factor).round_()
    else:
        largest = of_all(wide.abs().amax(-1, keepdim=True).clamp_min(1e-12))
        largest = largest if to.bound is None else torch.minimum(largest, to.bound)
        factor = torch.full_like(largest, highest).div_(largest)  # a number / a tensor would be rounded twice
        scales = largest * (1.0 / highest)
    values = wide * factor if zeros is None else wide * factor + zeros
    if to.dtype == torch.int8 or to.given is not None or to.bound is not None:
        values.clamp_(*((-128.0, 127.0) if to.dtype == torch.int8 else (-highest, highest)))
    if to.dtype == torch.int8:
        scales = scales + (wide * 0.0).sum(-1, keepdim=True)  # an integer cannot be NaN
        values.round_().nan_to_num_()
    return Quantized(values.to(to.dtype), scales.contiguous(), None if zeros is None else zeros.contiguous())


def _same(largest: Tensor) -> Tensor:
    return largest


def _in_groups(x: Tensor, to: Rounding) -> Quantized:
    (num_tokens, width), groups = x.shape, to.num_groups(x.shape[1])
    padded = F.pad(x.float(), (to.shift, groups * to.group - to.shift - width))
    of_all = to.over_ranks or _same
    rows = Rounding(to.dtype, over_ranks=lambda largest: of_all(largest.view(num_tokens, groups)).reshape(-1, 1))
    values, scales, *_ = quantize_reference(padded.view(num_tokens * groups, to.group), rows)
    values = values.view(padded.shape)[:, to.shift : to.shift + width].contiguous()
    return Quantized(values, scales.view(num_tokens, groups), None, to.group, to.shift)


def quantize_per_token(x: Tensor, fp8: torch.dtype) -> Quantized:
    """Quantize x [num_tokens, size], whose rows are contiguous: a row's scale makes its largest number LARGEST[fp8]."""
    return quantize(x, Rounding(fp8))


def quantize_per_token_reference(x: Tensor, fp8: torch.dtype, largest: Tensor | None = None) -> Quantized:
    """Quantize as the kernel does; with `largest` [], as if that were the largest number of every row."""
    if largest is None:
        return quantize_reference(x, Rounding(fp8))
    most = largest.float().expand(x.shape[0], 1).clamp_min(1e-12)
    factor = torch.full_like(most, LARGEST[fp8]).div_(most)
    return Quantized((x.float() * factor).to(fp8), most * (1.0 / LARGEST[fp8]))


def fp8_linear(
    x: Quantized,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return x [T, K] @ (weight [N, K] * weight_scales [N] or [1]).T + bias [N]: [T, N].

    x, which has a scale a token, and weight are fp8 and contiguous, scales fp32, sums fp32. K and N must be multiples
    of 16.
    """
    n = weight.shape[0]
    if not x.shape[0]:
        return torch.empty((0, n), dtype=out_dtype, device=weight.device)
    if weight_scales.shape[0] != n:
        weight_scales = weight_scales.expand(n).contiguous()
    dtype = torch.bfloat16 if DEVICE_FAMILY == "hip" else out_dtype  # hipBLASLt gives nothing else
    fused = bias if bias is not None and bias.dtype == dtype and dtype != torch.float32 else None
    out = torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales,
        scale_b=weight_scales.view(1, n),
        bias=fused,
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUM,
    ).to(out_dtype)
    return out if bias is None or bias is fused else out.add_(bias)


def fp8_linear_reference(
    x: Quantized,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    out = F.linear(x.values.float(), weight.float()) * x.scales * weight_scales
    return (out if bias is None else out + bias.float()).to(out_dtype)
