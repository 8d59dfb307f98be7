"""Widens a PackedWeight, for products over so many tokens that the vendor's library is worth it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernels._triton import overlap, tl, triton, wait_for_inputs
from headrace.kernels.packed import PackedWeight
from headrace.kernels.packed_gemm import packing, scale_of, scaled, value_of, zero_of


@triton.jit
def _widen_kernel(
    out_ptr, codes_ptr, scale_ptr, zero_ptr, factor_ptr, N, K, groups,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N rows of BLOCK_K inputs; grid (blocks of inputs, blocks of rows)."""
    wait_for_inputs(OVERLAP)
    SPAN: tl.constexpr = 128 // BITS  # inputs of 16 bytes
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * BLOCK_K
    byte = tl.arange(0, BLOCK_K * BITS // 8)
    first = start + tl.arange(0, BLOCK_K * BITS // 128) * SPAN
    k = start + byte // 16 * SPAN + byte % 16
    width = (K + 31) // 32 * (4 * BITS)
    row_in, held_row = row < N, tl.minimum(row, N - 1).to(tl.int64)
    place = start // 8 * BITS + byte
    codes = tl.load(codes_ptr + held_row[:, None] * width + place[None, :], mask=(place < width)[None, :], other=0)
    factor = tl.full([BLOCK_N, 1], 1.0, tl.float32)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + held_row)[:, None]
    for half in tl.static_range(8 // BITS):
        at = held_row[:, None] * groups + tl.minimum((first + half * 16) // GROUP, groups - 1)[None, :]
        scale = scale_of(scale_ptr + at, SCALES) * factor
        zero = zero_of(zero_ptr, at, BITS, E2M1)
        values = scaled(value_of(codes, 4 * half, BITS, E2M1), zero, scale, out_ptr.dtype.element_ty)
        column = k + half * 16
        tl.store(
            out_ptr + row.to(tl.int64)[:, None] * K + column[None, :], values, row_in[:, None] & (column < K)[None, :]
        )


def widen_packed(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, its columns in its own order, not the checkpoint's."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    block_n, block_k = 16, 256
    scales = weight.plain_scales()
    _widen_kernel[(-(-k // block_k), -(-n // block_n))](
        out, weight.codes, scales, weight.zeros, weight.factors, n, k, scales.shape[-1],
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, **packing(weight), **overlap(),
    )  # fmt: skip
    return out


def widen_packed_reference(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return replace(weight, order=None).dequantize(dtype)
