"""Computes in place limits of what attention projects, products of its output with gates, and of rows with a number."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs


@triton.jit
def _clip_kernel(x_ptr, x_stride, limit, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Hold numbers within +-limit, NaN stays; grid (rows, blocks of columns)."""
    wait_for_inputs(OVERLAP)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + column
    x = tl.load(ptrs, mask=column < width, other=0.0).to(tl.float32)
    x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(ptrs, x.to(x_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _gate_heads_kernel(
    x_ptr, gates_ptr, gates_stride, head_stride, width,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply by sigmoids; grid (num_tokens, blocks of columns)."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptrs = gates_ptr + row * gates_stride + column // HEAD_DIM * head_stride + column % HEAD_DIM
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    share = tl.sigmoid(gate).to(dtype).to(tl.float32)
    tl.store(x_ptr + row * width + column, (x * share).to(dtype), mask=inside)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, x_stride, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Multiply by one number; grid (rows, blocks of columns)."""
    wait_for_inputs(OVERLAP)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + column
    x = tl.load(ptrs, mask=column < width, other=0.0).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(ptrs, x.to(x_ptr.dtype.element_ty), mask=column < width)


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x # [rows, width], whose rows are contiguous, by factor # [1], and return it."""
    rows, width = x.shape
    if rows:
        block = min(1024, next_power_of_2(width))
        grid = (rows, -(-width // block))
        _scale_kernel[grid](x, factor, x.stride(0), width, BLOCK=block, num_warps=4, **overlap())
    return x


def clip(x: Tensor, limit: float) -> Tensor:
    """Change x # [rows, width], whose rows are contiguous, to what lies within +-limit, and return it."""
    rows, width = x.shape
    if rows:
        block = min(1024, next_power_of_2(width))
        _clip_kernel[(rows, -(-width // block))](x, x.stride(0), limit, width, BLOCK=block, num_warps=4, **overlap())
    return x


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply attention's output x # [num_tokens, num_heads, head_dim], contiguous, by the sigmoids of gates # the
    same, of which each head's numbers lie side by side, and return it."""
    num_tokens, heads, dim = x.shape
    if num_tokens:
        width = heads * dim
        block = min(1024, next_power_of_2(width))
        _gate_heads_kernel[(num_tokens, -(-width // block))](
            x, gates, gates.stride(0), gates.stride(1), width, HEAD_DIM=dim, BLOCK=block, num_warps=4, **overlap()
        )
    return x


def scale_reference(x: Tensor, factor: Tensor) -> Tensor:
    return x.mul_(factor)


def clip_reference(x: Tensor, limit: float) -> Tensor:
    return x.clamp_(-limit, limit)


def gate_heads_reference(x: Tensor, gates: Tensor) -> Tensor:
    return x.mul_(torch.sigmoid(gates))
