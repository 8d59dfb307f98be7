"""Multiplies one token by a TiledWeight (tiled.py).

All that costs is to wait for memory. So every warp takes blocks of few outputs straight into registers, the next ones
while it multiplies, and none waits for another before its last. A program has all inputs of its outputs: no other
program's sums are to be added. The matrix units multiply 8 tokens of which seven are copies; that leaves the rest of
the processor idle, and the order of codes is theirs.

Codes become floats as in tiled_codes.py. What that adds, and the zero, is taken from a group's sums: times the sum of
the group's inputs, which the matrix units add up as well. Scales multiply these sums, too, in fp32.
"""

# ruff: noqa: RUF005 (Triton adds tuples but does not unpack them)

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.kernels._triton import pairs_in_registers, tl, triton, wait_for_inputs
from headrace.kernels.gemm_config import GemmConfig
from headrace.kernels.gemm_epilogue import finish
from headrace.kernels.tiled import BLOCK, LANES, ROWS, TiledWeight
from headrace.kernels.tiled_codes import unpacked
from headrace.kernels.tiled_gemm import describe, field, joined, scale_of

VECTOR_ROWS = 16
"""outputs that a warp's product has: a quarter of a tile"""
_ROWS, _BLOCK = tl.constexpr(ROWS), tl.constexpr(BLOCK)
_LANES, _QUARTER = tl.constexpr(LANES), tl.constexpr(VECTOR_ROWS)
_COPIES = tl.constexpr(8)


@triton.jit
def together(runs):
    """Return a tuple of runs # of [rows, inputs], beside each other."""
    if len(runs) == 1:
        all_of_them = runs[0]
    else:
        HALF: tl.constexpr = len(runs) // 2
        all_of_them = joined(together(runs[:HALF]), together(runs[HALF:]))
    return all_of_them


@triton.jit
def _run(flat):
    """Return codes # [WARPS, LANES / 4], of 16 inputs, by output and input # [WARPS * 16, 16]. The inputs are in the
    order in which `_sixteen` has them: four in each thread."""
    apart = tl.reshape(flat, [flat.shape[0], 8, 4, 2, 2, 2])  # row, pair, 8 columns, 8 rows, column
    return tl.reshape(tl.permute(apart, [0, 4, 1, 2, 3, 5]), [flat.shape[0] * _QUARTER, 16])


