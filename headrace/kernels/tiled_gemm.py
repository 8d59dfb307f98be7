"""Multiplies few tokens by a TiledWeight (tiled.py) on the matrix units.

A code becomes a float by its bits (tiled_codes.py), and what that adds is subtracted. Groups of a block or more scale
their sums, smaller ones the weight, rounded to the activations' type.

Several programs share an output's inputs, since one would leave most of the GPU's memory idle: each adds up its part,
and the last to be done adds up the parts, always in the same order.
"""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels._triton import after_inputs, into_l2, pairs_in_registers, tl, triton, wait_for_inputs
from headrace.kernels.adapters import NO_ADAPTERS, Adapted
from headrace.kernels.gemm_config import GemmConfig
from headrace.kernels.gemm_epilogue import add_adapters, finish, sum_of_parts
from headrace.kernels.tiled import BLOCK, BYTES, LANES, ROWS, TiledWeight, runs_of
from headrace.kernels.tiled_codes import unpacked

_ROWS, _BLOCK, _LANES = tl.constexpr(ROWS), tl.constexpr(BLOCK), tl.constexpr(LANES)


@triton.jit
def run_of(flat):
    """Return codes # [tiles, LANES], of 16 inputs, by output and input # [outputs, 16], where they are."""
    apart = tl.reshape(flat, [flat.shape[0], 4, 8, 4, 2, 2, 2])  # tile, warp, row, pair, 8 columns, 8 rows, column
    return tl.reshape(tl.permute(apart, [0, 1, 5, 2, 4, 3, 6]), [flat.shape[0] * _ROWS, 16])


@triton.jit
def _by_output(values, operation: tl.constexpr, one, ASM: tl.constexpr):
    """Return values [outputs, inputs] less or times one [outputs]; the operation is `sub` or `mul`."""
    one = tl.broadcast_to(one[:, None], values.shape)
    if ASM and values.dtype == tl.bfloat16:
        text: tl.constexpr = operation + ".bf16x2 $0, $1, $2;"
        values = tl.inline_asm_elementwise(text, "=r,r,r", [values, one], tl.bfloat16, True, 2)
    elif operation == "sub":
        values = values - one
    else:
        values = values * one
    return values


@triton.jit
def joined(first, second):
    """Return two runs of as many inputs beside each other."""
    together = tl.permute(tl.join(first, second), [0, 2, 1])
    return tl.reshape(together, [first.shape[0], 2 * first.shape[1]])


@triton.jit
def word_of(words, at, PLACE: tl.constexpr):
    """Return one of each output's words, which are in memory from `at` on or, where that is None, a tuple."""
    if at is None:
        word = words[PLACE]
    else:
        word = tl.load(words + at + PLACE * _ROWS)
    return word


