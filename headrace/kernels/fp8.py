"""Quantizes activations to fp8 with a scale a token, and computes linear layers over them (W8A8).

The kernels that make a linear's input (norm.py, activation.py) quantize it in the same pass with `quantize_row`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, next_power_of_2, overlap, tl, triton, wait_for_inputs

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
"""what a row's largest number becomes. The same bits mean half as much in e4m3fnuz as in e4m3fn: with scales twice as
large both hold the same numbers, so a model gives the same results; the range from 224 to 240 stays unused."""
SMALLEST = tl.constexpr(1e-12)
"""Rows whose largest number is smaller, like rows of zeros, are scaled as if it were this."""
FAST_ACCUM = True
"""NVIDIA's matrix units add up products of fp8 without going through a register in between."""


class Quantized(NamedTuple):
    """Holds x as values * scales; its shape is that of x."""

    values: Tensor
    """[num_tokens, size] fp8, contiguous"""
    scales: Tensor
    """[num_tokens, 1] fp32"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return x in `dtype`."""
        return (self.values.float() * self.scales).to(dtype)


def empty_quantized(num_tokens: int, size: int, fp8: torch.dtype, device: torch.device) -> Quantized:
    """Allocate a Quantized, uninitialized."""
    values = torch.empty((num_tokens, size), dtype=fp8, device=device)
    return Quantized(values, torch.empty((num_tokens, 1), dtype=torch.float32, device=device))


def warps_of_row(block: int) -> int:
    """Return the warps for a program that holds a row of up to `block` numbers, or two such rows, in registers."""
    most = 32 if DEVICE_FAMILY == "cuda" and block > 16384 else 16  # 16 waves of 64 are all that AMD has (not measured)
    return min(most, max(1, block // 512))


@triton.jit
def quantize_row(values_ptr, scales_ptr, x, row, columns, inside, width, LARGEST: tl.constexpr):
    """Store a row x [BLOCK] fp32, zero where not inside, as fp8 and its scale. NaN and infinity become NaN. Nothing
    needs to be clamped: x * factor exceeds LARGEST by rounding at most."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), SMALLEST)
    factor = tl.div_rn(tl.full((), LARGEST, tl.float32), largest)
    tl.store(scales_ptr + row, largest * (1.0 / LARGEST))
    tl.store(values_ptr + row * width + columns, (x * factor).to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_kernel(
    values_ptr, scales_ptr, x_ptr, x_stride, width, BLOCK: tl.constexpr, LARGEST: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    quantize_row(values_ptr, scales_ptr, x, row, columns, inside, width, LARGEST)


def quantize_per_token(x: Tensor, fp8: torch.dtype) -> Quantized:
    """Quantize x [num_tokens, size], whose rows are contiguous: a row's scale makes its largest number LARGEST[fp8]."""
    num_tokens, width = x.shape
    out = empty_quantized(num_tokens, width, fp8, x.device)
    if num_tokens:
        block = next_power_of_2(width)
        _quantize_kernel[(num_tokens,)](
            *out, x, x.stride(0), width, BLOCK=block, LARGEST=LARGEST[fp8], num_warps=warps_of_row(block), **overlap()
        )
    return out


def quantize_per_token_reference(x: Tensor, fp8: torch.dtype, largest: Tensor | None = None) -> Quantized:
    """Quantize as the kernel does; with `largest` [], as if that were the largest number of every row."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True) if largest is None else largest.float().expand(x.shape[0], 1)
    most = most.clamp_min(1e-12)
    factor = torch.full_like(most, LARGEST[fp8]).div_(most)  # a number / a tensor would be rounded twice
    return Quantized((wide * factor).to(fp8), most * (1.0 / LARGEST[fp8]))


def fp8_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return (values [T, K] * scales [T, 1]) @ (weight [N, K] * weight_scales [N] or [1]).T + bias [N]: [T, N].

    Values and weight fp8 and contiguous, scales fp32, sums fp32. K and N must be multiples of 16.
    """
    n = weight.shape[0]
    if not values.shape[0]:
        return torch.empty((0, n), dtype=out_dtype, device=values.device)
    if weight_scales.shape[0] != n:
        weight_scales = weight_scales.expand(n).contiguous()
    dtype = torch.bfloat16 if DEVICE_FAMILY == "hip" else out_dtype  # hipBLASLt gives nothing else
    fused = bias if bias is not None and bias.dtype == dtype and dtype != torch.float32 else None
    out = torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scales,
        scale_b=weight_scales.view(1, n),
        bias=fused,
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUM,
    ).to(out_dtype)
    return out if bias is None or bias is fused else out.add_(bias)


def fp8_linear_reference(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    out = F.linear(values.float(), weight.float()) * scales * weight_scales
    return (out if bias is None else out + bias.float()).to(out_dtype)
