"""Multiplies tokens by experts that are a TiledWeight (tiled.py): the products of kernels/moe.py by tiles.

The experts' codes are the left operand, the tokens of one expert the right one, as tiled_gemm.py has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import overlap, pairs_in_registers, tl, triton, wait_before_next, wait_for_inputs
from headrace.kernels.gemm_epilogue import sum_of_parts
from headrace.kernels.moe_config import Tile
from headrace.kernels.moe_kernels import gated
from headrace.kernels.moe_route import Routing
from headrace.kernels.tiled import BLOCK, LANES, ROWS, TiledWeight
from headrace.kernels.tiled_gemm import describe, row_of, tiled_dots

_ROWS, _BLOCK, _LANES = tl.constexpr(ROWS), tl.constexpr(BLOCK), tl.constexpr(LANES)


@triton.jit(do_not_specialize=["max_tiles"])
def tiled_experts_kernel(
    out_ptr, x_ptr, codes_ptr, words_ptr, factors_ptr, added_ptr, bias_ptr, share_ptr, order_ptr, tiles_ptr,
    parts_ptr, arrived_ptr, max_tiles, words_step,
    N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, ALL_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr,
    TOP_K: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    ZEROS_AT: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [pairs, N]; one program: OUTPUTS rows of the weight, one of SPLIT parts of the inputs, one tile's
    pairs.

    GATED: x is [tokens, K], with factors `share` [pairs] if there are any, and N outputs are of 2 * N rows of the
    weight, gate and up. Otherwise x is [pairs, K],
    which the kernel before this one writes; the experts were chosen before that. `added` [pairs, HELD]: numbers that
    are added to the product, if any.
    """
    HELD: tl.constexpr = 2 * N if GATED else N  # rows of an expert
    PART: tl.constexpr = ((ALL_BLOCKS + BLOCKS - 1) // BLOCKS + SPLIT - 1) // SPLIT * BLOCKS
    AT_ONCE: tl.constexpr = OUTPUTS // _ROWS
    WHERE: tl.constexpr = (TILES + AT_ONCE - 1) // AT_ONCE
    if GATED:
        wait_before_next(OVERLAP)
    elif OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) % SPLIT
    sharers = tl.program_id(0) // SPLIT
    where = sharers % WHERE
    tile = sharers // WHERE
    # not from the first-level cache: the kernels that wrote these are done, but this one may not have waited for them
    count = tl.load(tiles_ptr + 2 * max_tiles + tile, cache_modifier=".cg")
    expert = tl.load(tiles_ptr + tile, cache_modifier=".cg").to(tl.int64)
    begin = tl.load(tiles_ptr + max_tiles + tile, cache_modifier=".cg")
    if count > 0:
        member = tl.arange(0, BLOCK_M)
        inside = member < count
        pair = tl.load(order_ptr + begin + member, mask=inside, other=0, cache_modifier=".cg").to(tl.int64)
        row = pair // TOP_K if GATED else pair
        codes = codes_ptr + expert * (TILES * ALL_BLOCKS * (BITS // 2) * _LANES)
        words = words_ptr
        if words_ptr is not None:
            words = words_ptr + expert * (TILES * (words_step * (ALL_BLOCKS - 1) + 1) * (WORDS * _ROWS))
        acc = tiled_dots(
            codes, words, x_ptr, where * AT_ONCE, TILES - 1, part * PART,
            tl.minimum((part + 1) * PART, ALL_BLOCKS), ALL_BLOCKS, words_step, row, inside, K, K, OUTPUTS, BLOCKS, BITS,
            VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, WORDS, EVEN_K, ASM, OVERLAP and not GATED,
            STAGES, 4 if BLOCK_M <= 16 else 0,
        )  # fmt: skip
        if not GATED:
            wait_for_inputs(OVERLAP)
        acc, done = sum_of_parts(tl.trans(acc), inside, part, sharers, parts_ptr, arrived_ptr, SPLIT)
        if done:
            held_row = row_of(where * OUTPUTS + tl.arange(0, OUTPUTS), HELD, GATED)
            if factors_ptr is not None:
                acc *= tl.load(factors_ptr + expert * HELD + held_row, mask=held_row < HELD, other=0.0)[None, :]
            if added_ptr is not None:
                more = inside[:, None] & (held_row < HELD)[None, :]
                added = tl.load(added_ptr + pair[:, None] * HELD + held_row[None, :], mask=more, other=0.0)
                acc += added.to(tl.float32)
            if share_ptr is not None:
                acc *= tl.load(share_ptr + pair, mask=inside, other=0.0)[:, None]
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + expert * HELD + held_row, mask=held_row < HELD, other=0.0)
                acc += bias.to(tl.float32)[None, :]
            if GATED:
                apart = tl.reshape(acc, [BLOCK_M, OUTPUTS // _ROWS, 2, _ROWS // 2])
                gate, up = tl.split(tl.permute(apart, [0, 1, 3, 2]))
                result = tl.reshape(gated(gate, up, KIND, LIMIT, ALPHA), [BLOCK_M, OUTPUTS // 2])
                column = where * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
            else:
                result = acc
                column = held_row
            out_ptrs = out_ptr + pair[:, None] * N + column[None, :]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])
    elif not GATED:
        wait_for_inputs(OVERLAP)


def launch_tiled_experts(
    out: Tensor,
    x: Tensor,
    weight: TiledWeight,
    added: Tensor | None,
    bias: Tensor | None,
    share: Tensor | None,
    routing: Routing,
    top_k: int,
    block_m: int,
    tile: Tile,
    gates: dict[str, float],
) -> None:
    """Write x [tokens or pairs, K] times the pairs' experts and factors `share` to `out` [pairs, N], gated if the
    weight is. `added` [pairs, rows of an expert]: what is added before."""
    n, k = out.shape[1], x.shape[1]
    outputs = 2 * tile.block_n if weight.gated else tile.block_n
    count = routing.tiles.shape[1]
    sharers = count * -(-weight.codes.shape[1] * ROWS // outputs)
    split = tile.split if sharers <= len(weight.arrived) else 1
    parts: Tensor | None = None
    if split > 1:
        parts = x.new_empty((sharers, split, block_m, outputs), dtype=torch.float32)
    tiled_experts_kernel[(sharers * split,)](
        out, x, weight.codes, weight.words, weight.factors, added, bias, share, routing.order, routing.tiles, parts,
        weight.arrived, count, weight.words_step,
        N=n, K=k, TILES=weight.codes.shape[1], ALL_BLOCKS=weight.codes.shape[2], EVEN_K=k % tile.block_k == 0,
        TOP_K=top_k, GATED=weight.gated, BLOCK_M=block_m, OUTPUTS=outputs, BLOCKS=tile.block_k // BLOCK,
        SPLIT=split, STAGES=tile.num_stages, ASM=pairs_in_registers(),
        num_warps=tile.num_warps, **describe(weight), **gates, **overlap(),
    )  # fmt: skip
