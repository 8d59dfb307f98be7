"""Computes linear layers batch-invariantly: a token's outputs have the same bits however many tokens there are.

An output is the sum of PARTS parts of its inputs, in order; a part adds up BLOCK_K inputs at a time. Both depend on the
weight's size alone. With few tokens a program computes one part, so that all of the GPU reads the weight; with many it
computes all parts of a larger tile. The sums, their order and the instructions that compute them are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, overlap, tl, triton, wait_for_inputs


@dataclass(frozen=True)
class Tile:
    """Describes a program's tile: block_m tokens by block_n outputs."""

    block_m: int
    """at least 64 on NVIDIA in 16 bits, where smaller tiles take other instructions"""
    block_n: int
    num_warps: int
    num_stages: int


BLOCK_K = {2: 64, 4: 32}
"""bytes of an element -> inputs added up at a time"""
FEW: dict[tuple[str, int], Tile] = {
    ("cuda", 2): Tile(64, 64, 4, 6),
    ("cuda", 4): Tile(32, 32, 4, 3),
    # derived, not measured
    ("hip", 2): Tile(64, 64, 4, 2),
    ("hip", 4): Tile(32, 32, 4, 2),
}
MANY: dict[tuple[str, int], Tile] = {
    ("cuda", 2): Tile(128, 128, 8, 4),
    ("cuda", 4): Tile(32, 64, 4, 3),
    # derived, not measured
    ("hip", 2): Tile(128, 128, 8, 2),
    ("hip", 4): Tile(32, 64, 4, 2),
}
SLICES = 8
"""of the inputs of a linear whose inputs ranks share"""
FEW_TOKENS = 192
"""Up to so many tokens, a program computes one part."""
PROGRAMS_WANTED = 256
"""for one token: two on each of an H200's multiprocessors. It is constant, so that equal weights give equal bits."""
SHORTEST_PART = 1024
"""inputs of a part, at least"""
GROUP_M = 16
"""tiles of tokens that use a weight's tile while the L2 cache holds it"""


@lru_cache(maxsize=256)
def num_parts(n: int, k: int, element_size: int) -> int:
    """Return the number of parts of the sums of a weight [n, k]: a power of two."""
    programs = -(-n // FEW["cuda", element_size].block_n)
    parts = 1
    while parts * programs < PROGRAMS_WANTED and k >= 2 * parts * SHORTEST_PART:
        parts *= 2
    return parts


@triton.jit
def _sum_part(
    x_ptrs,
    weight_ptrs,
    row_in,
    begin,
    end,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Return the products over the inputs [begin, end) # [BLOCK_M, BLOCK_N] fp32."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=row_in[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start)
        else:
            inside = start + k < K
            x = tl.load(x_ptrs + start, mask=row_in[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    out_ptr,
    sums_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_tokens,
    N,
    K,
    x_stride,
    weight_stride,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply; grid (tiles, PARTS if APART else 1). APART writes the parts to `sums` fp32 [PARTS, num_tokens, N]."""
    wait_for_inputs(OVERLAP)
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    row = (group * GROUP_M + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_in, column_in = row < num_tokens, column < N
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + tl.minimum(column, N - 1).to(tl.int64)[None, :] * weight_stride + k[:, None]
    size = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS) * BLOCK_K
    out_offset = row.to(tl.int64)[:, None] * N + column[None, :]
    mask = row_in[:, None] & column_in[None, :]
    if APART:
        part = tl.program_id(1)
        begin = part * size
        end = tl.minimum(begin + size, K)
        total = _sum_part(x_ptrs, weight_ptrs, row_in, begin, end, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
        tl.store(sums_ptr + part.to(tl.int64) * num_tokens * N + out_offset, total, mask=mask)
    else:
        end = tl.minimum(size, K)
        total = _sum_part(x_ptrs, weight_ptrs, row_in, 0, end, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
        for part in range(1, PARTS):
            begin = part * size
            end = tl.minimum(begin + size, K)
            total += _sum_part(x_ptrs, weight_ptrs, row_in, begin, end, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=column_in, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + out_offset, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_parts_kernel(
    out_ptr,
    sums_ptr,
    bias_ptr,
    num_tokens,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the parts in their order, then the bias; grid (num_tokens, blocks of outputs)."""
    wait_for_inputs(OVERLAP)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_in = column < N
    offset = tl.program_id(0).to(tl.int64) * N + column
    total = tl.load(sums_ptr + offset, mask=column_in, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums_ptr + part * (num_tokens.to(tl.int64) * N) + offset, mask=column_in, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=column_in)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    outputs: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x [T, K] @ weight [N, K].T + bias [N]: [T, N] in `dtype`, by default x's (fp16, bf16 or fp32), with sums
    in fp32.

    Row t of the result depends on row t of x alone, bit for bit. The rows of x and of the weight are contiguous.
    `outputs`: those that all ranks have of the weight together, so that its sums do not depend on how many ranks there
    are; None: N.
    """
    num_tokens, k = x.shape
    n, size = weight.shape[0], x.element_size()
    out = torch.empty((num_tokens, n), dtype=dtype or x.dtype, device=x.device)
    if not num_tokens:
        return out
    parts = num_parts(outputs or n, k, size)
    few = num_tokens <= FEW_TOKENS
    tile = (FEW if few else MANY)[DEVICE_FAMILY, size]
    apart = few and parts > 1
    sums = torch.empty((parts, num_tokens, n), dtype=torch.float32, device=x.device) if apart else out
    tiles = -(-num_tokens // tile.block_m) * -(-n // tile.block_n)
    _matmul_kernel[(tiles, parts if apart else 1)](
        out, sums, x, weight, bias, num_tokens, n, k, x.stride(0), weight.stride(0),
        PARTS=parts, APART=apart, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=BLOCK_K[size], GROUP_M=GROUP_M,
        EVEN_K=k % BLOCK_K[size] == 0, num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(),
    )  # fmt: skip
    if apart:
        block = 1024
        _add_parts_kernel[(num_tokens, -(-n // block))](
            out, sums, bias, num_tokens, n, PARTS=parts, BLOCK=block, num_warps=4, **overlap()
        )
    return out


def matmul_slices(weight: Tensor, slices: int) -> Callable[[Tensor], Tensor]:
    """Return what multiplies x [T, K] with weight [N, K] as so many slices of K, a power of two, and adds these up in
    fp32 as a tree # [T, N] fp32.

    A rank that holds the inputs of some of SLICES slices gets the sum of the same branch of the tree whatever else
    there is. A CPU keeps a copy of 16-bit weights in fp32.
    """
    k = weight.shape[1]
    places = [slice(*ends) for ends in pairwise(k * number // slices for number in range(slices + 1))]
    on_cpu = weight.device.type == "cpu"
    parts = [weight[:, place].float() if on_cpu else weight[:, place] for place in places]

    def multiply(x: Tensor) -> Tensor:
        if on_cpu:
            return tree_sum([F.linear(x[:, place].float(), part) for place, part in zip(places, parts, strict=True)])
        return tree_sum(
            [matmul(x[:, place], part, dtype=torch.float32) for place, part in zip(places, parts, strict=True)]
        )

    return multiply


def tree_sum(terms: list[Tensor]) -> Tensor:
    """Return the sum of terms, a power of two of them: neighbours are added, then neighbouring sums, and so on."""
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def matmul_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)
