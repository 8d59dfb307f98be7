"""Linear layers over few tokens: x @ weight.T where reading the weight is all that costs, in 16-bit or fp8.

Weights are constants, so a program asks for the first of its weights before it waits for the kernel in front of it
(programmatic dependent launch): memory stays busy across kernel boundaries. Knows nothing of layers; which sizes are
served here and which by the vendor's library is said in gemm_config.py.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton functions are typed by what they are launched with.
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import overlap, tl, triton, wait_for_inputs
from headrace.kernels.gemm_config import GemmConfig

PREFETCH_CHUNK = 256
"""Bytes one lane asks for at a time."""


@triton.jit
def _prefetch_rows(
    weight_ptr,
    first_row,
    num_rows,
    first_column,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Ask for weight[first_row : + ROWS, first_column : + COLUMNS] to come to the L2 cache; CHUNK elements a lane."""
    chunks: tl.constexpr = COLUMNS // CHUNK
    lane = tl.arange(0, ROWS * chunks)
    row = tl.minimum(first_row + lane // chunks, num_rows - 1).to(tl.int64)
    address = (weight_ptr + row * K + first_column + lane % chunks * CHUNK).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0; }",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _skinny_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    num_tokens,
    N,
    K,
    x_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_N outputs of up to BLOCK_M tokens. SWAP makes the weight the left operand, whose side of the
    matrix units is the wide one."""
    block = tl.program_id(0)
    if PREFETCH and OVERLAP:
        _prefetch_rows(weight_ptr, block * BLOCK_N, N, 0, K, BLOCK_N, PREFETCH, CHUNK)
    wait_for_inputs(OVERLAP)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = row < num_tokens
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + start, mask=row_in[:, None], other=0.0)
        else:
            inside = (start + k < K)[None, :]
            weight = tl.load(weight_ptrs + start, mask=inside, other=0.0)
            x = tl.load(x_ptrs + start, mask=row_in[:, None] & inside, other=0.0)
        if SWAP:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)
    column_in = column < N
    if weight_scale_ptr is not None:
        acc *= tl.load(weight_scale_ptr + column, mask=column_in, other=0.0)[None, :]
        acc *= tl.load(x_scale_ptr + row, mask=row_in, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column_in, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + row[:, None] * out_stride + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_in[:, None] & column_in[None, :])


@triton.jit
def _gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_N outputs of one token, by multiply and add."""
    block = tl.program_id(0)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    weight = tl.load(weight_ptrs, mask=(k < K)[None, :], other=0.0)
    if PREFETCH and OVERLAP:
        _prefetch_rows(weight_ptr, block * BLOCK_N, N, BLOCK_K, K, BLOCK_N, PREFETCH, CHUNK)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    acc = weight.to(tl.float32) * x[None, :]
    for start in range(BLOCK_K, K, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_ptrs + start)
            x = tl.load(x_ptr + start + k).to(tl.float32)
        else:
            inside = start + k < K
            weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
    total = tl.sum(acc, axis=1)
    column_in = column < N
    if weight_scale_ptr is not None:
        total *= tl.load(weight_scale_ptr + column, mask=column_in, other=0.0) * tl.load(x_scale_ptr)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, total.to(out_ptr.dtype.element_ty), mask=column_in)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: GemmConfig,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N] in `dtype` (default x's), sums in fp32.

    Both 16-bit (or fp32), or both fp8 with x_scale [T, 1] and weight_scale [N] fp32, by which the sums are multiplied.
    The weight is contiguous, x's rows are.
    """
    num_tokens, k = x.shape
    n = weight.shape[0]
    out = torch.empty((num_tokens, n), dtype=dtype or x.dtype, device=x.device)
    if not num_tokens:
        return out
    chunk = PREFETCH_CHUNK // weight.element_size()
    prefetch = config.prefetch if config.prefetch <= k else 0
    if config.block_m == 1:
        _gemv_kernel[(-(-n // config.block_n),)](
            out, x, weight, bias, x_scale, weight_scale, n, k,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN_K=k % config.block_k == 0, PREFETCH=prefetch,
            CHUNK=chunk, num_warps=config.num_warps, **overlap(),
        )  # fmt: skip
        return out
    _skinny_kernel[(-(-n // config.block_n), -(-num_tokens // config.block_m))](
        out, x, weight, bias, x_scale, weight_scale, num_tokens, n, k, x.stride(0), n,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SWAP=config.swap,
        EVEN_K=k % config.block_k == 0, PREFETCH=prefetch, CHUNK=chunk,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlap(),
    )  # fmt: skip
    return out


def skinny_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: GemmConfig | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = F.linear(x.float(), weight.float())
    if x_scale is not None and weight_scale is not None:
        out = out * x_scale * weight_scale
    return (out if bias is None else out + bias.float()).to(dtype or x.dtype)


__all__ = ["skinny_linear", "skinny_linear_reference"]