@triton.jit
def field(words, at, BYTE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the unsigned number of WIDTH bytes from BYTE on of each output's words."""
    return (word_of(words, at, BYTE // 4) >> (BYTE % 4 * 8)) & ((1 << (8 * WIDTH)) - 1)


@triton.jit
def scale_of(words, at, PLACE: tl.constexpr, SCALES: tl.constexpr, SMALL: tl.constexpr, dtype: tl.constexpr):
    """Return the scales of a block's group PLACE in `dtype`. Those of bytes undo that codes are 2 ** SMALL times too
    small, but for what 16 bits have no room for: 2 ** 8 or 2 ** 9 of e5m3."""
    if SCALES == "float16":
        held = field(words, at, 2 * PLACE, 2).to(tl.int16).to(tl.float16, bitcast=True).to(dtype)
    elif SCALES == "bfloat16":
        held = field(words, at, 2 * PLACE, 2).to(tl.int16).to(tl.bfloat16, bitcast=True).to(dtype)
    elif SCALES == "e8m0" and dtype == tl.bfloat16:  # two groups' at once, of SMALL 126
        word = word_of(words, at, PLACE // 4)
        pair = (word << 7 if PLACE % 2 == 0 else word >> 1) & 0x7F807F80
        held = (pair >> (PLACE % 4 // 2 * 16)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 23 if dtype == tl.float32 else 10 if dtype == tl.float16 else 7
        EXPONENT: tl.constexpr = SMALL + (15 if dtype == tl.float16 else 127)
        if SCALES == "e8m0":
            bits = (field(words, at, PLACE, 1) + (EXPONENT - 253)) << MANTISSA
        else:
            LEFT: tl.constexpr = 0 if dtype == tl.float32 else 8 if dtype == tl.float16 else 9
            bits = (field(words, at, PLACE, 1) << (MANTISSA - 3)) + ((EXPONENT - 22 - LEFT) << MANTISSA)
        if dtype == tl.float16:  # the zeros behind a weight, which meet no input, are not to be infinite
            bits = tl.maximum(bits, 0)
        held = bits.to(tl.int32 if dtype == tl.float32 else tl.int16).to(dtype, bitcast=True)
    return held


@triton.jit
def zero_of(words_ptr, at, BYTE: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """Return what is to be taken from placed integers # [outputs] in `dtype`. BYTE: where the zeros are."""
    if dtype == tl.float16:
        placed = 1024
    else:
        placed = 128 if BITS == 4 else 0
    if ZEROS:
        zero = (field(words_ptr, at, BYTE, 1) + placed).to(tl.float32).to(dtype)
    else:
        zero = tl.full(at.shape, placed + (1 << (BITS - 1)), tl.float32).to(dtype)
    return zero


@triton.jit
def _small(
    run, words_ptr, at, RUN: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the block's run RUN of 16 inputs, placed, as weights: of groups smaller than a block, scaled."""
    OF_GROUP: tl.constexpr = RUN * 16 // GROUP if GROUP < _BLOCK else 0
    if VALUES == "integer":
        run = _by_output(run, "sub", zero_of(words_ptr, at, ZEROS_AT + OF_GROUP, BITS, ZEROS, run.dtype), ASM)
    elif VALUES == "e4m3":
        factor = tl.full(at.shape, 256.0 if run.dtype == tl.float16 else 2.0**120, tl.float32)
        run = _by_output(run, "mul", factor.to(run.dtype), ASM)
    if GROUP < _BLOCK:
        SMALL: tl.constexpr = 14 if run.dtype == tl.float16 else 126
        run = _by_output(run, "mul", scale_of(words_ptr, at, OF_GROUP, SCALES, SMALL, run.dtype), ASM)
    return run


@triton.jit
def _chunk(
    words, words_ptr, at, CHUNK: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the weights of the block's chunk CHUNK # [outputs, 64 or 32] in `dtype`, given its codes."""
    if BITS == 8:
        a, b = unpacked(words, BITS, VALUES, ASM, dtype)
        a = _small(run_of(a), words_ptr, at, 2 * CHUNK, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM)
        b = _small(run_of(b), words_ptr, at, 2 * CHUNK + 1, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM)
        weights = joined(a, b)
    else:
        a, b, c, d = unpacked(words, BITS, VALUES, ASM, dtype)
        a = _small(run_of(a), words_ptr, at, 4 * CHUNK, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM)
        b = _small(run_of(b), words_ptr, at, 4 * CHUNK + 1, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM)
        c = _small(run_of(c), words_ptr, at, 4 * CHUNK + 2, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM)
        d = _small(run_of(d), words_ptr, at, 4 * CHUNK + 3, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM)
        weights = joined(joined(a, b), joined(c, d))
    return weights


@triton.jit
def row_of(place, N, GATED: tl.constexpr):
    """Return the weight's row that tiles hold at each place; N or more if there is none."""
    if GATED:
        row = place // _ROWS * (_ROWS // 2) + place % (_ROWS // 2)
        row = tl.where(row < N // 2, row, N)
        row += tl.where(place % _ROWS < _ROWS // 2, 0, N // 2)
    else:
        row = place
    return row


@triton.jit
def tiled_dots(
    codes_ptr, words_ptr, x_ptr, tile, last_tile, first, last, blocks, words_step, row, row_in, K, x_stride,
    OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr, WORDS: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the weights of OUTPUTS from `tile` on times x [row, K], over the blocks from `first` up to `last`
    # [OUTPUTS, rows] fp32. BLOCKS of them are multiplied in turn; AHEAD
    (0 or a power of two) behind the first of these are brought into the L2 cache meanwhile."""
    CHUNKS: tl.constexpr = BITS // 2
    WIDTH: tl.constexpr = _BLOCK // CHUNKS
    SUMS: tl.constexpr = GROUP >= _BLOCK and SCALES != "none"
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    output = tl.arange(0, OUTPUTS)
    tiles = tl.minimum(tile + tl.arange(0, OUTPUTS // _ROWS), last_tile)
    codes_ptrs = codes_ptr + tiles.to(tl.int64)[:, None] * (blocks * (CHUNKS * _LANES)) + tl.arange(0, _LANES)[None, :]
    held = tl.minimum(tile + output // _ROWS, last_tile)
    at = held * (words_step * blocks + (1 - words_step)) * (WORDS * _ROWS) + output % _ROWS
    k = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
    acc = tl.zeros([OUTPUTS, row.shape[0]], tl.float32)
    if OVERLAP and AHEAD > 0:
        LINE: tl.constexpr = 64  # words
        place = (first + BLOCKS) * (CHUNKS * _LANES) + tl.arange(0, AHEAD * CHUNKS * _LANES // LINE) * LINE
        place = tl.minimum(place, blocks * (CHUNKS * _LANES) - LINE)
        into_l2(codes_ptr + tiles.to(tl.int64)[:, None] * (blocks * (CHUNKS * _LANES)) + place[None, :])
    for start in tl.range(first, last, BLOCKS, num_stages=STAGES):
        early = ()
        if OVERLAP:  # all of them before the wait; else where they are used, which takes fewer registers
            for chunk in tl.static_range(BLOCKS * CHUNKS):
                early = early + (tl.load(codes_ptrs + (start * CHUNKS + chunk) * _LANES),)
        waited = after_inputs(start * _BLOCK, _BLOCK, OVERLAP)
        for ahead in tl.static_range(BLOCKS):
            here = at + (start + ahead) * words_step * (WORDS * _ROWS)
            part = tl.zeros_like(acc) if SUMS else acc
            for chunk in tl.static_range(CHUNKS):
                if OVERLAP:
                    codes = early[ahead * CHUNKS + chunk]
                else:
                    codes = tl.load(codes_ptrs + ((start + ahead) * CHUNKS + chunk) * _LANES)
                column = ahead * _BLOCK + chunk * WIDTH
                if EVEN_K:
                    x = tl.load(x_ptrs + waited + column, mask=row_in[:, None], other=0.0)
                else:
                    inside = row_in[:, None] & (waited + column + k < K)[None, :]
                    x = tl.load(x_ptrs + waited + column, mask=inside, other=0.0)
                weights = _chunk(
                    codes, words_ptr, here, chunk, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, ASM, dtype
                )
                part = tl.dot(weights, tl.trans(x), part)
            if SUMS:
                acc += part * scale_of(words_ptr, here, 0, SCALES, 0, tl.float32)[:, None]
            else:
                acc = part
    if SCALES == "e5m3":
        acc *= 256.0 if dtype == tl.float16 else 512.0
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_kernel(
    out_ptr, x_ptr, codes_ptr, words_ptr, bias_ptr, weight_scale_ptr, residual_ptr, squares_ptr, next_scaled_ptr,
    next_squares_ptr, next_weight_ptr, parts_ptr, arrived_ptr, s_ptr, slots_ptr, used_ptr, b_ptr,
    starts_ptr, slot_step, N, K, tiles, words_step, parts, eps, num_tokens, x_stride,
    BLOCK_M: tl.constexpr, OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    ZEROS_AT: tl.constexpr, WORDS: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr,
    ASM: tl.constexpr, SEATS: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS by BLOCK_M tokens; grid (outputs, parts of the inputs, tokens)."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) * (OUTPUTS // _ROWS)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = row < num_tokens
    blocks = tl.cdiv(K, _BLOCK)
    each = tl.cdiv(tl.cdiv(blocks, BLOCKS), SPLIT) * BLOCKS
    first = tl.program_id(1) * each
    acc = tiled_dots(
        codes_ptr, words_ptr, x_ptr, tile, tiles - 1, first, tl.minimum(first + each, blocks), blocks, words_step, row,
        row_in, K, x_stride, OUTPUTS, BLOCKS, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT, WORDS, EVEN_K, ASM, OVERLAP,
        STAGES, STAGES // 3 * BLOCKS if BLOCK_M <= 16 and not GATED else 0,
    )  # fmt: skip
    wait_for_inputs(OVERLAP)
    weight_row = row_of(tile * _ROWS + tl.arange(0, OUTPUTS), N, GATED)
    acc = tl.trans(acc)
    delta = None
    if s_ptr is not None:  # by each of SPLIT programs: which is the last to arrive is a condition
        delta = add_adapters(
            tl.zeros_like(acc), s_ptr, used_ptr, b_ptr, starts_ptr, slot_step, row, row_in, weight_row, 0,
            tl.load(used_ptr), False, SEATS, RANK, SLOTS, COLUMNS,
        )  # fmt: skip
    sharers = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    acc, done = sum_of_parts(acc, row_in, tl.program_id(1), sharers, parts_ptr, arrived_ptr, SPLIT)
    if done:
        finish(
            acc, delta, tl.program_id(0), row, row_in, weight_row, out_ptr, bias_ptr, None, None, None,
            weight_scale_ptr, residual_ptr, squares_ptr, next_scaled_ptr, next_squares_ptr, next_weight_ptr, N, K,
            parts, eps, GATED, _ROWS, PARTS,
        )  # fmt: skip


def describe(weight: TiledWeight) -> dict[str, Any]:
    """Return the launch options for a weight."""
    return {
        "BITS": weight.bits,
        "VALUES": weight.values,
        "GROUP": weight.group_size,
        "SCALES": weight.scales,
        "ZEROS": weight.zeros,
        "ZEROS_AT": BYTES[weight.scales] * runs_of(weight.group_size),
        "WORDS": 0 if weight.words is None else weight.words.shape[-2],
    }


def launch_tiled(
    programs: int,
    x: Tensor,
    weight: TiledWeight,
    tensors: tuple[Tensor | None, ...],
    parts: int,
    eps: float,
    config: GemmConfig,
    options: dict[str, Any],
    adapters: Adapted | None,
) -> None:
    """Do what gemm.py's skinny_linear describes, by `programs` for all outputs. `tensors`: the kernel's first ones,
    from the output to what the next norm needs."""
    num_tokens, k = x.shape
    of_adapters: tuple[Any, ...] = (None,) * 6 if adapters is None else adapters.arguments
    kinds = NO_ADAPTERS if adapters is None else adapters.options
    tokens = -(-num_tokens // config.block_m)
    sums: Tensor | None = None
    if config.split > 1:
        sums = x.new_empty((programs * tokens, config.split, config.block_m, config.block_n), dtype=torch.float32)
    _tiled_kernel[(programs, config.split, tokens)](
        *tensors, sums, weight.arrived, *of_adapters, weight.out_features, k, len(weight.codes), weight.words_step,
        parts, eps, num_tokens, x.stride(0),
        BLOCK_M=config.block_m, OUTPUTS=config.block_n, BLOCKS=config.block_k // BLOCK, SPLIT=config.split,
        STAGES=config.num_stages, **describe(weight),
        EVEN_K=k % config.block_k == 0, ASM=pairs_in_registers(), num_warps=config.num_warps, **kinds, **options,
    )  # fmt: skip
