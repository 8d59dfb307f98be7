"""Computes attention over the paged cache of latents, in the absorbed form of DeepSeek-V2 (arXiv 2405.04434).

A token's row of the cache holds the rotated part of its key, which all heads share, and the latent from which each
head's keys and values would be projected. Queries come projected into the latent's space, so that a tile of the cache
is loaded once for all heads of a program and serves as keys and as values. Prompts are cheaper with each head's own
keys and values: kernels/latent_prompt.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.attention import COMBINED, MOST_TILES, _combine_kernel
from headrace.kernels.attention_config import MAX_SPLITS
from headrace.kernels.attention_tiles import LOG2_E, weigh
from headrace.kernels.fp8_cache import as_float16
from headrace.kernels.latent_config import LatentLaunch, LatentSizes
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, find_request, rows_between


@dataclass(frozen=True)
class LatentHeads:
    """Holds what makes keys and values of a rank's heads out of latents."""

    weight: Tensor
    """# [num_heads, nope_dim + v_head_dim, latent_dim]"""
    nope_dim: int

    def sizes(self, q: Tensor) -> LatentSizes:
        """Return the layer's sizes, given queries # [num_tokens, num_heads, nope_dim + rope_dim]."""
        heads, per_head, latent = self.weight.shape
        return LatentSizes(heads, self.nope_dim, q.shape[2] - self.nope_dim, per_head - self.nope_dim, latent)

    def absorb(self, q: Tensor) -> Tensor:
        """Project the unrotated part of q # [num_tokens, num_heads, nope_dim + rope_dim] into the latent's space;
        return # [num_tokens, num_heads, latent_dim]."""
        to_latent = self.weight[:, : self.nope_dim]
        out = q.new_empty((*q.shape[:2], self.weight.shape[2]))
        torch.bmm(q[..., : self.nope_dim].transpose(0, 1), to_latent, out=out.transpose(0, 1))
        return out

    def values(self, attended: Tensor, out: Tensor | None = None) -> Tensor:
        """Project attention's output # [num_tokens, num_heads, latent_dim], sums of latents, to # [num_tokens,
        num_heads, v_head_dim], which is `out` if given."""
        from_latent = self.weight[:, self.nope_dim :].transpose(1, 2)
        if out is None:
            out = attended.new_empty((*attended.shape[:2], from_latent.shape[2]))
        torch.bmm(attended.transpose(0, 1), from_latent, out=out.transpose(0, 1))
        return out