@triton.jit
def _runs(chunks, BITS: tl.constexpr, VALUES: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """Return a block's codes as floats: a tuple of runs of 16 inputs."""
    runs = ()
    for chunk in tl.static_range(BITS // 2):
        of_chunk = unpacked(chunks[chunk], BITS, VALUES, ASM, dtype)
        for which in tl.static_range(16 // BITS):
            runs = runs + (_run(of_chunk[which]),)
    return runs


@triton.jit
def _eight(x_ptrs, column, K, VALUES: tl.constexpr, EVEN_K: tl.constexpr):
    """Load 8 inputs from `column` [WARPS] on. The compiler lets each thread load what it needs itself, since there are
    fewer than threads. Floats in the places of bfloat16 are so small that products would be nothing."""
    at = column[:, None] + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptrs + at) if EVEN_K else tl.load(x_ptrs + at, mask=at < K, other=0.0)
    if VALUES != "integer" and x.dtype == tl.bfloat16:
        x = (x.to(tl.float32) * 9.223372036854775808e18).to(tl.bfloat16)  # 2 ** 63
    return x


@triton.jit
def _sixteen(x_ptrs, column, K, VALUES: tl.constexpr, EVEN_K: tl.constexpr):
    """Load 16 inputs # [WARPS, 16]: a pair of the first 8, then one of the next 8, and so on."""
    apart = tl.join(_eight(x_ptrs, column, K, VALUES, EVEN_K), _eight(x_ptrs, column + 8, K, VALUES, EVEN_K))
    apart = tl.reshape(apart, [column.shape[0], 4, 2, 2])
    return tl.reshape(tl.permute(apart, [0, 1, 3, 2]), [column.shape[0], 16])


@triton.jit
def _inputs(x_ptrs, column, K, SPAN: tl.constexpr, VALUES: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a block of inputs by groups: a tuple # of [WARPS, SPAN, copies]. A group of 16 has 16 zeros before or behind
    it, since products are of 32 at least."""
    groups = ()
    for group in tl.static_range(_BLOCK // SPAN):
        runs = ()
        for run in tl.static_range(SPAN // 16):
            runs = runs + (_sixteen(x_ptrs, column + (group * SPAN + run * 16), K, VALUES, EVEN_K),)
        if SPAN == 16:
            nothing = (tl.zeros_like(runs[0]),)
            runs = runs + nothing if group % 2 == 0 else nothing + runs
        x = together(runs)
        groups = groups + (tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], _COPIES]),)
    return groups


@triton.jit
def _loaded(codes_ptrs, words_ptrs, block, blocks, words_step, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Load a block of a quarter for each warp: (tuple of its chunks # of [WARPS, LANES / 4], tuple of its words
    # of [WARPS, 16]). What is not inside has undefined codes, which are finite as floats."""
    inside = (block < blocks)[:, None]
    chunks = ()
    for chunk in tl.static_range(BITS // 2):
        at = (block * (BITS // 2 * _LANES) + chunk * _LANES)[:, None]
        chunks = chunks + (tl.load(codes_ptrs + at, mask=inside, eviction_policy="evict_first"),)
    words = ()
    for word in tl.static_range(WORDS):
        at = (block * words_step * (WORDS * _ROWS) + word * _ROWS)[:, None]
        words = words + (tl.load(words_ptrs + at, mask=inside, other=0),)
    return chunks, words


@triton.jit
def _quarters(
    codes_ptrs, words_ptrs, block, blocks, words_step, QUARTERS: tl.constexpr, APART: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Load a block of all of a program's quarters."""
    loaded = ()
    for quarter in tl.static_range(QUARTERS):
        codes_of = codes_ptrs + quarter * (APART * (_LANES // 4))
        words_of = words_ptrs
        if WORDS:
            words_of = words_ptrs + quarter * (APART * _QUARTER)
        loaded = loaded + (_loaded(codes_of, words_of, block, blocks, words_step, WORDS, BITS),)
    return loaded


@triton.jit
def _scale(words, inside, GROUP: tl.constexpr, VALUES: tl.constexpr, SCALES: tl.constexpr, dtype: tl.constexpr):
    """Return the scales of a block's group GROUP # [WARPS, 16] in fp32, 0 of what is not inside. They undo by how many
    powers of 2 products of placed floats are too small, but those of e8m0 in bfloat16 make them 2 ** 63 too large."""
    E4M3: tl.constexpr = 8 if dtype == tl.float16 else 120 - 63
    E2M1: tl.constexpr = 14 if dtype == tl.float16 else 126 - 63
    if SCALES == "none":
        scale = tl.where(inside, 1.0, 0.0)[:, None]
    else:
        # bytes of e8m0 with a shift alone make sums 2 ** 63 times too large
        SMALL: tl.constexpr = 126 if SCALES == "e8m0" and dtype == tl.bfloat16 else E2M1
        scale = scale_of(words, None, GROUP, SCALES, SMALL, tl.float32)
        if VALUES == "e2m1" and SMALL == E2M1:  # bytes, of which 0 is no 0
            scale = tl.where(inside[:, None], scale, 0.0)
    if VALUES == "e4m3":
        scale *= 2.0**E4M3
    return scale


@triton.jit
def _added(
    acc, runs, x, plain, words, inside, SPAN: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr,
):  # fmt: skip
    """Return acc # [WARPS, 16, copies] + the products of a block. plain: of its inputs and 1."""
    dtype: tl.constexpr = x[0].dtype
    WIDTH: tl.constexpr = x[0].shape[1]
    RUNS: tl.constexpr = WIDTH // 16
    PLACED: tl.constexpr = 1024 if dtype == tl.float16 else 128 if BITS == 4 else 0
    for group in tl.static_range(_BLOCK // SPAN):
        codes = together(runs[group * SPAN // WIDTH * RUNS : (group * SPAN // WIDTH + 1) * RUNS])
        part = tl.dot(tl.reshape(codes, [acc.shape[0], _QUARTER, WIDTH]), x[group])
        if ZEROS:
            part -= (field(words, None, ZEROS_AT + group, 1) + PLACED).to(tl.float32)[:, :, None] * plain[group]
        elif VALUES == "integer":
            part -= (PLACED + 2.0 ** (BITS - 1)) * plain[group]
        acc += part * _scale(words, inside, group, VALUES, SCALES, dtype)[:, :, None]
    return acc


@triton.jit
def block_sums(
    x_ptrs, codes_ptrs, words_ptrs, first, blocks, words_step, K, WARPS: tl.constexpr, STEP: tl.constexpr,
    QUARTERS: tl.constexpr, APART: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr, WORDS: tl.constexpr,
    EVEN_K: tl.constexpr, ASM: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Return what each warp makes of every STEP-th block from `first` [WARPS] on: a tuple # of [WARPS, 16], an item for
    each of the quarters that are APART from each other. The pointers are those of the warps' first quarters, or of all
    warps'; AHEAD blocks are held. WAIT: for the kernels that write x, once the first blocks are on their way."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    SPAN: tl.constexpr = min(GROUP, _BLOCK)
    held = ()
    for ahead in tl.static_range(AHEAD):
        block = first + ahead * STEP
        more = _quarters(codes_ptrs, words_ptrs, block, blocks, words_step, QUARTERS, APART, WORDS, BITS)
        held = held + (more,)
    acc = ()
    for _ in tl.static_range(QUARTERS):
        acc = acc + (tl.zeros([WARPS, _QUARTER, _COPIES], tl.float32),)
    wait_for_inputs(WAIT)
    for start in range(0, blocks, STEP * AHEAD):
        inputs = ()
        for ahead in tl.static_range(AHEAD):
            column = tl.minimum(start + ahead * STEP + first, blocks - 1) * _BLOCK
            inputs = inputs + (_inputs(x_ptrs, column, K, SPAN, VALUES, EVEN_K),)
        for ahead in tl.static_range(AHEAD):
            block = start + ahead * STEP + first
            x = inputs[ahead]
            plain = ()
            for group in tl.static_range(_BLOCK // SPAN):
                ones = tl.full([WARPS, _QUARTER, x[group].shape[1]], 1.0, tl.float32).to(dtype)
                plain = plain + (tl.dot(ones, x[group]),)
            sums = ()
            for quarter in tl.static_range(QUARTERS):
                chunks, words = held[0][quarter]
                runs = _runs(chunks, BITS, VALUES, ASM, dtype)
                of_quarter = _added(
                    acc[quarter], runs, x, plain, words, block < blocks, SPAN, BITS, VALUES, SCALES, ZEROS, ZEROS_AT
                )
                sums = sums + (of_quarter,)
            acc = sums
            after = block + AHEAD * STEP
            more = _quarters(codes_ptrs, words_ptrs, after, blocks, words_step, QUARTERS, APART, WORDS, BITS)
            held = held[1:] + (more,)
    COPY: tl.constexpr = 2.0**-63 / _COPIES if SCALES == "e8m0" and dtype == tl.bfloat16 else 1.0 / _COPIES
    totals = ()
    for quarter in tl.static_range(QUARTERS):
        totals = totals + (tl.sum(acc[quarter], axis=2) * COPY,)
    return totals


@triton.jit
def _tiled_vector_kernel(
    out_ptr, x_ptr, codes_ptr, words_ptr, bias_ptr, weight_scale_ptr, residual_ptr, squares_ptr, next_scaled_ptr,
    next_squares_ptr, next_weight_ptr, N, K, words_step, parts, eps,
    WARPS: tl.constexpr, OUTPUTS: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr, WORDS: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS; grid (outputs). Each warp takes every WARPS-th block of the inputs, and holds AHEAD of them."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    QUARTERS: tl.constexpr = OUTPUTS // _QUARTER
    APART: tl.constexpr = 2 if GATED and QUARTERS == 2 else 1  # a quarter of the gate, and one of what it gates
    program = tl.program_id(0)
    tile = program * QUARTERS // 4
    first = program % 2 if APART == 2 else program * QUARTERS % 4
    blocks = tl.cdiv(K, _BLOCK)
    codes_ptr += tile.to(tl.int64) * blocks * (BITS // 2 * _LANES) + first * (_LANES // 4)
    codes_ptrs = codes_ptr + tl.arange(0, _LANES // 4)[None, :]
    words_ptrs = words_ptr
    if WORDS:
        words_ptr += tile * (words_step * blocks + (1 - words_step)) * (WORDS * _ROWS) + first * _QUARTER
        words_ptrs = words_ptr + tl.arange(0, _QUARTER)[None, :]
    warp = tl.arange(0, WARPS)
    sums = block_sums(
        x_ptr, codes_ptrs, words_ptrs, warp, blocks, words_step, K, WARPS, WARPS, QUARTERS, APART, AHEAD, BITS, VALUES,
        GROUP, SCALES, ZEROS, ZEROS_AT, WORDS, EVEN_K, ASM, OVERLAP,
    )  # fmt: skip
    totals = ()
    for quarter in tl.static_range(QUARTERS):
        totals = totals + (tl.sum(sums[quarter], axis=0)[None, :],)
    one = tl.arange(0, 1)
    output = tl.arange(0, OUTPUTS)
    weight_row = program * OUTPUTS + output
    if GATED:
        column = program * (OUTPUTS // 2) + output % (OUTPUTS // 2)
        weight_row = tl.where(column < N // 2, column + output // (OUTPUTS // 2) * (N // 2), N)
    finish(
        together(totals), None, program, one, one == 0, weight_row, out_ptr, bias_ptr, None, None, None,
        weight_scale_ptr, residual_ptr, squares_ptr, next_scaled_ptr, next_squares_ptr, next_weight_ptr, N, K, parts,
        eps, GATED, OUTPUTS, PARTS,
    )  # fmt: skip


def launch_tiled_vector(
    programs: int,
    x: Tensor,
    weight: TiledWeight,
    tensors: tuple[Tensor | None, ...],
    parts: int,
    eps: float,
    config: GemmConfig,
    options: dict[str, Any],
) -> None:
    """Do what gemm.py's skinny_linear describes for x [1, K], as tiled_gemm.py's launch_tiled does for more tokens."""
    k = x.shape[1]
    _tiled_vector_kernel[(programs,)](
        *tensors, weight.out_features, k, weight.words_step, parts, eps,
        WARPS=config.num_warps, OUTPUTS=len(weight.codes) * ROWS // programs, AHEAD=config.num_stages,
        **describe(weight), EVEN_K=k % BLOCK == 0, ASM=pairs_in_registers(), num_warps=config.num_warps, **options,
    )  # fmt: skip
