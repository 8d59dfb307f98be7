"""Computes prompts' attention over latents with each head's own keys and values, projected out of the latents piece by
piece.

A product of a query and a key then takes a third of the operations of the absorbed form (latent.py), but keys and
values have to be projected first, for all keys that the step's prompts see. So the keys of all prompts are counted
through one after the other, and pieces of them that fill a memory of bounded size are gathered from the cache,
projected and attended to in turn. Between pieces a row keeps the mean of values so far, and the logarithm of its sum of
exponentials, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.attention import MOST_TILES
from headrace.kernels.attention_tiles import LOG2_E, weigh
from headrace.kernels.latent import LatentHeads
from headrace.kernels.latent_config import ExpandedLaunch
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, find_request, rows_between

ROWS_AT_ONCE = 8
"""rows of the cache that a program gathers"""


@triton.jit(do_not_specialize=["first", "block_rows", "block_table_stride", "first_req", "num_prompts", "search_steps"])
def _gather_kernel(
    out_ptr, cache_ptr, block_table_ptr, rows_ptr, key_starts_ptr, kv_scale_ptr, first, block_rows, block_table_stride,
    first_req, num_prompts, search_steps, KEPT: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy the first KEPT numbers of rows of the cache to `out`, ROWS a program. Keys are counted from `first` on."""
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = first + place
    known = key < tl.load(key_starts_ptr + num_prompts)
    prompt = 0 * place
    high = prompt + num_prompts
    for _ in range(search_steps):  # the last prompt whose first key is not behind this one
        middle = (prompt + high) // 2
        begins = tl.load(key_starts_ptr + middle) <= key
        prompt = tl.where(begins, middle, prompt)
        high = tl.where(begins, high, middle)
    position = key - tl.load(key_starts_ptr + prompt)
    table_row = tl.load(rows_ptr + first_req + prompt).to(tl.int64) * block_table_stride
    block = tl.load(block_table_ptr + table_row + position // BLOCK_SIZE, mask=known, other=0)
    row = (block * block_rows + position % BLOCK_SIZE).to(tl.uint32).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK_K)
    mask = known[:, None] & (column < KEPT)[None, :]
    numbers = tl.load(cache_ptr + row[:, None] + column[None, :], mask=mask, other=0.0)
    if QUANTIZED:
        numbers = numbers.to(tl.float16).to(tl.float32) * tl.load(kv_scale_ptr)
    tl.store(out_ptr + place[:, None] * KEPT + column[None, :], numbers.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_keys(
    start, end, kv_ptr, turned_ptr, HEADS: tl.constexpr, NOPE: tl.constexpr, BLOCK_K: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, KEPT: tl.constexpr, BLOCK_N: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Load keys [BLOCK_N, BLOCK_K], their rotated parts [BLOCK_N, BLOCK_R] and values [BLOCK_N, BLOCK_V] of the rows
    from `start` on. CUT: there are none from `end` on, where zeros stand for them."""
    place = start + tl.arange(0, BLOCK_N)
    row = place[:, None] * (HEADS * (NOPE + VALUE))
    column = tl.arange(0, BLOCK_K)[None, :]
    turned_column = tl.arange(0, BLOCK_R)[None, :]
    value_column = tl.arange(0, BLOCK_V)[None, :]
    turned_ptrs = turned_ptr + place[:, None] * KEPT + turned_column
    if CUT or BLOCK_K > NOPE or BLOCK_V > VALUE or BLOCK_R > ROPE:
        known = (place < end)[:, None]
        key = tl.load(kv_ptr + row + column, mask=known & (column < NOPE), other=0.0)
        turned = tl.load(turned_ptrs, mask=known & (turned_column < ROPE), other=0.0)
        value = tl.load(kv_ptr + row + NOPE + value_column, mask=known & (value_column < VALUE), other=0.0)
    else:
        key = tl.load(kv_ptr + row + column)
        turned = tl.load(turned_ptrs)
        value = tl.load(kv_ptr + row + NOPE + value_column)
    return key, turned, value


@triton.jit
def _fold_keys(
    q, q_turned, acc, row_max, row_sum, key, turned, value, start, row_position, qk_scale, MASKED: tl.constexpr
):  # fmt: skip
    """Fold a tile of `_load_keys` into the running softmax; MASKED: rows see keys up to `row_position` # [rows]."""
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision="ieee") * qk_scale
    if MASKED:
        position = start + tl.arange(0, key.shape[0])
        scores = tl.where(position[None, :] <= row_position[:, None], scores, float("-inf"))
    weights, decay, row_max, row_sum = weigh(scores, row_max, row_sum, MASKED)
    acc = tl.dot(weights.to(q.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["first", "last", "first_req", "num_reqs", "search_steps"])
def _expanded_kernel(
    out_ptr, mean_ptr, lse_ptr, q_ptr, kv_ptr, gathered_ptr, query_start_loc_ptr, seq_lens_ptr, key_starts_ptr,
    qk_scale, q_stride, first, last, first_req, num_reqs, search_steps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, BLOCK_K: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, KEPT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SEVERAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend to the keys counted first : last; grid (heads, tiles of BLOCK_M queries). A tile that saw keys in an
    earlier piece goes on from `mean` fp32 [T, HEADS, VALUE] and `lse` [T, HEADS], log2 of the sum of exponentials; one
    that has seen all its keys writes `out` [T, HEADS, VALUE], and any other leaves both to the next piece. SEVERAL:
    there is more than one piece."""
    wait_for_inputs(OVERLAP)
    head = tl.program_id(0)
    # late tiles see most keys: start them first
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request, query_start, query_len, tile = find_request(
        tile, query_start_loc_ptr, first_req, num_reqs, search_steps, BLOCK_M
    )
    if tile * BLOCK_M >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    key_start = tl.load(key_starts_ptr + request - first_req)
    first_position = seq_len - query_len + tile * BLOCK_M
    limit = tl.maximum(tl.minimum(first_position + BLOCK_M, seq_len), 0)
    begin = tl.minimum(tl.maximum(first - key_start, 0), limit)
    end = tl.minimum(tl.maximum(last - key_start, 0), limit)
    if (begin >= end) & ((limit > 0) | (first > 0)):  # padding is written with the first piece
        return

    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = query < query_len
    row_position = seq_len - query_len + query
    column = tl.arange(0, BLOCK_K)[None, :]
    turned_column = tl.arange(0, BLOCK_R)[None, :]
    value_column = tl.arange(0, BLOCK_V)[None, :]
    token = (query_start + query).to(tl.int64)
    q_ptrs = q_ptr + token[:, None] * q_stride + head * (NOPE + ROPE)
    q = tl.load(q_ptrs + column, mask=row_in[:, None] & (column < NOPE), other=0.0)
    q_turned = tl.load(q_ptrs + NOPE + turned_column, mask=row_in[:, None] & (turned_column < ROPE), other=0.0)
    target = token * HEADS + head
    place = target[:, None] * VALUE + value_column
    inside = row_in[:, None] & (value_column < VALUE)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if SEVERAL:
        goes_on = row_in & (begin + 0 * query > 0)
        row_max = tl.load(lse_ptr + target, mask=goes_on, other=float("-inf"))
        row_sum = tl.where(goes_on, 1.0, row_sum)
        acc = tl.load(mean_ptr + place, mask=inside & goes_on[:, None], other=0.0)
    kv_ptr += head * (NOPE + VALUE)
    in_piece = key_start - first  # from a position to its row of the piece
    whole = begin + tl.maximum(tl.minimum(first_position + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        key, turned, value = _load_keys(
            start + in_piece,
            end + in_piece,
            kv_ptr,
            gathered_ptr,
            HEADS,
            NOPE,
            BLOCK_K,
            ROPE,
            BLOCK_R,
            VALUE,
            BLOCK_V,
            KEPT,
            BLOCK_N,
            False,
        )
        acc, row_max, row_sum = _fold_keys(
            q, q_turned, acc, row_max, row_sum, key, turned, value, start, row_position, qk_scale, False
        )
    row_position = tl.minimum(row_position, end - 1)  # a piece may end within what a row sees
    for start in range(whole, end, BLOCK_N):
        key, turned, value = _load_keys(
            start + in_piece,
            end + in_piece,
            kv_ptr,
            gathered_ptr,
            HEADS,
            NOPE,
            BLOCK_K,
            ROPE,
            BLOCK_R,
            VALUE,
            BLOCK_V,
            KEPT,
            BLOCK_N,
            True,
        )
        acc, row_max, row_sum = _fold_keys(
            q, q_turned, acc, row_max, row_sum, key, turned, value, start, row_position, qk_scale, True
        )
    mean = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if not SEVERAL:  # noqa: SIM114  (known when compiling: nothing of what follows is compiled in)
        tl.store(out_ptr + place, mean.to(out_ptr.dtype.element_ty), mask=inside)
    elif end == limit:
        tl.store(out_ptr + place, mean.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(mean_ptr + place, mean, mask=inside)
        tl.store(lse_ptr + target, row_max + tl.log2(row_sum), mask=row_in)


def expanded_attention(
    q: Tensor, heads: LatentHeads, kv_cache: Tensor, sequences: Sequences, key_starts: Tensor, scale: float,
    how: ExpandedLaunch, memory: Tensor, kv_scale: Tensor | None = None, first_req: int = 0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend causally with q [T, H, nope_dim + rope_dim], rotated, to the cache [1, num_blocks, block_size, 1, rope_dim
    + latent_dim or more]; return [T, H, v_head_dim], of which the rows of the requests from `first_req` on are written.

    key_starts [prompts + 1] int32 are the sums of the seq_lens of those requests, from 0 on, and `how.keys` (of the
    plan, latent_config.py) is at least the last one. Padding (seq_len 0) gives zeros. An fp8 cache holds numbers /
    kv_scale[0]. `memory` of q's type, which is overwritten, has room for `how.piece` keys.
    """
    num_tokens, num_heads, head_dim = q.shape
    per_head, latent = heads.weight.shape[1:]
    nope, value = heads.nope_dim, per_head - heads.nope_dim
    rope = head_dim - nope
    kept = rope + latent
    if out is None:
        out = torch.empty((num_tokens, num_heads, value), dtype=q.dtype, device=q.device)
    if how.tiles > MOST_TILES:  # as for any step that is too large, a smaller one is planned then
        raise torch.OutOfMemoryError(f"attention over {how.tiles} tiles of queries: a launch holds {MOST_TILES}")
    several, config, end_req = how.keys > how.piece, how.config, len(sequences.rows)
    mean = lse = out
    if several:
        mean = torch.empty((num_tokens, num_heads, value), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    gathered = memory[: how.piece * kept].view(how.piece, kept)
    expanded = memory[how.piece * kept :][: how.piece * num_heads * per_head].view(how.piece, -1)
    weight, prompts = heads.weight.view(-1, latent).t(), end_req - first_req
    of_gather = dict(
        KEPT=kept, BLOCK_K=next_power_of_2(kept), WIDTH=kv_cache.shape[4], ROWS=ROWS_AT_ONCE,
        BLOCK_SIZE=kv_cache.shape[2], QUANTIZED=kv_cache.element_size() == 1, num_warps=4, **overlap(),
    )  # fmt: skip
    constants = dict(
        HEADS=num_heads, NOPE=nope, BLOCK_K=max(16, next_power_of_2(nope)), ROPE=rope,
        BLOCK_R=max(16, next_power_of_2(rope)), VALUE=value, BLOCK_V=max(16, next_power_of_2(value)), KEPT=kept,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, SEVERAL=several, num_warps=config.num_warps,
        num_stages=config.num_stages, **overlap(),
    )  # fmt: skip
    for first in range(0, how.keys, how.piece):
        count = min(how.piece, how.keys - first)
        arguments = (
            gathered, kv_cache, sequences.block_table, sequences.rows, key_starts, kv_scale, first,
            rows_between(kv_cache)[1], sequences.block_table.stride(0), first_req, prompts, (prompts - 1).bit_length(),
        )  # fmt: skip
        launch(_gather_kernel, (-(-count // ROWS_AT_ONCE), 1, 1), arguments, of_gather)
        torch.mm(gathered[:count, rope:], weight, out=expanded[:count])
        attended = (
            out, mean, lse, q, expanded, gathered, sequences.query_start_loc, sequences.seq_lens, key_starts,
            scale * LOG2_E, q.stride(0), first, first + count, first_req, end_req, (prompts - 1).bit_length(),
        )  # fmt: skip
        launch(_expanded_kernel, (num_heads, how.tiles, 1), attended, constants)
    return out


def expanded_attention_reference(
    q: Tensor, heads: LatentHeads, kv_cache: Tensor, sequences: Sequences, scale: float, kv_scale: Tensor | None = None,
    first_req: int = 0,
) -> Tensor:  # fmt: skip
    """Compute it in the queries' type but for sums, with all keys and values of a request at once."""
    nope, latent, block_size = heads.nope_dim, heads.weight.shape[2], kv_cache.shape[2]
    rope, starts = q.shape[2] - nope, sequences.query_start_loc.tolist()
    out = q.new_zeros((*q.shape[:2], heads.weight.shape[1] - nope))
    requests = list(enumerate(zip(sequences.rows.tolist(), sequences.seq_lens.tolist(), strict=True)))
    for request, (row, length) in requests[first_req:]:
        first, last = starts[request], starts[request + 1]
        if length == 0 or first == last:
            continue
        blocks = sequences.block_table[row, : -(-length // block_size)].long()
        stored = (
            kv_cache[0].view(torch.uint8)[blocks].view(kv_cache.dtype) if kv_scale is not None else kv_cache[0, blocks]
        )
        rows = stored.flatten(0, 1)[:length, 0].float()
        rows = (rows if kv_scale is None else rows * kv_scale[0]).to(q.dtype)
        both = (rows[:, rope : rope + latent] @ heads.weight.flatten(0, 1).t()).view(length, q.shape[1], -1).float()
        scores = torch.einsum("qhd,khd->hqk", q[first:last, :, :nope].float(), both[..., :nope])
        scores += torch.einsum("qhd,kd->hqk", q[first:last, :, nope:].float(), rows[:, :rope].float())
        at = torch.arange(length - (last - first), length, device=q.device)[:, None]
        hidden = torch.arange(length, device=q.device) > at
        weights = (scores * scale).masked_fill_(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, both[..., nope:]).to(q.dtype)
    return out
