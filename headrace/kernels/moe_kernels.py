"""Holds the device code of kernels/moe.py: the products of experts one token at a time or by tiles, and the sums.

Weights are of the activations' type, fp8 with a scale an output, or packed (packed.py), of which `weight_ptr` gives the
codes, `scale_ptr` the factors of outputs, `groups_ptr` and `zeros_ptr` scales and zeros of groups. BITS is 0 if they
are not packed; a row then has K elements, else as many bytes as its codes take.
"""

from __future__ import annotations

from headrace.kernels._triton import tl, triton, wait_before_next, wait_for_inputs
from headrace.kernels.gemm import sums_of_vectors
from headrace.kernels.gemm_epilogue import add_product, silu
from headrace.kernels.norm import half_norm_row
from headrace.kernels.packed_codes import (
    column_of,
    load_groups,
    over_runs,
    place_4,
    sums_of_runs,
    widen_4,
    widen_8,
    widen_scale,
)


@triton.jit
def _residual_and_shared(
    residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, HIDDEN: tl.constexpr
):  # fmt: skip
    """Return residual + sigmoid(gate) * shared of one token in fp32; each may be missing."""
    total = tl.zeros(column.shape, tl.float32)
    at = token * HIDDEN + column
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            shared /= 1.0 + tl.exp(-tl.load(gate_ptr + token * gate_stride).to(tl.float32))
        total += shared
    return total


