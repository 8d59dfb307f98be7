"""Computes norms of queries and keys in place, of each head by weights of its own or of all heads as one vector.

A norm by weights that all heads share is part of the kernels that rotate (kernels/rotary.py, kernels/decode.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs


@triton.jit
def _qk_norm_kernel(
    x_ptr,
    weight_ptr,
    squares_ptr,
    x_stride,
    eps,
    q_size,
    k_size,
    ranks,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm a part of a token's row; grid (num_tokens, parts). With `squares` the parts are all queries and all keys,
    else heads, whose mean is subtracted if CENTERED."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if squares_ptr is None:
        start = part * HEAD_DIM
        size = HEAD_DIM
    else:
        start = part * q_size
        size = tl.where(part == 0, q_size, k_size)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    ptrs = x_ptr + row * x_stride + start + column
    x = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    if squares_ptr is None:
        if CENTERED:
            x = tl.where(inside, x - tl.sum(x, axis=0) / size, 0.0)
        squares = tl.sum(x * x, axis=0) / size
    else:
        squares = tl.load(squares_ptr + row * 2 + part) / (size * ranks)
    normed = x * tl.rsqrt(squares + eps)
    if not CENTERED and weight_ptr.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    normed *= tl.load(weight_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(ptrs, normed.to(dtype), mask=inside)


@triton.jit
def _squares_kernel(
    out_ptr, x_ptr, x_stride, q_size, k_size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Sum up squares; grid (num_tokens, 2)."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < tl.where(part == 0, q_size, k_size)
    x = tl.load(x_ptr + row * x_stride + part * q_size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * 2 + part, tl.sum(x * x, axis=0))


def qk_squares(qkv: Tensor, heads: tuple[int, int]) -> Tensor:
    """Return the sums of squares of all queries and of all keys of a token # [num_tokens, 2] fp32, given
    qkv # [num_tokens, all heads, head_dim], of which the first `heads` are those of queries and of keys."""
    num_tokens, _, dim = qkv.shape
    out = torch.empty((num_tokens, 2), dtype=torch.float32, device=qkv.device)
    if num_tokens:
        q_size, k_size = (count * dim for count in heads)
        _squares_kernel[(num_tokens, 2)](
            out, qkv, qkv.stride(0), q_size, k_size, BLOCK=next_power_of_2(q_size), num_warps=4, **overlap()
        )
    return out


def qk_norm(
    qkv: Tensor,
    weight: Tensor,
    heads: tuple[int, int],
    eps: float,
    centered: bool = False,
    squares: Tensor | None = None,
    ranks: int = 1,
) -> Tensor:
    """Change the queries and keys of qkv # [num_tokens, all heads, head_dim] to their norms, and return it.

    The first `heads` are those of queries and of keys; `weight` # [heads of both * head_dim]. With `squares`, those of
    all `ranks`, all queries are one vector and all keys another, RMS-normed. Else each head is normed, about its mean
    if `centered`.
    """
    num_tokens, _, dim = qkv.shape
    if num_tokens:
        q_size, k_size = (count * dim for count in heads)
        block = next_power_of_2(dim if squares is None else q_size)
        _qk_norm_kernel[(num_tokens, sum(heads) if squares is None else 2)](
            qkv, weight, squares, qkv.stride(0), eps, q_size, k_size, ranks, HEAD_DIM=dim, BLOCK=block,
            CENTERED=centered, num_warps=1 if squares is None else 4, **overlap(),
        )  # fmt: skip
    return qkv


def qk_squares_reference(qkv: Tensor, heads: tuple[int, int]) -> Tensor:
    q, k = qkv[:, : sum(heads)].float().square().split(list(heads), dim=1)
    return torch.stack((q.sum((1, 2)), k.sum((1, 2))), dim=1)


def qk_norm_reference(
    qkv: Tensor,
    weight: Tensor,
    heads: tuple[int, int],
    eps: float,
    centered: bool = False,
    squares: Tensor | None = None,
    ranks: int = 1,
) -> Tensor:
    both = qkv[:, : sum(heads)]
    x, dim = both.float(), qkv.shape[2]
    if centered:
        x = x - x.mean(-1, keepdim=True)
    if squares is None:
        mean = x.square().mean(-1, keepdim=True)
    else:
        counts = torch.tensor(heads, device=qkv.device)
        mean = (squares / (counts * dim * ranks)).repeat_interleave(counts, dim=1)[..., None]
    x = x * torch.rsqrt(mean + eps)
    if not centered and weight.dtype == qkv.dtype:
        x = x.to(qkv.dtype).float()
    both.copy_(x * weight.float().view(sum(heads), dim))
    return qkv
