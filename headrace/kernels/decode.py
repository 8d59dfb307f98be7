"""Computes a decode's attention in one launch: QK norm, rotary embedding, write of the new key and value, attention.

The keys of a request are cut into parts (flash decoding), each computed by a program of its own; whichever program of a
request and KV head finishes last combines the parts. Programs may run while the kernel in front of this one still does:
the cache holds what earlier steps wrote, so only q, k and v have to be waited for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.attention import paged_attention_reference
from headrace.kernels.attention_config import TILES_PER_SPLIT, AttentionConfig
from headrace.kernels.attention_tiles import (
    LOG2_E,
    attend,
    capped,
    first_visible,
    fold_tile,
    in_log2,
    load_tile,
    no_keys_yet,
)
from headrace.kernels.fp8_cache import as_float16
from headrace.kernels.paged import Sequences, rows_between
from headrace.kernels.rotary import _to_fp8, head_norm, rotary_and_cache_reference


@triton.jit
def _rotated(
    ptrs, partner_ptrs, weight_ptr, column, partner, inside, cos, sin, eps, temperature, factors_ptr,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Load heads [rows, BLOCK_D], norm and (unless `sin` is None) rotate them in fp32, rounding where the separate
    kernels would; multiply by `temperature` and the factors, unless they are None."""
    dtype: tl.constexpr = ptrs.dtype.element_ty
    x = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(partner_ptrs, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        WIDE: tl.constexpr = weight_ptr.dtype.element_ty != dtype
        in_head = column < HEAD_DIM
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + column, mask=in_head, other=0.0).to(tl.float32)[None, :]
        other_weight = tl.load(weight_ptr + partner, mask=in_head, other=0.0).to(tl.float32)[None, :]
        x = head_norm(x, scale, weight, dtype, WIDE)
        other = head_norm(other, scale, other_weight, dtype, WIDE)
    if sin is not None:
        x = x * cos + other * sin
    if temperature is not None:
        x = x * temperature
    if factors_ptr is not None:
        x = x * tl.load(factors_ptr + column, mask=column < HEAD_DIM, other=0.0)[None, :]
    return x.to(dtype)


