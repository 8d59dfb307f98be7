"""Computes linear layers over numbers of 8 bits that the vendor's library does not serve: int8, fp8 with a scale for a
block of the weight, and fp8 of odd sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, overlap, tl, triton, wait_for_inputs
from headrace.kernels.fp8 import Quantized

LEAST_GROUP = 32
"""inputs that the matrix units take at once: fewer cannot share a scale"""


class NarrowWeight(NamedTuple):
    """Holds a weight as values * scales."""

    values: Tensor
    """[out, in] fp8 or int8, contiguous"""
    scales: Tensor
    """fp32: [out]; or [row blocks, groups], where `group` inputs of `rows` outputs share a scale"""
    rows: int = 0
    """0: a scale an output"""
    group: int = 0
    sums: Tensor | None = None
    """[out] fp32: each output's values added up, for activations with zero points"""

    def dequantize(self) -> Tensor:
        """Return the weight in fp32."""
        wide = self.values.float()
        if not self.rows:
            return wide * self.scales[:, None]
        scales = self.scales.repeat_interleave(self.rows, 0)[: wide.shape[0]]
        return wide * scales.repeat_interleave(self.group, 1)[:, : wide.shape[1]]


@dataclass(frozen=True)
class NarrowConfig:
    """Describes a program: block_m tokens by block_n outputs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


CONFIGS: dict[str, tuple[tuple[float, NarrowConfig], ...]] = {
    # (most tokens, what serves them); up to 128 or so reading the weight is all that costs. Not measured.
    "cuda": (
        (16, NarrowConfig(16, 32, 4, 6)),
        (32, NarrowConfig(32, 32, 4, 6)),
        (64, NarrowConfig(64, 64, 4, 5)),
        (float("inf"), NarrowConfig(64, 128, 4, 4)),  # 128 x 128 spills registers where sums are scaled by blocks
    ),
    "hip": (
        (16, NarrowConfig(16, 32, 4, 2)),
        (64, NarrowConfig(32, 64, 4, 2)),
        (float("inf"), NarrowConfig(128, 128, 8, 2)),
    ),
}
BLOCK_K = 128
BAND = 8
"""blocks of tokens that are computed side by side, so that the L2 cache holds their inputs and weights"""


@triton.jit(do_not_specialize=["num_tokens"])
def _narrow_kernel(
    out_ptr, x_ptr, x_scale_ptr, x_zero_ptr, weight_ptr, weight_scale_ptr, sums_ptr, bias_ptr, num_tokens,
    N, K, groups, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, BAND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M tokens by BLOCK_N outputs; ROWS 0: scales are applied once, to the sums."""
    INTEGER: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    down, across = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * across)
    row = (band * BAND + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, column_in = row < num_tokens, column < N
    held_row, held_column = tl.minimum(row, num_tokens - 1), tl.minimum(column, N - 1)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + held_row.to(tl.int64)[:, None] * K + k[None, :]
    weight_ptrs = weight_ptr + held_column.to(tl.int64)[None, :] * K + k[:, None]
    wait_for_inputs(OVERLAP)
    if INTEGER:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            weight = tl.load(weight_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=(start + k < K)[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=(start + k < K)[:, None], other=0.0)
        if INTEGER:
            acc = tl.dot(x, weight, acc, out_dtype=tl.int32)
        elif ROWS == 0:
            acc = tl.dot(x, weight, acc)
        else:
            group = start // GROUP
            x_scale = tl.load(x_scale_ptr + held_row * groups + group)
            weight_scale = tl.load(weight_scale_ptr + held_column // ROWS * groups + group)
            acc += tl.dot(x, weight) * (x_scale[:, None] * weight_scale[None, :])
    total = acc.to(tl.float32)
    if ROWS == 0:
        if x_zero_ptr is not None:
            total -= tl.load(x_zero_ptr + held_row)[:, None] * tl.load(sums_ptr + held_column)[None, :]
        total *= tl.load(x_scale_ptr + held_row)[:, None] * tl.load(weight_scale_ptr + held_column)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + held_column).to(tl.float32)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_in[:, None] & column_in[None, :])


def narrow_linear(
    x: Quantized, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype, config: NarrowConfig | None = None
) -> Tensor:
    """Return x [T, K] @ weight [N, K].T + bias [N] # [T, N] in `dtype`, with sums in fp32 or int32.

    x and weight have numbers of the same type. If `weight.rows`, x has a scale for as many columns as share one there,
    LEAST_GROUP or more.
    """
    (num_tokens, k), n = x.shape, weight.values.shape[0]
    out = torch.empty((num_tokens, n), dtype=dtype, device=x.values.device)
    if not num_tokens:
        return out
    if config is None:
        config = next(config for most, config in CONFIGS[DEVICE_FAMILY] if num_tokens <= most)
    block_k = min(BLOCK_K, weight.group) if weight.rows else BLOCK_K
    grid = (-(-num_tokens // config.block_m) * -(-n // config.block_n),)
    _narrow_kernel[grid](
        out, x.values, x.scales, x.zeros, weight.values, weight.scales, weight.sums, bias, num_tokens,
        n, k, x.scales.shape[1], ROWS=weight.rows, GROUP=weight.group, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=block_k, EVEN_K=k % block_k == 0, BAND=BAND, num_warps=config.num_warps,
        num_stages=config.num_stages, **overlap(),
    )  # fmt: skip
    return out


def narrow_linear_reference(x: Quantized, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = F.linear(x.dequantize(torch.float32), weight.dequantize())
    return (out if bias is None else out + bias.float()).to(dtype)
