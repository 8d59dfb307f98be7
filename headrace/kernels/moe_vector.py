"""Multiplies single tokens by their experts' TiledWeights, as tiled_vector.py does by a linear's.

A program of the first product has some outputs of one expert; one of the second has some of all of a token's experts,
whose sums it weights and adds up: there is no third kernel.
"""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, pairs_in_registers, tl, triton, wait_before_next
from headrace.kernels.moe_config import Tile
from headrace.kernels.moe_kernels import gated, residual_and_shared
from headrace.kernels.norm import half_norm_row
from headrace.kernels.tiled import BLOCK, LANES, ROWS, TiledWeight
from headrace.kernels.tiled_gemm import describe
from headrace.kernels.tiled_vector import VECTOR_ROWS, block_sums, together

_ROWS, _LANES, _QUARTER = tl.constexpr(ROWS), tl.constexpr(LANES), tl.constexpr(VECTOR_ROWS)


@triton.jit
def _codes_of(codes_ptr, expert, quarter, TILES: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """Return pointers to the codes of one quarter of a tile # [warps, LANES / 4], given each warp's expert."""
    at = (expert * TILES + quarter // 4) * (BLOCKS * (BITS // 2) * _LANES) + quarter % 4 * (_LANES // 4)
    return codes_ptr + at[:, None] + tl.arange(0, _LANES // 4)[None, :]


@triton.jit
def _words_of(words_ptr, expert, quarter, step, TILES: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """Return pointers to the first words of its outputs # [warps, 16]."""
    at = (expert * TILES + quarter // 4) * ((step * (BLOCKS - 1) + 1) * (WORDS * _ROWS)) + quarter % 4 * _QUARTER
    return words_ptr + at[:, None] + tl.arange(0, _QUARTER)[None, :]


@triton.jit
def _finished(total, factors_ptr, bias_ptr, at, inside):
    """Return sums # [1, outputs] of one expert times its factors, and with its biases, which are `at` [outputs]."""
    if factors_ptr is not None:
        total *= tl.load(factors_ptr + at, mask=inside, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def vector_up_kernel(
    out_ptr, x_ptr, codes_ptr, words_ptr, factors_ptr, bias_ptr, ids_ptr, share_ptr, words_step,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr,
    WARPS: tl.constexpr, OUTPUTS: tl.constexpr, AHEAD: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    ZEROS_AT: tl.constexpr, WORDS: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS of a pair of out [pairs, N], gated; grid (blocks of N, pairs). x is [tokens, K], with factors
    `share` [pairs], if there are any."""
    wait_before_next(OVERLAP)
    program, pair = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = OUTPUTS // _QUARTER  # quarters of the gate, and as many of what it gates
    warp = tl.arange(0, WARPS)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    experts = tl.zeros_like(warp) + expert
    quarter = program // (2 // HALF) * 4 + program % (2 // HALF)
    codes_ptrs = _codes_of(codes_ptr, experts, quarter, TILES, BLOCKS, BITS)
    words_ptrs = words_ptr
    if WORDS:
        words_ptrs = _words_of(words_ptr, experts, quarter, words_step, TILES, BLOCKS, WORDS)
    sums = block_sums(
        x_ptr + pair // TOP_K * K, codes_ptrs, words_ptrs, warp, BLOCKS, words_step, K, WARPS, WARPS, 2 * HALF,
        3 - HALF, AHEAD, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, WORDS, EVEN_K, ASM, False,
    )  # fmt: skip
    totals = ()
    for which in tl.static_range(2 * HALF):
        totals = totals + (tl.sum(sums[which], axis=0)[None, :],)
    share = 1.0
    if share_ptr is not None:
        share = tl.load(share_ptr + pair)
    column = program * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = column < N
    at = expert * (2 * N) + column
    gate = _finished(together(totals[:HALF]) * share, factors_ptr, bias_ptr, at, inside)
    up = _finished(together(totals[HALF:]) * share, factors_ptr, bias_ptr, at + N, inside)
    result = gated(gate, up, KIND, LIMIT, ALPHA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * N + column[None, :], result, mask=inside[None, :])


@triton.jit
def vector_down_kernel(
    out_ptr, x_ptr, codes_ptr, words_ptr, factors_ptr, bias_ptr, ids_ptr, share_ptr,
    residual_ptr, shared_ptr, gate_ptr, gate_stride, next_scaled_ptr, next_squares_ptr, next_weight_ptr, words_step,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr,
    WARPS: tl.constexpr, OUTPUTS: tl.constexpr, AHEAD: tl.constexpr, MEMBERS: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    ZEROS_AT: tl.constexpr, WORDS: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS of a token of out [tokens, N] = residual and shared expert + the weighted sum of its experts'
    weight @ x [pairs, K]; grid (blocks of N, tokens). MEMBERS experts at a time, each by as many of the warps.

    The experts were chosen before the kernel that computes x, so the first weights are loaded before x is there.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    program, token = tl.program_id(0), tl.program_id(1)
    EACH: tl.constexpr = WARPS // MEMBERS
    QUARTERS: tl.constexpr = OUTPUTS // _QUARTER
    warp = tl.arange(0, WARPS)
    column = program * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = column < N
    total = tl.zeros([WARPS, OUTPUTS], tl.float32)
    for first in tl.static_range(0, TOP_K, MEMBERS):
        choice = first + warp // EACH
        chosen = choice < TOP_K
        pair = token * TOP_K + tl.minimum(choice, TOP_K - 1)
        # not from the first-level cache: the kernel that wrote these is done, but this one has not waited for it
        expert = tl.load(ids_ptr + pair, cache_modifier=".cg").to(tl.int64)
        share = chosen.to(tl.float32)
        if share_ptr is not None:
            share = tl.load(share_ptr + pair, mask=chosen, other=0.0, cache_modifier=".cg")
        codes_ptrs = _codes_of(codes_ptr, expert, program * QUARTERS, TILES, BLOCKS, BITS)
        words_ptrs = words_ptr
        if WORDS:
            words_ptrs = _words_of(words_ptr, expert, program * QUARTERS, words_step, TILES, BLOCKS, WORDS)
        sums = block_sums(
            x_ptr + (pair.to(tl.int64) * K)[:, None], codes_ptrs, words_ptrs,
            tl.where(chosen, warp % EACH, BLOCKS), BLOCKS, words_step, K, WARPS, EACH, QUARTERS, 1, AHEAD,
            BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, WORDS, EVEN_K, ASM, OVERLAP,
        )  # fmt: skip
        own = together(sums)
        at = expert[:, None] * N + column[None, :]
        if factors_ptr is not None:
            own *= tl.load(factors_ptr + at, mask=inside[None, :], other=0.0)
        if bias_ptr is not None:
            once = (warp % EACH == 0)[:, None] & inside[None, :]
            own += tl.load(bias_ptr + at, mask=once, other=0.0).to(tl.float32)
        total += own * share[:, None]
    extras = residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    rounded = (extras + tl.sum(total, axis=0)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + token * tl.num_programs(0) + program
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)


def _options(weight: TiledWeight, n: int, k: int, tile: Tile) -> dict[str, Any]:
    """Return the options of both kernels."""
    return {
        "N": n, "K": k, "TILES": weight.codes.shape[1], "BLOCKS": weight.codes.shape[2], "EVEN_K": k % BLOCK == 0,
        "WARPS": tile.num_warps, "OUTPUTS": tile.block_n, "AHEAD": tile.num_stages, "ASM": pairs_in_registers(),
        "num_warps": tile.num_warps, **describe(weight), **overlap(),
    }  # fmt: skip


def launch_vector_up(
    out: Tensor, x: Tensor, weight: TiledWeight, bias: Tensor | None, ids: Tensor, share: Tensor | None, tile: Tile,
    gates: dict[str, float],
) -> None:  # fmt: skip
    """Write x [tokens, K] times the pairs' experts `ids` and factors `share`, gated, to `out` [pairs, N]. `tile`: 16 or
    32 outputs."""
    (pairs, n), k = out.shape, x.shape[1]
    vector_up_kernel[(-(-n // tile.block_n), pairs)](
        out, x, weight.codes, weight.words, weight.factors, bias, ids, share, weight.words_step,
        TOP_K=ids.shape[1], **gates, **_options(weight, n, k, tile),
    )  # fmt: skip


def launch_vector_down(
    out: Tensor, x: Tensor, weight: TiledWeight, bias: Tensor | None, ids: Tensor, share: Tensor | None,
    extras: tuple[Any, ...], following: tuple[Tensor | None, ...], tile: Tile,
) -> None:  # fmt: skip
    """Write the residual, the shared expert and the sum of x [pairs, K] times the pairs' experts `ids` and factors
    `share` to `out` [tokens, N]. `tile`: 16, 32 or 64 outputs, and how many experts a program takes at once."""
    (num_tokens, n), k, top_k = out.shape, x.shape[1], ids.shape[1]
    members = min(tile.group, next_power_of_2(top_k), tile.num_warps)
    vector_down_kernel[(-(-n // tile.block_n), num_tokens)](
        out, x, weight.codes, weight.words, weight.factors, bias, ids, share, *extras, *following,
        weight.words_step, TOP_K=top_k, MEMBERS=members, **_options(weight, n, k, tile),
    )  # fmt: skip