@triton.jit
def _new_token(
    k_ptr, v_ptr, k_norm_ptr, column, partner, wanted, cos, sin, eps,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load the new token's key [1, BLOCK_D], normed and rotated, and its value; if PAIRS, the value's even numbers and
    its odd ones. If not `wanted`, read nothing and give zeros."""
    inside = (column < HEAD_DIM) & (wanted + 0 * column > 0)
    k_ptrs = k_ptr + tl.zeros([1, column.shape[0]], tl.int32)
    key = _rotated(
        k_ptrs + column[None, :], k_ptrs + partner[None, :], k_norm_ptr, column, partner, inside[None, :], cos, sin,
        eps, None, None, HEAD_DIM, NORM,
    )  # fmt: skip
    if PAIRS:
        two = 2 * tl.arange(0, column.shape[0] // 2)
        inside = (two < HEAD_DIM) & (wanted + 0 * two > 0)
        value = (tl.load(v_ptr + two, mask=inside, other=0.0), tl.load(v_ptr + two + 1, mask=inside, other=0.0))
    else:
        value = (tl.load(v_ptr + column, mask=inside, other=0.0),)
    return key, value


@triton.jit
def _stored(x, scale, cache_type: tl.constexpr, QUANTIZED: tl.constexpr, LIMIT: tl.constexpr):
    """Return x in the cache's type, divided by `scale` if that is fp8."""
    if QUANTIZED:
        return _to_fp8(x, 1.0 / scale, LIMIT, cache_type)
    return x.to(cache_type)


@triton.jit
def _combined(
    part_ptrs, lse_ptrs, lane, inside, num_parts, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Combine the parts in their order, so that the result does not depend on which program finished last. Loads bypass
    the first-level cache, since programs on other multiprocessors wrote the parts."""
    part = tl.arange(0, SPLITS)[:, None]
    known = (part < num_parts) & (lane < GROUP)[None, :]
    all_lse = tl.load(lse_ptrs[None, :] + part * GROUP, mask=known, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(all_lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    norm = tl.sum(tl.exp2(all_lse - top[None, :]), axis=0)
    total = inside.to(tl.float32) * 0.0
    for first in range(0, num_parts, AT_ONCE):
        for offset in tl.static_range(AT_ONCE):
            index = first + offset
            row_in = (lane < GROUP) & (index + 0 * lane < num_parts)
            lse = tl.load(lse_ptrs + index * GROUP, mask=row_in, other=float("-inf"), cache_modifier=".cg")
            share_in = inside & row_in[:, None]
            share = tl.load(part_ptrs + index * (GROUP * HEAD_DIM), mask=share_in, other=0.0, cache_modifier=".cg")
            total += share * tl.exp2(lse - top)[:, None]
    return total / tl.where(norm == 0.0, 1.0, norm)[:, None]


@triton.jit(do_not_specialize=["window", "value_rows", "block_rows", "block_table_stride"])
def _decode_kernel(
    out_ptr,
    parts_ptr,
    lse_ptr,
    tickets_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cache_ptr,
    block_table_ptr,
    rows_ptr,
    seq_lens_ptr,
    kv_scale_ptr,
    sinks_ptr,
    temperature_ptr,
    q_weight_ptr,
    eps,
    qk_scale,
    soft_cap,
    window,
    q_stride,
    q_head_stride,
    k_stride,
    v_stride,
    value_rows,
    block_rows,
    block_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES_PER_PART: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend; grid (KV heads, requests, SPLITS).

    How many parts a request's keys are cut into depends on its length, and is at most SPLITS: programs beyond end at
    once. A program writes its part to `parts` fp32 [R, Hkv, SPLITS, GROUP, D], log2 of its sum of exponentials to `lse`
    [R, Hkv, SPLITS, GROUP], and adds 1 to the request's counter in `tickets` int32 [R, Hkv]: who reads there that it is
    the last one combines the parts and sets the counter to zero again.
    """
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    table_row = tl.load(rows_ptr + request).to(tl.int64)
    at = tl.maximum(seq_len - 1, 0)  # the new token's position, which is the number of keys before it
    begin = 0
    if WINDOWED:
        begin = first_visible(at, window, CHUNKED)
    tiles = tl.cdiv(at - begin, BLOCK_N)
    per_part = tl.maximum(tl.cdiv(tiles, SPLITS), TILES_PER_PART)
    num_parts = tl.maximum(tl.cdiv(tiles, per_part), 1)
    begin += split * per_part * BLOCK_N
    end = tl.minimum(begin + per_part * BLOCK_N, at)

    lane = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    in_head = (column < HEAD_DIM)[None, :]
    turns = column < 2 * HALF
    if INTERLEAVED:
        partner = tl.where(turns, column ^ 1, column)
        first_of_two = column % 2 == 0
    else:
        partner = tl.where(column < HALF, column + HALF, tl.where(turns, column - HALF, column))
        first_of_two = column < HALF
    cos = None
    sin = None
    if HALF > 0:
        angle = cos_sin_ptr + at.to(tl.int64) * (2 * HALF) + (column // 2 if INTERLEAVED else column % HALF)
        cos = tl.load(angle, mask=turns, other=1.0)[None, :]
        sin = tl.load(angle + HALF, mask=turns, other=0.0)[None, :]
        sin = tl.where(first_of_two[None, :], -sin, sin)
    blocks_ptr = block_table_ptr + table_row * block_table_stride
    own_row = tl.load(blocks_ptr + at // BLOCK_SIZE) * block_rows + at % BLOCK_SIZE
    keys_ptr = cache_ptr + kv_head * HEAD_DIM
    value_offset = value_rows.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
    if EARLY:
        first_keys, first_values = load_tile(
            begin, 0, end, keys_ptr, value_offset, blocks_ptr, block_rows, column, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM,
            BLOCK_N, BLOCK_SIZE, True, False, False, QUANTIZED,
        )  # fmt: skip
    wait_for_inputs(OVERLAP)
    if split >= num_parts:
        return

    q_ptrs = q_ptr + request.to(tl.int64) * q_stride + (kv_head * GROUP + lane[:, None]) * q_head_stride
    inside = (lane < GROUP)[:, None] & in_head
    temperature = None
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + request)
    q = _rotated(
        q_ptrs + column[None, :], q_ptrs + partner[None, :], q_norm_ptr, column, partner, inside, cos, sin, eps,
        temperature, q_weight_ptr, HEAD_DIM, NORM,
    )  # fmt: skip
    last = split == num_parts - 1  # the last part includes the new token's own key and value
    k_ptr += request.to(tl.int64) * k_stride + kv_head * HEAD_DIM
    v_ptr += request.to(tl.int64) * v_stride + kv_head * HEAD_DIM
    if EARLY:
        key, value = _new_token(
            k_ptr, v_ptr, k_norm_ptr, column, partner, last, cos, sin, eps, HEAD_DIM, NORM, QUANTIZED
        )
    k_scale = 1.0
    v_scale = 1.0
    if QUANTIZED:
        k_scale = tl.load(kv_scale_ptr)
        v_scale = tl.load(kv_scale_ptr + 1)
        qk_scale = qk_scale * k_scale
        acc = (tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32), tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32))
        if q.dtype == tl.bfloat16:  # fp8 becomes float16 in one instruction, bfloat16 in five
            q, power = as_float16(q)
            qk_scale = qk_scale * power
    else:
        acc = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    row_max, row_sum = no_keys_yet(sinks_ptr, kv_head * GROUP + lane % GROUP, split == 0)
    before = at - 1 + tl.zeros([BLOCK_M], tl.int32)  # the cache's last key; the new one is added below
    if EARLY:
        acc, row_max, row_sum = fold_tile(
            q, acc, row_max, row_sum, first_keys, first_values, begin, before, before, qk_scale, soft_cap,
            cache_ptr.dtype.element_ty, True, False,
        )  # fmt: skip
        begin += BLOCK_N
    acc, row_max, row_sum = attend(
        q, acc, row_max, row_sum, begin, end, 0, end, before, before, qk_scale, soft_cap, keys_ptr, value_offset,
        blocks_ptr, block_rows, column, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_N, BLOCK_SIZE, True, False,
    )  # fmt: skip

    if last:
        cache_type: tl.constexpr = cache_ptr.dtype.element_ty
        if not EARLY:
            key, value = _new_token(
                k_ptr, v_ptr, k_norm_ptr, column, partner, last, cos, sin, eps, HEAD_DIM, NORM, QUANTIZED
            )
        own = _stored(key, k_scale, cache_type, QUANTIZED, LIMIT)
        cached = keys_ptr + own_row.to(tl.uint32).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
        tl.store(cached + column[None, :], own, mask=(seq_len + 0 * column > 0)[None, :] & in_head)
        scores = tl.sum(q.to(tl.float32) * own.to(tl.float32), axis=1)
        if QUANTIZED and q.dtype == tl.float16:
            scores = scores * tl.reshape(qk_scale + tl.zeros([BLOCK_M, 1], tl.float32), [BLOCK_M])
        else:
            scores = scores * qk_scale
        scores = capped(scores, soft_cap)
        scores = tl.where(seq_len + 0 * lane > 0, scores, float("-inf"))  # not padding
        new_max = tl.maximum(row_max, scores)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift)
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + weights
        row_max = new_max
        if QUANTIZED:
            even = _stored(value[0], v_scale, cache_type, QUANTIZED, LIMIT)
            odd = _stored(value[1], v_scale, cache_type, QUANTIZED, LIMIT)
            two = 2 * tl.arange(0, BLOCK_D // 2)
            tl.store(cached + value_offset + two, even, mask=(two < HEAD_DIM) & (seq_len + 0 * two > 0))
            tl.store(cached + value_offset + two + 1, odd, mask=(two < HEAD_DIM) & (seq_len + 0 * two > 0))
            acc = (
                acc[0] * decay[:, None] + weights[:, None] * even.to(tl.float32)[None, :],
                acc[1] * decay[:, None] + weights[:, None] * odd.to(tl.float32)[None, :],
            )
        else:
            whole = value[0].to(cache_type)
            tl.store(cached + value_offset + column, whole, mask=(column < HEAD_DIM) & (seq_len + 0 * column > 0))
            acc = (acc[0] * decay[:, None] + weights[:, None] * whole.to(tl.float32)[None, :],)

    if QUANTIZED:
        total = tl.interleave(acc[0], acc[1]) * v_scale
    else:
        total = acc[0]
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_ptrs = out_ptr + (request.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    out_ptrs = out_ptrs + lane[:, None] * HEAD_DIM + column[None, :]
    if SPLITS == 1:  # noqa: SIM114  (known when compiling: nothing of what follows is compiled in)
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
    elif num_parts == 1:
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        pair = request.to(tl.int64) * NUM_KV_HEADS + kv_head
        part_ptrs = parts_ptr + pair * (SPLITS * GROUP * HEAD_DIM) + lane[:, None] * HEAD_DIM + column[None, :]
        lse_ptrs = lse_ptr + pair * (SPLITS * GROUP) + lane
        tl.store(part_ptrs + split * (GROUP * HEAD_DIM), total, mask=inside)
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        tl.store(lse_ptrs + split * GROUP, lse, mask=lane < GROUP)
        tl.debug_barrier()  # all threads have stored before the counter says so
        ticket = tl.atomic_add(tickets_ptr + pair, 1, sem="acq_rel", scope="gpu")
        if ticket == num_parts - 1:  # the last to finish
            total = _combined(part_ptrs, lse_ptrs, lane, inside, num_parts, GROUP, HEAD_DIM, SPLITS, 2)
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(tickets_ptr + pair, 0)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    kv_cache: Tensor,
    sequences: Sequences,
    tickets: Tensor,
    scale: float,
    config: AttentionConfig,
    splits: int,
    sliding_window: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    interleaved: bool = False,
    temperature: Tensor | None = None,
    q_weight: Tensor | None = None,
) -> Tensor:
    """Attend with one new token a request, q [R, Hq, D], k and v [R, Hkv, D] as projected; return [R, Hq, D].

    This is `rotary_and_cache` and `paged_attention` in one launch, for requests of one token each. Padding (seq_len 0)
    gives zeros and writes nothing. Heads of keys and of values are contiguous within a token. `tickets` int32 are
    counters, at least R * Hkv; they must be zero, and are zero again afterwards. `splits` is the most parts that a
    request's keys are cut into: the result depends on it, but not on the order in which programs finish. `cos_sin`
    None: nothing is rotated. What a query sees (`sliding_window`, `chunked`, `sinks`, `soft_cap`) is as in
    paged_attention, and how it is rotated (`interleaved`, `temperature` [R], `q_weight` [D]) as in
    rotary_and_cache.
    """
    num_reqs, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty((num_reqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if not num_reqs:
        return out
    parts = lse = out
    if splits > 1:
        shape = (num_reqs, num_kv_heads, splits, group)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    quantized = kv_cache.element_size() == 1
    _decode_kernel[(num_kv_heads, num_reqs, splits)](
        out, parts, lse, tickets, q, k, v, cos_sin, q_norm, k_norm, kv_cache, sequences.block_table, sequences.rows,
        sequences.seq_lens, kv_scale, sinks, temperature, q_weight, eps, scale * LOG2_E, in_log2(soft_cap),
        sliding_window or 0,
        q.stride(0), q.stride(1), k.stride(0), v.stride(0), *rows_between(kv_cache), sequences.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=max(32, next_power_of_2(head_dim)),
        HALF=0 if cos_sin is None else cos_sin.shape[1] // 2, GROUP=group, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_SIZE=kv_cache.shape[2], SPLITS=splits, TILES_PER_PART=TILES_PER_SPLIT,
        WINDOWED=sliding_window is not None, CHUNKED=chunked, INTERLEAVED=interleaved, NORM=q_norm is not None,
        QUANTIZED=quantized, LIMIT=torch.finfo(kv_cache.dtype).max if quantized else 0.0, EARLY=config.early_keys,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlap(),
    )  # fmt: skip
    return out


def decode_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    kv_cache: Tensor,
    sequences: Sequences,
    scale: float,
    sliding_window: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    interleaved: bool = False,
    temperature: Tensor | None = None,
    q_weight: Tensor | None = None,
) -> Tensor:
    table, rows, _, seq_lens = sequences
    block_size = kv_cache.shape[2]
    at = (seq_lens.long() - 1).clamp_(min=0)
    slots = table[rows.long(), at // block_size].long() * block_size + at % block_size
    slots = slots.masked_fill(seq_lens == 0, -1)
    q = rotary_and_cache_reference(
        q, k, v, cos_sin, at, kv_cache, slots, q_norm, k_norm, eps, kv_scale, interleaved, temperature, q_weight
    )
    return paged_attention_reference(
        q, kv_cache, sequences, scale, sliding_window, kv_scale, sinks=sinks, chunked=chunked, soft_cap=soft_cap
    )
