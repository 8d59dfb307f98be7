"""Computes attention over the paged KV cache, for prompts, chunks of prompts and decodes alike (FlashAttention-2, arXiv
2307.08691).

A program takes a tile of rows (query tokens x the query heads that share a KV head) and one split of the keys. Where
the keys are split, a second kernel combines the splits. On NVIDIA GPUs of compute capability 9.0 long prompts go to
prefill.py instead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.attention_config import MAX_SPLITS, AttentionConfig, AttentionPlan
from headrace.kernels.attention_tiles import LOG2_E, attend, first_visible, in_log2, no_keys_yet
from headrace.kernels.fp8_cache import UnpackedCache, as_float16, unpack
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, find_request, rows_between


@triton.jit(
    do_not_specialize=[
        "window", "value_rows", "block_rows", "block_table_stride", "first_req", "num_reqs", "search_steps"
    ]
)  # fmt: skip
def _attention_kernel(
    out_ptr,
    parts_ptr,
    lse_ptr,
    q_ptr,
    cache_ptr,
    block_table_ptr,
    rows_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    kv_scale_ptr,
    sinks_ptr,
    qk_scale,
    soft_cap,
    window,
    value_rows,
    block_rows,
    block_table_stride,
    first_req,
    num_reqs,
    search_steps,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend; grid (KV heads, tiles of queries, splits). If there is one split it writes `out` [T, Hq, D]. Several
    write `parts` fp32 [T, Hq, splits, D] and `lse` [T, Hq, splits]: log2 of the sum of exponentials, -inf where a split
    has no key that the query sees."""
    wait_for_inputs(OVERLAP)
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    BLOCK_Q: tl.constexpr = 1 if DECODE else BLOCK_M // GROUP
    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    value_offset = value_rows.to(tl.int64) * SLOT_STRIDE
    if DECODE:
        request = tl.program_id(1)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = 1
        tile = 0
    else:
        # late tiles see most keys: start them first
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        request, query_start, query_len, tile = find_request(
            tile, query_start_loc_ptr, first_req, num_reqs, search_steps, BLOCK_Q
        )
        if tile * BLOCK_Q >= query_len:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    table_row = tl.load(rows_ptr + request).to(tl.int64)

    lane = tl.arange(0, BLOCK_M)
    query = tile * BLOCK_Q + lane // GROUP
    row_in = (lane < BLOCK_Q * GROUP) & (query < query_len)
    column = tl.arange(0, BLOCK_D)
    mask = row_in[:, None]
    if BLOCK_D > HEAD_DIM:
        mask = mask & (column < HEAD_DIM)[None, :]
    # row of [T * Hq, D]
    target = (query_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + lane % GROUP
    q = tl.load(q_ptr + target[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    if QUANTIZED:
        qk_scale = qk_scale * tl.load(kv_scale_ptr)
        if q.dtype == tl.bfloat16:  # fp8 becomes float16 in one instruction, bfloat16 in five
            q, power = as_float16(q)
            qk_scale = qk_scale * power

    first_position = seq_len - query_len + tile * BLOCK_Q
    row_position = seq_len - query_len + query
    row_first = row_position
    limit = tl.minimum(first_position + BLOCK_Q, seq_len)
    first = 0
    begin = 0
    if WINDOWED:
        first = first_visible(first_position, window, CHUNKED)
        begin = first
        if not DECODE:  # tiles that begin where they do for any other cut of a prompt
            begin = first // BLOCK_N * BLOCK_N
            row_first = first_visible(row_position, window, CHUNKED)
    part = tl.cdiv(tl.cdiv(tl.maximum(limit - begin, 0), BLOCK_N), num_splits) * BLOCK_N
    begin += split * part
    end = tl.minimum(begin + part, limit)
    sees_keys = begin < end

    keys_ptr = cache_ptr + kv_head * HEAD_DIM
    blocks_ptr = block_table_ptr + table_row * block_table_stride
    PAIRS: tl.constexpr = QUANTIZED and DECODE  # prompts' wider tiles are converted before they go to shared memory
    if PAIRS:
        acc = (tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32), tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32))
    else:
        acc = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    row_max, row_sum = no_keys_yet(sinks_ptr, kv_head * GROUP + lane % GROUP, sees_keys & (split == 0))
    if not DECODE:
        if WINDOWED:  # tiles where some row's window begins
            front = tl.cdiv(first_visible(limit - 1, window, CHUNKED), BLOCK_N) * BLOCK_N
            front = tl.minimum(tl.maximum(front, begin), end)
            acc, row_max, row_sum = attend(
                q, acc, row_max, row_sum, begin, front, first, limit, row_position, row_first, qk_scale, soft_cap,
                keys_ptr, value_offset, blocks_ptr, block_rows, column, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_SIZE,
                True, True,
            )  # fmt: skip
            begin = tl.maximum(begin, front)
        whole = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)  # tiles that every row sees: no masks
        acc, row_max, row_sum = attend(
            q, acc, row_max, row_sum, begin, whole, first, limit, row_position, row_first, qk_scale, soft_cap, keys_ptr,
            value_offset, blocks_ptr, block_rows, column, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_SIZE, False, False,
        )  # fmt: skip
        begin = tl.maximum(begin, whole)
    acc, row_max, row_sum = attend(
        q, acc, row_max, row_sum, begin, end, first, limit, row_position, row_first, qk_scale, soft_cap, keys_ptr,
        value_offset, blocks_ptr, block_rows, column, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_SIZE, True, False,
    )  # fmt: skip

    if PAIRS:
        acc = tl.interleave(acc[0], acc[1])
    else:
        acc = acc[0]
    if QUANTIZED:
        acc = acc * tl.load(kv_scale_ptr + 1)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if num_splits == 1:
        tl.store(out_ptr + target[:, None] * HEAD_DIM + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        target = target * num_splits + split
        tl.store(lse_ptr + target, tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum)), mask=row_in)
        if sees_keys:
            tl.store(parts_ptr + target[:, None] * HEAD_DIM + column[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    out_ptr,
    parts_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combine the splits; one program a query head and token. Writes zeros where no split saw a key. `num_splits` is
    not a constant, so that a number that comes up for the first time needs no compilation."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    every = tl.arange(0, MAX_SPLITS)
    largest = tl.max(tl.load(lse_ptr + row * num_splits + every, mask=every < num_splits, other=float("-inf")), axis=0)
    total = tl.zeros([BLOCK_S], tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
        seen = lse != float("-inf")  # NaN is seen: it has to reach the result
        weight = tl.where(seen, tl.exp2(lse - largest), 0.0)
        part_ptrs = parts_ptr + (row * num_splits + split)[:, None] * HEAD_DIM + column[None, :]
        parts = tl.load(part_ptrs, mask=seen[:, None] & in_head[None, :], other=0.0)
        total += weight
        out += tl.sum(parts * weight[:, None], axis=0)
    total = tl.sum(total, axis=0)
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=in_head)


COMBINED = 16
"""splits that are added up at once"""
MOST_TILES = 65_535
"""the most programs in the second dimension of a grid. (With tiles in the first, and heads beside them, registers
spill.)"""


@lru_cache(maxsize=16)
def multiprocessor_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (AMD: compute units) of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    """Tell whether `device` is an NVIDIA GPU of compute capability 9.0: no other has its matrix instructions."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def tile_element_size(q: Tensor, kv_cache: Tensor) -> int:
    """Return the element size for the tables of configurations: q's, but 1 for an fp8 cache and 2-byte queries."""
    return 1 if kv_cache.element_size() == 1 and q.element_size() == 2 else q.element_size()


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    sequences: Sequences,
    scale: float,
    sliding_window: int | None = None,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    *,
    plan: AttentionPlan,
    unpacked: UnpackedCache | None = None,
) -> Tensor:
    """Attend causally with q [T, Hq, D] to the paged cache [2, num_blocks, block_size, Hkv, D]; return [T, Hq, D].

    The cache already holds the step's own keys. A query sees itself and `sliding_window` - 1 keys before it, or (if
    `chunked`) those before it in its own chunk of `sliding_window` positions, or all. A head's softmax also counts
    its logit of `sinks` [Hq], which has no value. With `soft_cap`, scores x become soft_cap * tanh(x / soft_cap).
    Requests of seq_len 0 (padding) give zeros. `plan` (of plan_attention) says how many leading requests run one
    token; launches depend on it alone, never on current lengths. An fp8 cache holds K / kv_scale[0] and V /
    kv_scale[1], fp32 [2] on the device; with `unpacked`, what the requests behind the decodes read of it is
    unpacked there first.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    q, decodes, qk_scale = q.contiguous(), plan.num_decodes, scale * LOG2_E
    seen = Seen(sliding_window, chunked, sinks, in_log2(soft_cap))
    if decodes:
        _run(
            out[:decodes], q, kv_cache, sequences, kv_scale, qk_scale, seen, 0, decodes, decodes, plan.decode,
            plan.decode_splits, True,
        )  # fmt: skip
    if plan.prefill_tiles:
        if unpacked is not None:
            assert kv_scale is not None
            unpack(unpacked, kv_cache, sequences, kv_scale, decodes)
            sequences = sequences._replace(block_table=unpacked.block_table, rows=unpacked.rows)
            kv_cache, kv_scale = unpacked.cache, None
        _run(
            out, q, kv_cache, sequences, kv_scale, qk_scale, seen, decodes, len(sequences.rows), plan.prefill_tiles,
            plan.prefill, plan.prefill_splits, False,
        )  # fmt: skip
    return out


class Seen(NamedTuple):
    """Says what a layer's queries see, as arguments of `paged_attention` do."""

    window: int | None
    chunked: bool
    sinks: Tensor | None
    soft_cap: float | None = None
    """in units of the kernels' scores"""


def _run(
    out: Tensor, q: Tensor, kv_cache: Tensor, sequences: Sequences, kv_scale: Tensor | None, qk_scale: float,
    seen: Seen, first_req: int, end_req: int, tiles: int, config: AttentionConfig, splits: int, decode: bool,
) -> None:  # fmt: skip
    """Launch the kernel for requests first_req : end_req, whose tokens begin at first_req, and combine the splits."""
    if tiles > MOST_TILES:  # as for any step that is too large, a smaller one is planned then
        raise torch.OutOfMemoryError(f"attention over {tiles} tiles of queries: a launch holds {MOST_TILES}")
    if config.copy_engine:
        from headrace.kernels.prefill import prefill_attention  # which can be imported only where it can run

        prefill_attention(out, q, kv_cache, sequences, seen.sinks, qk_scale, first_req, end_req, tiles, config)
        return
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads = kv_cache.shape[3]
    quantized = kv_cache.element_size() == 1
    block_d = max(32 if quantized else 16, next_power_of_2(head_dim))  # fp8 values are taken as two halves
    parts = lse = out
    if splits > 1:
        parts = torch.empty((num_tokens, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_tokens, num_heads, splits), dtype=torch.float32, device=q.device)
    arguments = (
        out, parts, lse, q, kv_cache, *sequences, kv_scale, seen.sinks, qk_scale, seen.soft_cap, seen.window or 0,
        *rows_between(kv_cache),
        sequences.block_table.stride(0), first_req, end_req, (end_req - first_req - 1).bit_length(),
    )  # fmt: skip
    constants = dict(
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, GROUP=num_heads // num_kv_heads,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_SIZE=kv_cache.shape[2], DECODE=decode,
        WINDOWED=seen.window is not None, CHUNKED=seen.chunked, QUANTIZED=quantized,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=config.fp_fusion, **overlap(),
    )  # fmt: skip
    launch(_attention_kernel, (num_kv_heads, tiles, splits), arguments, constants)
    if splits > 1:
        combined = (out[first_req:], parts[first_req:], lse[first_req:], splits)
        constants = dict(
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_S=COMBINED, MAX_SPLITS=MAX_SPLITS, num_warps=4, **overlap()
        )
        launch(_combine_kernel, ((num_tokens - first_req) * num_heads, 1, 1), combined, constants)


def paged_attention_reference(
    q: Tensor,
    kv_cache: Tensor,
    sequences: Sequences,
    scale: float,
    sliding_window: int | None = None,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
) -> Tensor:
    out = torch.empty_like(q) if out is None else out
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group = q.shape[1] // num_kv_heads
    starts = sequences.query_start_loc.tolist()
    for request, (row, length) in enumerate(zip(sequences.rows.tolist(), sequences.seq_lens.tolist(), strict=True)):
        first, last = starts[request], starts[request + 1]
        if length == 0:
            out[first:last] = 0
            continue
        blocks = sequences.block_table[row, : -(-length // block_size)].long()
        if kv_scale is not None and kv_cache.element_size() == 1:
            both = kv_cache.view(torch.uint8)[:, blocks].view(kv_cache.dtype).flatten(1, 2)[:, :length].float()
            both = both * kv_scale.view(2, 1, 1, 1)
        else:
            both = kv_cache[:, blocks].flatten(1, 2)[:, :length].float()
        key, value = both.repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), key) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        seen_from = torch.arange(length, device=q.device)
        at = torch.arange(length - (last - first), length, device=q.device)[:, None]
        hidden = seen_from > at
        if sliding_window is not None:
            hidden |= seen_from < (at // sliding_window * sliding_window if chunked else at - sliding_window + 1)
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(at), 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype)
    return out
