"""Holds what linears over few tokens do with their sums: scales, adapters, bias, activation, residual, half a norm."""

from __future__ import annotations

from headrace.kernels._triton import tl, triton


@triton.jit
def gated_row(row, half, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile's rows of the weight: consecutive ones or, if GATED, half of the gate and half of what it gates."""
    if GATED:
        return tl.where(row % BLOCK < BLOCK // 2, 0, half - BLOCK // 2) + row // BLOCK * (BLOCK // 2) + row % BLOCK
    return row


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


GELU_TANH, RELU2, GELU, RELU = 2, 3, 4, 5
ACTIVATIONS = {"silu": 1, "gelu_tanh": GELU_TANH, "relu2": RELU2, "gelu": GELU, "relu": RELU}
"""what may be done to a gate -> what kernels are told; 0: there is no gate"""


@triton.jit
def activated(
    x, KIND: tl.constexpr, GELU_TANH: tl.constexpr = GELU_TANH, RELU2: tl.constexpr = RELU2,
    GELU: tl.constexpr = GELU, RELU: tl.constexpr = RELU,
):  # fmt: skip
    """Return an activation of fp32 x: silu, GELU (arXiv 1606.08415) as it is or as approximated with a tanh, here
    written as a sigmoid, what is above zero, or its square."""
    if KIND == GELU_TANH:
        out = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == RELU2:
        out = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        out = out * out
    elif KIND == RELU:
        out = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == GELU:
        out = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        out = silu(x)
    return out


@triton.jit
def add_product(weight, x, acc, SWAP: tl.constexpr):
    """Return acc + x [rows, inputs] @ weight [outputs, inputs].T, transposed if SWAP."""
    if SWAP:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def _row_scale(squares_ptr, row, row_in, parts, K, eps, PARTS: tl.constexpr):
    """Return the factor that finishes a row's norm, from the parts of its sum of squares."""
    part = tl.arange(0, PARTS)
    mask = row_in[:, None] & (part < parts)[None, :]
    squares = tl.load(squares_ptr + row[:, None] * parts + part[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def sum_of_parts(acc, row_in, part, sharers, parts_ptr, arrived_ptr, SPLIT: tl.constexpr):
    """Return the sum of what SPLIT programs computed # [rows, outputs] fp32, and whether this program is to store it.
    `part` is which of them this is, and `sharers` is a number that they alone have in common."""
    done = True
    if SPLIT > 1:
        ROWS: tl.constexpr = acc.shape[0]
        OUTPUTS: tl.constexpr = acc.shape[1]
        cell = tl.arange(0, ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        all_parts = parts_ptr + (sharers * SPLIT).to(tl.int64) * (ROWS * OUTPUTS) + cell
        tl.store(all_parts + part * (ROWS * OUTPUTS), acc, mask=row_in[:, None])
        tl.debug_barrier()  # all of the program's stores come before its arrival
        done = tl.atomic_add(arrived_ptr + sharers, 1, sem="acq_rel") == SPLIT - 1
        if done:
            acc = tl.load(all_parts, mask=row_in[:, None], other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                one = all_parts + other * (ROWS * OUTPUTS)
                acc += tl.load(one, mask=row_in[:, None], other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + sharers, 0)
    return acc, done


@triton.jit
def rows_in_use(
    across, a_ptr, used_ptr, ranks_ptr, slot_step, K, SEATS: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return block `across` of the rows of first matrices that tokens use (kernels/adapters.py): the slot of each (-2:
    there is no such row; SLOTS: it lies beyond the rank), its column in `s`, and a pointer to it or, beyond a rank, to
    the last one before. May be called before the wait, so that it reads past the processor's own cache, which may hold
    what was in that memory before."""
    row = across * BLOCK + tl.arange(0, BLOCK)
    place, of_slot = row // (SEATS * RANK), row % (SEATS * RANK)
    in_use = place < tl.load(used_ptr, cache_modifier=".cg")
    slot = tl.load(used_ptr + 1 + place, mask=in_use, other=0, cache_modifier=".cg")
    rank = tl.load(ranks_ptr + slot, cache_modifier=".cg")
    held = of_slot - of_slot % RANK + tl.minimum(of_slot % RANK, tl.maximum(rank, 1) - 1)
    column = of_slot // RANK * (SLOTS * RANK) + place * RANK + of_slot % RANK
    slot_of_row = tl.where(in_use, tl.where(of_slot % RANK < rank, slot, SLOTS), -2)
    return slot_of_row, column, a_ptr + slot.to(tl.int64) * slot_step + held * K


@triton.jit
def store_shrunk(acc, s_ptr, row, row_in, slot, slot_of_row, column, WIDTH: tl.constexpr):
    """Store the products of tokens `row` with rows of first matrices # [tokens, rows]: zeros for those of other slots
    than a token's own."""
    own = slot[:, None] == slot_of_row[None, :]
    places, held = s_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], row_in[:, None] & (slot_of_row >= 0)
    tl.store(places, tl.where(own, acc, 0.0).to(s_ptr.dtype.element_ty), mask=held)


@triton.jit
def share_shrunk(
    acc, s_ptr, arrived_ptr, row, row_in, slot, slot_of_row, column, shrinks, shrinkers, sharers, WIDTH: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Do what `store_shrunk` does, of products in the form of `add_product`, if this program `shrinks`; else wait until
    all `shrinkers` have. The last of the others sets the counters back."""
    if shrinks:
        store_shrunk(tl.trans(acc) if SWAP else acc, s_ptr, row, row_in, slot, slot_of_row, column, WIDTH)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        tl.atomic_add(arrived_ptr, 1, sem="release")
    else:
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < shrinkers:
            pass
        if tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel") == sharers - 1:
            tl.store(arrived_ptr, 0)
            tl.store(arrived_ptr + 1, 0)


@triton.jit
def add_adapters(
    acc, s_ptr, used_ptr, b_ptr, starts_ptr, slot_step, row, row_in, weight_row, begin, count,
    SWAP: tl.constexpr, SEATS: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return acc plus `s` (kernels/adapters.py), of tokens `row`, times the second matrices of the slots in use from
    `begin` up to `count`, for the weight's rows `weight_row`, in the form of `add_product`: further inputs, whose
    weights are those matrices. Each part of the rows has inputs of its own."""
    lane, blocks = tl.arange(0, COLUMNS), tl.cdiv(tl.maximum(count - begin, 0) * RANK, COLUMNS)
    each = tl.maximum(blocks, 1)  # a pipeline computes its first addresses even of a loop without a turn
    lowest, highest = tl.min(weight_row, axis=0), tl.max(weight_row, axis=0)
    first, last = 0, 1
    for other in tl.static_range(1, SEATS):
        start = tl.load(starts_ptr + other)
        first += (lowest >= start).to(tl.int32)
        last += (highest >= start).to(tl.int32)
    s_ptrs = s_ptr + row.to(tl.int64)[:, None] * (SEATS * SLOTS * RANK) + lane[None, :]
    b_ptrs = b_ptr + weight_row.to(tl.int64)[:, None] * RANK
    for turn in range(first * blocks, last * blocks):
        seat, column = turn // each, begin * RANK + turn % each * COLUMNS
        place = (column + lane) // RANK
        held = place < count
        of = tl.max_constancy(tl.load(used_ptr + 1 + place, mask=held, other=0), 16)
        inside = (weight_row >= tl.load(starts_ptr + seat)) & (weight_row < tl.load(starts_ptr + seat + 1))
        inputs = of.to(tl.int64) * slot_step + (column + lane) % RANK
        b = tl.load(b_ptrs + inputs[None, :], mask=inside[:, None] & held[None, :], other=0.0)
        s_in = row_in[:, None] & held[None, :]
        s = tl.load(s_ptrs + seat * (SLOTS * RANK) + column, mask=s_in, other=0.0, cache_modifier=".cg")
        acc = add_product(b, s, acc, SWAP)
    return acc


@triton.jit
def finish(
    acc, delta, across, row, row_in, weight_row, out_ptr, bias_ptr, x_scale_ptr, x_zero_ptr, weight_sums_ptr,
    weight_scale_ptr, residual_ptr, squares_ptr, next_scaled_ptr, next_squares_ptr, next_weight_ptr, N, K, parts, eps,
    GATED: tl.constexpr, PAIRED: tl.constexpr, PARTS: tl.constexpr, shrinkers=0,
):  # fmt: skip
    """Store the outputs of tokens `row` and the weight's rows `weight_row`, given their sums # [tokens, rows] fp32,
    which are those of block `across`, and what is added to them once they are scaled, if anything is. GATED: the first
    half of each PAIRED rows gates the second. `shrinkers`: programs of the grid that have no outputs."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    weight_row_in = weight_row < N
    if x_zero_ptr is not None:
        sums = tl.load(weight_sums_ptr + weight_row, mask=weight_row_in, other=0.0)
        acc -= tl.load(x_zero_ptr + row, mask=row_in, other=0.0)[:, None] * sums[None, :]
    if weight_scale_ptr is not None:
        acc *= tl.load(weight_scale_ptr + weight_row, mask=weight_row_in, other=0.0)[None, :]
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + row, mask=row_in, other=0.0)[:, None]
    if delta is not None:
        acc += delta
    if squares_ptr is not None:
        acc *= _row_scale(squares_ptr, row, row_in, parts, K, eps, PARTS)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_row, mask=weight_row_in, other=0.0).to(tl.float32)[None, :]
    if GATED:
        apart = tl.reshape(acc, [ROWS, COLUMNS // PAIRED, 2, PAIRED // 2])
        gate, up = tl.split(tl.permute(apart, [0, 1, 3, 2]))
        out = tl.reshape(activated(gate, GATED) * up, [ROWS, COLUMNS // 2])
        column = across * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        width = N // 2
    else:
        out = acc
        column = weight_row
        width = N
    offset = row[:, None] * width + column[None, :]
    stored = row_in[:, None] & (column < width)[None, :]
    if residual_ptr is not None:
        out += tl.load(residual_ptr + offset, mask=stored, other=0.0).to(tl.float32)
    rounded = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, rounded, mask=stored)
    if next_scaled_ptr is not None:
        weight = tl.load(next_weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        out = rounded.to(tl.float32)
        tl.store(next_scaled_ptr + offset, (out * weight[None, :]).to(next_scaled_ptr.dtype.element_ty), mask=stored)
        squares = tl.sum(tl.where(stored, out * out, 0.0), axis=1)
        tl.store(next_squares_ptr + row * (tl.num_programs(0) - shrinkers) + across, squares, mask=row_in)