@triton.jit
def _gated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return silu(gate) * up or, with a LIMIT, SwigluClamp of moe.py."""
    if LIMIT == 0.0:
        inner = silu(gate) * up
    else:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        inner = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return inner


@triton.jit
def up_one_by_one_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, groups_ptr, zeros_ptr, bias_ptr, ids_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out[pair] = silu(gate) * up; grid (blocks of N, pairs). `weight` is [experts, 2 * N, K]."""
    PER: tl.constexpr = 2 if BITS == 4 else 1  # inputs of a stored element
    STEP: tl.constexpr = BLOCK_K // PER
    WIDTH: tl.constexpr = K if BITS == 0 else (K + 31) // 32 * 32 // PER
    wait_before_next(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    lane = tl.arange(0, 2 * BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + lane // 2
    stored = tl.arange(0, STEP)
    k = column_of(stored, BITS)
    row = tl.minimum(column, N - 1) + lane % 2 * N  # gate and up next to each other
    weight_ptrs = weight_ptr + expert * (2 * N * WIDTH) + row[:, None] * WIDTH + stored[None, :]
    x_ptrs = x_ptr + pair // TOP_K * K + k
    acc = tl.zeros([2 * BLOCK_N, STEP // VECTOR], tl.float32)
    for first in range(0, WIDTH, STEP):
        start = first * PER
        if WIDTH % STEP == 0 and K % BLOCK_K == 0:
            x = tl.load(x_ptrs + start)
            x_upper = tl.load(x_ptrs + start + 16) if BITS == 4 else x
            weight = tl.load(weight_ptrs + first, eviction_policy="evict_first")
        else:
            x = tl.load(x_ptrs + start, mask=start + k < K, other=0.0)
            x_upper = tl.load(x_ptrs + start + 16, mask=start + k + 16 < K, other=0.0) if BITS == 4 else x
            inside = (first + stored < WIDTH)[None, :]
            weight = tl.load(weight_ptrs + first, mask=inside, other=0.0, eviction_policy="evict_first")
        if BITS == 0:
            acc += sums_of_vectors(weight, x[None, :], VECTOR)
        else:
            at = (expert * (2 * N) + row) * ((K + GROUP - 1) // GROUP)
            acc += sums_of_runs(
                weight, x[None, :], x_upper[None, :], groups_ptr, zeros_ptr, at, start, K, BITS, FLOATS, GROUP, ASM
            )
    total = tl.sum(acc, axis=1)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + expert * (2 * N) + row)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * (2 * N) + row).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, [BLOCK_N, 2]))
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = _gated(gate, up, LIMIT, ALPHA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * N + column, inner, mask=column < N)


@triton.jit
def down_one_by_one_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, groups_ptr, zeros_ptr, bias_ptr, ids_ptr, weights_ptr,
    residual_ptr, shared_ptr, gate_ptr, gate_stride, next_scaled_ptr, next_squares_ptr, next_weight_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MEMBERS: tl.constexpr, VECTOR: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out[token] = residual and shared expert + the weighted sum of its experts' weight [experts, N, K] @ x,
    MEMBERS experts at a time; grid (blocks of N, tokens).

    The choice of experts was made before the kernel that computes x, so the first weights are loaded before x is there.
    """
    PER: tl.constexpr = 2 if BITS == 4 else 1
    STEP: tl.constexpr = BLOCK_K // PER
    WIDTH: tl.constexpr = K if BITS == 0 else (K + 31) // 32 * 32 // PER
    token = tl.program_id(1)
    lane = tl.arange(0, MEMBERS * BLOCK_N)
    member = lane // BLOCK_N
    row = tl.minimum(tl.program_id(0) * BLOCK_N + lane % BLOCK_N, N - 1)
    stored = tl.arange(0, STEP)
    k = column_of(stored, BITS)
    acc = tl.zeros([MEMBERS * BLOCK_N, STEP // VECTOR], tl.float32)
    biases = tl.zeros([MEMBERS * BLOCK_N], tl.float32)
    for first in tl.static_range(0, TOP_K, MEMBERS):
        pair = token * TOP_K + first + member
        chosen = first + member < TOP_K
        # not from the first-level cache: the kernel that wrote these is done, but this one has not waited for it
        expert = tl.load(ids_ptr + pair, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
        share = tl.load(weights_ptr + pair, mask=chosen, other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            biases += share * tl.load(bias_ptr + expert * N + row).to(tl.float32)
        if scale_ptr is not None:
            share *= tl.load(scale_ptr + expert * N + row)
        weight_ptrs = weight_ptr + expert[:, None] * (N * WIDTH) + row[:, None] * WIDTH + stored[None, :]
        x_ptrs = x_ptr + pair[:, None] * K + k[None, :]
        for begin in range(0, WIDTH, STEP):
            start = begin * PER
            inside = chosen[:, None] & (begin + stored < WIDTH)[None, :]
            weight = tl.load(weight_ptrs + begin, mask=inside, other=0.0, eviction_policy="evict_first")
            if first == 0:
                wait_for_inputs(OVERLAP)
            x = tl.load(x_ptrs + start, mask=chosen[:, None] & (start + k < K)[None, :], other=0.0)
            if BITS == 0:
                sums = sums_of_vectors(weight, x, VECTOR)
            else:
                x_upper = x
                if BITS == 4:
                    inside = chosen[:, None] & (start + k + 16 < K)[None, :]
                    x_upper = tl.load(x_ptrs + start + 16, mask=inside, other=0.0)
                at = (expert * N + row) * ((K + GROUP - 1) // GROUP)
                sums = sums_of_runs(
                    weight, x, x_upper, groups_ptr, zeros_ptr, at, start, K, BITS, FLOATS, GROUP, ASM
                )  # fmt: skip
            acc += sums * share[:, None]
    total = tl.sum(tl.reshape(tl.sum(acc, axis=1) + biases, [MEMBERS, BLOCK_N]), axis=0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    extras = _residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    rounded = (extras + total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + token * tl.num_programs(0) + tl.program_id(0)
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)


@triton.jit
def _centred(wide, zero, BITS: tl.constexpr, STEP: tl.constexpr):
    """Return code - zero given code - middle [rows, STEP] and zeros of runs, or one zero a row; exact."""
    less = ((1 << (BITS - 1)) - zero.to(tl.float32)).to(wide.dtype)
    return wide + (less if zero.shape[1] == 1 else over_runs(less, STEP))


@triton.jit
def _scaled(wide, scale, DTYPE: tl.constexpr, FACTOR: tl.constexpr, STEP: tl.constexpr):
    """Return wide [rows, STEP] times the scales of runs times FACTOR, a power of 2, in DTYPE. Rounds once: in the wide
    type where a product with scales of that type or of 8 bits needs no more bits, otherwise in fp32."""
    BITS: tl.constexpr = scale.dtype.primitive_bitwidth
    dtype: tl.constexpr = wide.dtype if scale.dtype == wide.dtype or BITS == 8 else tl.float32
    return (wide.to(dtype) * over_runs((widen_scale(scale) * FACTOR).to(dtype), STEP)).to(DTYPE)


@triton.jit(do_not_specialize=["max_tiles"])
def tiles_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, groups_ptr, zeros_ptr, bias_ptr, order_ptr, tiles_ptr,
    max_tiles,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr,
    GROUP: tl.constexpr, ASM: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [pairs, N]; one program: BLOCK_N outputs of one tile's pairs.

    GATED: x is [tokens, K], weight [experts, 2 * N, K], and a pair gets silu(gate) * up. Otherwise x is [pairs, K]
    and weight is [experts, N, K]. If they are fp8, each has a scale a row. A packed weight's groups have their scales
    multiplied with sums where all inputs of a step are of one group, else with the widened tile; they are loaded a step
    ahead, since they are too short for asynchronous copies.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ALL_ROWS: tl.constexpr = 2 * N if GATED else N
    PER: tl.constexpr = 2 if BITS == 4 else 1
    STEP: tl.constexpr = BLOCK_K // PER
    WIDTH: tl.constexpr = K if BITS == 0 else (K + 31) // 32 * 32 // PER
    ONE_GROUP: tl.constexpr = BITS != 0 and (GROUP % BLOCK_K == 0 or GROUP >= K)
    RUNS: tl.constexpr = 1 if ONE_GROUP else STEP // 16
    SPLIT: tl.constexpr = BITS == 4 and not ONE_GROUP and GROUP % 32 != 0  # upper codes have their own scales
    # e2m1 in bfloat16 needs 2 ** 126 (place_4): 2 ** 62 with scales, so that those up to 2 ** 65 stay finite, the rest
    # with the sums
    TOO_SMALL: tl.constexpr = FLOATS and BITS == 4 and not ONE_GROUP and x_ptr.dtype.element_ty != tl.float16
    FACTOR: tl.constexpr = 2.0**62 if TOO_SMALL else 1.0
    tile, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK_N
    lane = tl.arange(0, ROWS)
    if GATED:  # gate and up next to each other
        row = tl.minimum(first + lane // 2, N - 1) + lane % 2 * N
    else:
        row = tl.minimum(first + lane, N - 1)
    wait_for_inputs(OVERLAP)
    count = tl.load(tiles_ptr + 2 * max_tiles + tile)
    if count > 0:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        member = tl.arange(0, BLOCK_M)
        inside = (member < count)[:, None]
        pair = tl.load(order_ptr + tl.load(tiles_ptr + max_tiles + tile) + member, mask=member < count, other=0)
        source = (pair // TOP_K if GATED else pair).to(tl.int64)
        stored = tl.arange(0, STEP)
        k = column_of(stored, BITS)
        x_ptrs = x_ptr + source[:, None] * K + k[None, :]
        weight_ptrs = weight_ptr + expert * (ALL_ROWS * WIDTH) + row[:, None] * WIDTH + stored[None, :]
        if SWAP:
            acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, ROWS], tl.float32)
        if BITS != 0:
            at = (expert * ALL_ROWS + row) * ((K + GROUP - 1) // GROUP)
            scale = load_groups(groups_ptr, at, 0, RUNS, 0, K, BITS, GROUP)
            scale_upper = load_groups(groups_ptr, at, 0, RUNS, 1, K, BITS, GROUP) if SPLIT else scale
            if zeros_ptr is not None:
                zero = load_groups(zeros_ptr, at, 0, RUNS, 0, K, BITS, GROUP)
                zero_upper = load_groups(zeros_ptr, at, 0, RUNS, 1, K, BITS, GROUP) if SPLIT else zero
        for begin in range(0, WIDTH, STEP):
            start = begin * PER
            if WIDTH % STEP == 0 and K % BLOCK_K == 0:
                weight = tl.load(weight_ptrs + begin)
                x = tl.load(x_ptrs + start, mask=inside, other=0.0)
                if BITS == 4:
                    x_upper = tl.load(x_ptrs + start + 16, mask=inside, other=0.0)
            else:
                weight = tl.load(weight_ptrs + begin, mask=(begin + stored < WIDTH)[None, :], other=0.0)
                x = tl.load(x_ptrs + start, mask=inside & (start + k < K)[None, :], other=0.0)
                if BITS == 4:
                    x_upper = tl.load(x_ptrs + start + 16, mask=inside & (start + k + 16 < K)[None, :], other=0.0)
            if BITS == 0:
                acc = add_product(weight, x, acc, SWAP)
            else:
                if BITS == 4 and TOO_SMALL:
                    lower, upper = place_4(weight, x.dtype, FLOATS, ASM)
                elif BITS == 4:
                    lower, upper = widen_4(weight, x.dtype, FLOATS, ASM)
                else:
                    lower = widen_8(weight, x.dtype, FLOATS)
                if zeros_ptr is not None:
                    lower = _centred(lower, zero, BITS, STEP)
                    if BITS == 4:
                        upper = _centred(upper, zero_upper, BITS, STEP)
                    zero = load_groups(zeros_ptr, at, start + BLOCK_K, RUNS, 0, K, BITS, GROUP)
                    zero_upper = load_groups(zeros_ptr, at, start + BLOCK_K, RUNS, 1, K, BITS, GROUP) if SPLIT else zero
                if ONE_GROUP:
                    sums = add_product(lower, x, tl.zeros_like(acc), SWAP)
                    if BITS == 4:
                        sums = add_product(upper, x_upper, sums, SWAP)
                    factor = widen_scale(scale)
                    acc += sums * (factor if SWAP else tl.trans(factor))
                else:
                    acc = add_product(_scaled(lower, scale, x.dtype, FACTOR, STEP), x, acc, SWAP)
                    if BITS == 4:
                        upper = _scaled(upper, scale_upper, x.dtype, FACTOR, STEP)
                        acc = add_product(upper, x_upper, acc, SWAP)
                scale = load_groups(groups_ptr, at, start + BLOCK_K, RUNS, 0, K, BITS, GROUP)
                scale_upper = load_groups(groups_ptr, at, start + BLOCK_K, RUNS, 1, K, BITS, GROUP) if SPLIT else scale
        if SWAP:
            acc = tl.trans(acc)
        if TOO_SMALL:
            acc *= 2.0**64
        if x_scale_ptr is not None:
            acc *= tl.load(x_scale_ptr + source, mask=member < count, other=0.0)[:, None]
        if scale_ptr is not None:
            acc *= tl.load(scale_ptr + expert * ALL_ROWS + row)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * ALL_ROWS + row).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
            acc = _gated(gate, up, LIMIT, ALPHA)
        column = first + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside & (column < N)[None, :])


@triton.jit
def sum_kernel(
    out_ptr, x_ptr, weights_ptr, residual_ptr, shared_ptr, gate_ptr, gate_stride,
    next_scaled_ptr, next_squares_ptr, next_weight_ptr,
    N: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out[token] = residual and shared expert + the weighted sum of x [pairs, N] over its pairs. The grid is
    (tokens * blocks of N,), since its other dimensions end at 65535."""
    wait_for_inputs(OVERLAP)
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    total = _residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        x = tl.load(x_ptr + pair * N + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * x
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + program
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)
