"""Holds the device code of kernels/moe.py: the products of experts one token at a time or by tiles, and the sums.

Weights are of the activations' type, or fp8 with a scale an output. Those of 4 and 8 bits are moe_vector.py's and
moe_tiled.py's.
"""

from __future__ import annotations

from headrace.kernels._triton import tl, triton, wait_before_next, wait_for_inputs
from headrace.kernels.gemm import sums_of_vectors
from headrace.kernels.gemm_epilogue import activated, add_product
from headrace.kernels.norm import half_norm_row


@triton.jit
def residual_and_shared(
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
def gated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return activation(gate) * up, whose KIND is one of ACTIVATIONS, or, with a LIMIT, SwigluClamp of moe.py."""
    if LIMIT == 0.0:
        inner = activated(gate, KIND) * up
    else:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        inner = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return inner


@triton.jit
def _place(expert, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, ROUTED: tl.constexpr, JOINED: tl.constexpr):
    """Return where the weight of an expert begins, how far its rows are apart, where its scales begin, and by how many
    rows more than N its ups are behind its gates.

    Several JOINED experts behind the ROUTED ones are one feed-forward, so many times as wide: the gates of all of them
    come before their ups, and each row of their second weight has the inputs of all.
    """
    ROWS: tl.constexpr = 2 * N if GATED else N
    at, step, scales, more = expert * (ROWS * K), K, expert * ROWS, 0
    if JOINED > 1:
        behind = expert - ROUTED
        if GATED:
            scales = tl.where(behind < 0, scales, ROUTED * ROWS + behind * N)
            at = scales * K
            more = tl.where(behind < 0, 0, (JOINED - 1) * N)
        else:
            scales = tl.where(behind < 0, scales, ROUTED * N)
            at = tl.where(behind < 0, at, ROUTED * (N * K) + behind * K)
            step = tl.where(behind < 0, K, JOINED * K)
    return at, step, scales, more


@triton.jit
def up_one_by_one_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, bias_ptr, ids_ptr, share_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
    ROUTED: tl.constexpr = 0, JOINED: tl.constexpr = 0,
):  # fmt: skip
    """Compute out[pair], gated; grid (blocks of N, pairs). `weight` is [experts, 2 * N, K], but for those that are
    `joined`; `share` [pairs] are factors of x, if there are any."""
    wait_before_next(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    lane = tl.arange(0, 2 * BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + lane // 2
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(column, N - 1) + lane % 2 * N  # gate and up next to each other
    at, _, scales, more = _place(expert, N, K, True, ROUTED, JOINED)
    if JOINED > 1:
        row += lane % 2 * more
    weight_ptrs = weight_ptr + at + row[:, None] * K + k[None, :]
    x_ptrs = x_ptr + pair // TOP_K * K + k
    acc = tl.zeros([2 * BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + start)
            weight = tl.load(weight_ptrs + start, eviction_policy="evict_first")
        else:
            inside = start + k < K
            x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        acc += sums_of_vectors(weight, x[None, :], VECTOR)
    total = tl.sum(acc, axis=1)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + scales + row)
    if share_ptr is not None:
        total *= tl.load(share_ptr + pair)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * (2 * N) + row).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, [BLOCK_N, 2]))
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = gated(gate, up, KIND, LIMIT, ALPHA).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * N + column, inner, mask=column < N)


@triton.jit
def down_one_by_one_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, bias_ptr, ids_ptr, share_ptr,
    residual_ptr, shared_ptr, gate_ptr, gate_stride, next_scaled_ptr, next_squares_ptr, next_weight_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MEMBERS: tl.constexpr, VECTOR: tl.constexpr, OVERLAP: tl.constexpr, ROUTED: tl.constexpr = 0,
    JOINED: tl.constexpr = 0,
):  # fmt: skip
    """Compute out[token] = residual and shared expert + the weighted sum of its experts' weight [experts, N, K] @ x,
    MEMBERS experts at a time; grid (blocks of N, tokens).

    The choice of experts was made before the kernel that computes x, so the first weights are loaded before x is there.
    """
    token = tl.program_id(1)
    lane = tl.arange(0, MEMBERS * BLOCK_N)
    member = lane // BLOCK_N
    row = tl.minimum(tl.program_id(0) * BLOCK_N + lane % BLOCK_N, N - 1)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([MEMBERS * BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    biases = tl.zeros([MEMBERS * BLOCK_N], tl.float32)
    for first in tl.static_range(0, TOP_K, MEMBERS):
        pair = token * TOP_K + first + member
        chosen = first + member < TOP_K
        # not from the first-level cache: the kernel that wrote these is done, but this one has not waited for it
        expert = tl.load(ids_ptr + pair, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
        share = chosen.to(tl.float32)
        if share_ptr is not None:
            share = tl.load(share_ptr + pair, mask=chosen, other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            biases += share * tl.load(bias_ptr + expert * N + row).to(tl.float32)
        at, step, scales, _ = _place(expert, N, K, False, ROUTED, JOINED)
        if scale_ptr is not None:
            share *= tl.load(scale_ptr + scales + row)
        weight_ptrs = weight_ptr + at[:, None] + (row * step)[:, None] + k[None, :]
        x_ptrs = x_ptr + pair[:, None] * K + k[None, :]
        for start in range(0, K, BLOCK_K):
            inside = chosen[:, None] & (start + k < K)[None, :]
            weight = tl.load(weight_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
            if first == 0:
                wait_for_inputs(OVERLAP)
            x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            acc += sums_of_vectors(weight, x, VECTOR) * share[:, None]
    total = tl.sum(tl.reshape(tl.sum(acc, axis=1) + biases, [MEMBERS, BLOCK_N]), axis=0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    extras = residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    rounded = (extras + total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + token * tl.num_programs(0) + tl.program_id(0)
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)


@triton.jit(do_not_specialize=["max_tiles"])
def tiles_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, added_ptr, bias_ptr, share_ptr, order_ptr, tiles_ptr,
    max_tiles, slot_step,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, IN_SLOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, KIND: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr, ROUTED: tl.constexpr = 0,
    JOINED: tl.constexpr = 0,
):  # fmt: skip
    """Compute out [pairs, N]; one program: BLOCK_N outputs of one tile's pairs.

    x is [pairs / TOP_K, K]. GATED: weight is [experts, 2 * N, K], and a pair gets what `gated` says. Otherwise it is
    [experts, N, K]. If they are fp8, each has a scale a row. `share` [pairs]: factors of x, if any. `added` [pairs,
    rows of weight]: what is added to the product, if any. IN_SLOT: so many experts each are `slot_step` numbers of the
    weight apart from the next ones; 0: all are one behind another, but for several JOINED ones (`_place`).
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ALL_ROWS: tl.constexpr = 2 * N if GATED else N
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
        source = (pair // TOP_K).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + source[:, None] * K + k[None, :]
        at, step, scales, more = _place(expert, N, K, GATED, ROUTED, JOINED)
        if IN_SLOT > 0:
            at = expert // IN_SLOT * slot_step + expert % IN_SLOT * (ALL_ROWS * K)
        if GATED and JOINED > 1:
            row += lane % 2 * more
        weight_ptrs = weight_ptr + at + row[:, None] * step + k[None, :]
        if SWAP:
            acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, ROWS], tl.float32)
        for start in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                weight = tl.load(weight_ptrs + start)
                x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            else:
                in_row = (start + k < K)[None, :]
                weight = tl.load(weight_ptrs + start, mask=in_row, other=0.0)
                x = tl.load(x_ptrs + start, mask=inside & in_row, other=0.0)
            acc = add_product(weight, x, acc, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        if x_scale_ptr is not None:
            acc *= tl.load(x_scale_ptr + source, mask=member < count, other=0.0)[:, None]
        if scale_ptr is not None:
            acc *= tl.load(scale_ptr + scales + row)[None, :]
        if added_ptr is not None:
            added_ptrs = added_ptr + pair.to(tl.int64)[:, None] * ALL_ROWS + row[None, :]
            acc += tl.load(added_ptrs, mask=inside, other=0.0).to(tl.float32)
        if share_ptr is not None:
            acc *= tl.load(share_ptr + pair, mask=member < count, other=0.0)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * ALL_ROWS + row).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
            acc = gated(gate, up, KIND, LIMIT, ALPHA)
        column = first + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside & (column < N)[None, :])


@triton.jit
def sum_kernel(
    out_ptr, x_ptr, share_ptr, residual_ptr, shared_ptr, gate_ptr, gate_stride,
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
    total = residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        x = tl.load(x_ptr + pair * N + column, mask=inside, other=0.0).to(tl.float32)
        if share_ptr is not None:
            x *= tl.load(share_ptr + pair)
        total += x
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + program
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)
