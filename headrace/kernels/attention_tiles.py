"""Holds what the attention kernels do with a tile of keys and values: load it, and fold it into a running softmax."""

from __future__ import annotations

from headrace.kernels._triton import tl, triton
from headrace.kernels.fp8_cache import split_pairs

LOG2_E = 1.4426950408889634


@triton.jit
def first_visible(position, window, CHUNKED: tl.constexpr):
    """Return the first key that a query at `position` sees: `window` - 1 before its own, or (CHUNKED) the first of its
    own chunk of `window` positions."""
    if CHUNKED:
        first = position // window * window
    else:
        first = position - window + 1
    return tl.maximum(first, 0)


def in_log2(soft_cap: float | None) -> float | None:
    """Return a soft cap of scores as kernels take it, whose scores are logarithms to base 2."""
    return None if soft_cap is None else soft_cap * LOG2_E


@triton.jit
def capped(scores, soft_cap, LOG2_E: tl.constexpr = LOG2_E):
    """Return soft_cap * tanh(scores / soft_cap); `soft_cap` None: the scores themselves."""
    if soft_cap is not None:
        grown = tl.exp2(scores * (2 * LOG2_E / soft_cap))
        scores = soft_cap * (1.0 - 2.0 / (grown + 1.0))
    return scores


@triton.jit
def no_keys_yet(sinks_ptr, head, counts_sink, LOG2_E: tl.constexpr = LOG2_E):
    """Return the largest score and the sum of exponentials of rows that have seen no key. A head's sink (gpt-oss,
    arXiv 2508.10925) is a score without a value, which comes before all keys: of programs that share a row's keys, the
    one that `counts_sink` begins with it. `sinks_ptr` None: there are none. `head` # [rows]: of each row."""
    row_max = tl.full([head.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([head.shape[0]], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        row_max = tl.where(counts_sink, sink, row_max)
        row_sum = tl.where(counts_sink, 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def load_tile(
    start,
    first,
    limit,
    keys_ptr,
    value_offset,
    blocks_ptr,
    block_rows,
    column,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CUT: tl.constexpr,
    REPEATED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Load keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D] from `start` on; PAIRS: values as int16 of two each.
    Positions from `limit` on have no key, and blocks of those before `first` (WINDOWED) may hold other requests' keys.
    There CUT reads nothing and gives zeros; REPEATED reads the nearest valid key, which takes fewer instructions."""
    WHOLE_HEAD: tl.constexpr = column.shape[0] == HEAD_DIM
    in_head = column < HEAD_DIM
    values_ptr, value_column, value_in = keys_ptr + value_offset, column, in_head
    if PAIRS:
        values_ptr = values_ptr.to(tl.pointer_type(tl.int16))
        value_column = tl.arange(0, column.shape[0] // 2)
        value_in = value_column < HEAD_DIM // 2
    position = start + tl.arange(0, BLOCK_N)
    known = position < limit
    place = position
    if REPEATED:
        place = tl.minimum(position, limit - 1)
    if WINDOWED:
        known = known & (position >= first)
        if REPEATED:
            place = tl.maximum(place, first)
    if CUT:
        block = tl.load(blocks_ptr + place // BLOCK_SIZE, mask=known, other=0)
    else:
        block = tl.load(blocks_ptr + place // BLOCK_SIZE)
    if CUT:  # either way takes fewer registers where it stands
        offset = (block * block_rows + place % BLOCK_SIZE).to(tl.uint32).to(tl.int64) * SLOT_STRIDE
    else:
        offset = (block * block_rows).to(tl.uint32).to(tl.int64) * SLOT_STRIDE + place % BLOCK_SIZE * SLOT_STRIDE
    key_ptrs = keys_ptr + offset[None, :] + column[:, None]
    if PAIRS:
        offset = offset // 2
    value_ptrs = values_ptr + offset[:, None] + value_column[None, :]
    if CUT and WHOLE_HEAD:
        key = tl.load(key_ptrs, mask=known[None, :], other=0.0)
        value = tl.load(value_ptrs, mask=known[:, None], other=0.0)
    elif CUT:
        key = tl.load(key_ptrs, mask=in_head[:, None] & known[None, :], other=0.0)
        value = tl.load(value_ptrs, mask=value_in[None, :] & known[:, None], other=0.0)
    elif WHOLE_HEAD:
        key = tl.load(key_ptrs)
        value = tl.load(value_ptrs)
    else:
        key = tl.load(key_ptrs, mask=in_head[:, None], other=0.0)
        value = tl.load(value_ptrs, mask=value_in[None, :], other=0.0)
    return key, value


@triton.jit
def weigh(scores, row_max, row_sum, MASKED: tl.constexpr):
    """Return the weights of a tile of scores [rows, BLOCK_N], the factor # [rows] for what was summed up before, and
    the rows' new largest score and sum of exponentials. MASKED: scores may all be -inf."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, axis=1)


@triton.jit
def fold_tile(
    q,
    acc,
    row_max,
    row_sum,
    key,
    value,
    start,
    row_position,
    row_first,
    qk_scale,
    soft_cap,
    cache_type: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Fold a tile of `load_tile` into the running softmax; MASKED: rows see keys up to `row_position` # [rows], and
    (WINDOWED) from `row_first` on. Numbers of a cache that has another type than q are converted in registers."""
    PAIRS: tl.constexpr = len(acc) == 2
    scores = capped(tl.dot(q, key.to(q.dtype), input_precision="ieee") * qk_scale, soft_cap)
    if MASKED:
        position = start + tl.arange(0, key.shape[1])
        visible = position[None, :] <= row_position[:, None]
        if WINDOWED:  # both in one comparison, since each takes two registers a number on AMD: later keys wrap around
            behind = (row_position[:, None] - position[None, :]).to(tl.uint32)
            visible = behind <= (row_position - row_first)[:, None].to(tl.uint32)
        scores = tl.where(visible, scores, float("-inf"))
    weights, decay, row_max, row_sum = weigh(scores, row_max, row_sum, MASKED)
    weights = weights.to(q.dtype)
    if PAIRS:
        even, odd = split_pairs(value, cache_type)
        even = tl.dot(weights, even.to(q.dtype), acc[0] * decay[:, None], input_precision="ieee")
        odd = tl.dot(weights, odd.to(q.dtype), acc[1] * decay[:, None], input_precision="ieee")
        acc = (even, odd)
    else:
        acc = (tl.dot(weights, value.to(q.dtype), acc[0] * decay[:, None], input_precision="ieee"),)
    return acc, row_max, row_sum


@triton.jit
def attend(
    q,
    acc,
    row_max,
    row_sum,
    begin,
    end,
    first,
    limit,
    row_position,
    row_first,
    qk_scale,
    soft_cap,
    keys_ptr,
    value_offset,
    blocks_ptr,
    block_rows,
    column,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Fold keys [begin, end) into the running softmax; MASKED: with masks for `limit`, causality and window.

    Rows beyond the last query compute something finite, which is not stored.
    """
    PAIRS: tl.constexpr = len(acc) == 2
    for start in range(begin, end, BLOCK_N):
        key, value = load_tile(
            start, first, limit, keys_ptr, value_offset, blocks_ptr, block_rows, column, SLOT_STRIDE, HEAD_DIM,
            BLOCK_N, BLOCK_SIZE, MASKED and not PAIRS, MASKED and PAIRS, MASKED and WINDOWED, PAIRS,
        )  # fmt: skip
        acc, row_max, row_sum = fold_tile(
            q, acc, row_max, row_sum, key, value, start, row_position, row_first, qk_scale, soft_cap,
            keys_ptr.dtype.element_ty, MASKED, WINDOWED,
        )  # fmt: skip
    return acc, row_max, row_sum