@triton.jit
def _load_rows(
    start, limit, cache_ptr, blocks_ptr, chosen_ptr, block_rows, WIDTH: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load latents [BLOCK_N, BLOCK_L] and rotated parts [BLOCK_N, BLOCK_R] of the keys from `start` on; tell which
    there are: none from `limit` on, nor where `chosen` is negative. Zeros stand for them."""
    position = start + tl.arange(0, BLOCK_N)
    known = position < limit
    place = position
    if chosen_ptr is not None:
        place = tl.load(chosen_ptr + position, mask=known, other=-1)
        known = place >= 0
        place = tl.maximum(place, 0)
    block = tl.load(blocks_ptr + place // BLOCK_SIZE, mask=known, other=0)
    row = (block * block_rows + place % BLOCK_SIZE).to(tl.uint32).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK_L)
    latent_ptrs = cache_ptr + row[:, None] + (ROPE + column)[None, :]
    latent = tl.load(latent_ptrs, mask=known[:, None] & (column < LATENT)[None, :], other=0.0)
    turned_column = tl.arange(0, BLOCK_R)
    turned_ptrs = cache_ptr + row[:, None] + turned_column[None, :]
    turned = tl.load(turned_ptrs, mask=known[:, None] & (turned_column < ROPE)[None, :], other=0.0)
    return latent, turned, known


@triton.jit
def _fold_rows(
    q, q_turned, power, turned_power, acc, row_max, row_sum, latent, turned, known, start, row_position, qk_scale,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Fold a tile of `_load_rows` into the running softmax; rows see what is `known`, and (CAUSAL) no key
    behind `row_position` # [rows]. `power`s are what q and q_turned were divided by, or None."""
    latent = latent.to(q.dtype)
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    if power is None:
        scores = tl.dot(q_turned, tl.trans(turned.to(q.dtype)), scores, input_precision="ieee") * qk_scale
    else:
        turned_scores = tl.dot(q_turned, tl.trans(turned.to(q.dtype)), input_precision="ieee")
        scores = (scores * power + turned_scores * turned_power) * qk_scale
    visible = known[None, :]
    if CAUSAL:
        visible = visible & ((start + tl.arange(0, latent.shape[0]))[None, :] <= row_position[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    weights, decay, row_max, row_sum = weigh(scores, row_max, row_sum, True)
    acc = tl.dot(weights.to(q.dtype), latent, acc * decay[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["block_rows", "block_table_stride", "num_chosen", "first_req", "num_reqs", "search_steps"]
)
def _latent_kernel(
    out_ptr, parts_ptr, lse_ptr, q_ptr, turned_ptr, cache_ptr, block_table_ptr, rows_ptr, query_start_loc_ptr,
    seq_lens_ptr, chosen_ptr, kv_scale_ptr, qk_scale, turned_stride, turned_head_stride, block_rows, block_table_stride,
    num_chosen, first_req, num_reqs, search_steps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr, QUANTIZED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend; grid (groups of GROUP heads, tiles of queries, splits). Rows of a tile are its queries times the group's
    heads. One split writes `out` [T, HEADS, LATENT]; several write `parts` fp32 [T, HEADS, splits, LATENT] and `lse`
    [T, HEADS, splits]: log2 of the sum of exponentials, -inf where a split has no key. With `chosen` [T, num_chosen] a
    tile has one query, which sees the positions in its row."""
    wait_for_inputs(OVERLAP)
    group = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    BLOCK_Q: tl.constexpr = 1 if DECODE or chosen_ptr is not None else BLOCK_M // GROUP
    ONE_QUERY: tl.constexpr = BLOCK_Q == 1
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
    blocks_ptr = block_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * block_table_stride

    lane = tl.arange(0, BLOCK_M)
    query = tile * BLOCK_Q + lane // GROUP
    head = group * GROUP + lane % GROUP
    row_in = (lane < BLOCK_Q * GROUP) & (query < query_len) & (head < HEADS)
    column = tl.arange(0, BLOCK_L)
    turned_column = tl.arange(0, BLOCK_R)
    token = (query_start + query).to(tl.int64)
    target = token * HEADS + head  # row of [T * HEADS, LATENT]
    inside = row_in[:, None] & (column < LATENT)[None, :]
    q = tl.load(q_ptr + target[:, None] * LATENT + column[None, :], mask=inside, other=0.0)
    turned_ptrs = turned_ptr + (token * turned_stride + head * turned_head_stride)[:, None] + turned_column[None, :]
    q_turned = tl.load(turned_ptrs, mask=row_in[:, None] & (turned_column < ROPE)[None, :], other=0.0)
    power = None
    turned_power = None
    if QUANTIZED:
        qk_scale = qk_scale * tl.load(kv_scale_ptr)
        if q.dtype == tl.bfloat16:  # fp8 becomes float16 in one instruction, bfloat16 in five
            q, power = as_float16(q)
            q_turned, turned_power = as_float16(q_turned)

    first_position = seq_len - query_len + tile * BLOCK_Q
    row_position = seq_len - query_len + query
    limit = tl.minimum(first_position + BLOCK_Q, seq_len)
    if chosen_ptr is not None:
        chosen_ptr += (query_start + tile).to(tl.int64) * num_chosen
        limit = tl.minimum(limit, num_chosen)
    part = tl.cdiv(tl.cdiv(tl.maximum(limit, 0), BLOCK_N), num_splits) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, limit)

    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    sees_keys = begin < end
    for start in range(begin, end, BLOCK_N):
        latent, turned, known = _load_rows(
            start, end, cache_ptr, blocks_ptr, chosen_ptr, block_rows, WIDTH, LATENT, BLOCK_L, ROPE, BLOCK_R, BLOCK_N,
            BLOCK_SIZE,
        )  # fmt: skip
        acc, row_max, row_sum = _fold_rows(
            q, q_turned, power, turned_power, acc, row_max, row_sum, latent, turned, known, start, row_position,
            qk_scale, not ONE_QUERY,
        )  # fmt: skip

    if QUANTIZED:
        acc = acc * tl.load(kv_scale_ptr)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if num_splits == 1:
        tl.store(out_ptr + target[:, None] * LATENT + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        target = target * num_splits + split
        tl.store(lse_ptr + target, tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum)), mask=row_in)
        if sees_keys:
            tl.store(parts_ptr + target[:, None] * LATENT + column[None, :], acc, mask=inside)


def latent_attention(
    q: Tensor, turned: Tensor, kv_cache: Tensor, sequences: Sequences, scale: float, how: LatentLaunch,
    kv_scale: Tensor | None = None, chosen: Tensor | None = None, first_req: int = 0, end_req: int | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend causally to the cache [1, num_blocks, block_size, 1, ROPE + LATENT] with the requests first_req : end_req,
    whose tokens begin at first_req. Return [T, H, LATENT], of which their rows are written.

    q [T, H, LATENT] contiguous are queries in the latent's space, `turned` [T, H, ROPE] their rotated parts. With
    `chosen` [T, n] int32 a query sees the positions of its request that its row lists, in any order; -1 stands behind
    the last one, and of a query at position p only the first p + 1 numbers are read. Padding (seq_len 0) gives zeros.
    An fp8 cache holds numbers / kv_scale[0], fp32 on the device. `how` is the plan's (latent_config.py); launches
    depend on it alone, never on current lengths.
    """
    num_tokens, heads, latent = q.shape
    rope, end_req = turned.shape[2], len(sequences.rows) if end_req is None else end_req
    if out is None:
        out = torch.empty((num_tokens, heads, latent), dtype=q.dtype, device=q.device)
    if not num_tokens or not how.tiles:
        return out
    if how.tiles > MOST_TILES:  # as for any step that is too large, a smaller one is planned then
        raise torch.OutOfMemoryError(f"attention over {how.tiles} tiles of queries: a launch holds {MOST_TILES}")
    config, splits = how.config, how.splits
    parts = lse = out
    if splits > 1:
        rows = end_req if how.decode else num_tokens  # prompts behind decodes would make them as many times larger
        parts = torch.empty((rows, heads, splits, latent), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    block_l = max(16, next_power_of_2(latent))
    arguments = (
        out, parts, lse, q, turned, kv_cache, *sequences, chosen, kv_scale, scale * LOG2_E, *turned.stride()[:2],
        rows_between(kv_cache)[1], sequences.block_table.stride(0), 0 if chosen is None else chosen.shape[1],
        first_req, end_req, (end_req - first_req - 1).bit_length(),
    )  # fmt: skip
    constants = dict(
        HEADS=heads, GROUP=how.group, LATENT=latent, BLOCK_L=block_l, ROPE=rope,
        BLOCK_R=max(16, next_power_of_2(rope)), WIDTH=kv_cache.shape[4], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_SIZE=kv_cache.shape[2], DECODE=how.decode, QUANTIZED=kv_cache.element_size() == 1,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlap(),
    )  # fmt: skip
    launch(_latent_kernel, (-(-heads // how.group), how.tiles, splits), arguments, constants)
    if splits > 1:
        last = end_req if how.decode else num_tokens
        combined = (out[first_req:], parts[first_req:], lse[first_req:], splits)
        constants = dict(
            HEAD_DIM=latent, BLOCK_D=block_l, BLOCK_S=COMBINED, MAX_SPLITS=MAX_SPLITS, num_warps=4, **overlap()
        )
        launch(_combine_kernel, ((last - first_req) * heads, 1, 1), combined, constants)
    return out


def latent_attention_reference(
    q: Tensor, turned: Tensor, kv_cache: Tensor, sequences: Sequences, scale: float, kv_scale: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.zeros_like(q)
    starts, rope, block_size = sequences.query_start_loc.tolist(), turned.shape[2], kv_cache.shape[2]
    scale_of_cache = kv_scale if kv_cache.element_size() == 1 else None
    for request, (row, length) in enumerate(zip(sequences.rows.tolist(), sequences.seq_lens.tolist(), strict=True)):
        first, last = starts[request], starts[request + 1]
        if length == 0 or first == last:
            continue
        blocks = sequences.block_table[row, : -(-length // block_size)].long()
        if scale_of_cache is None:
            keys = kv_cache[0, blocks].flatten(0, 1)[:length, 0].float()
        else:
            stored = kv_cache[0].view(torch.uint8)[blocks].view(kv_cache.dtype)
            keys = stored.flatten(0, 1)[:length, 0].float() * scale_of_cache[0]
        values = keys[:, rope : rope + q.shape[2]]
        scores = torch.einsum("qhl,kl->hqk", q[first:last].float(), values)
        scores += torch.einsum("qhr,kr->hqk", turned[first:last].float(), keys[:, :rope])
        at = torch.arange(length - (last - first), length, device=q.device)[:, None]
        hidden = torch.arange(length, device=q.device) > at
        if chosen is not None:
            of_request = chosen[first:last].long()
            columns = torch.arange(chosen.shape[1], device=q.device)
            listed = torch.where((of_request >= 0) & (columns <= at), of_request, length)
            hidden = torch.ones(last - first, length + 1, dtype=torch.bool, device=q.device)
            hidden = hidden.scatter_(1, listed, False)[:, :length]
        weights = (scores * scale).masked_fill_(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,kl->qhl", weights, values).to(q.dtype)
    return out
