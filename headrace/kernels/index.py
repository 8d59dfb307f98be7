"""Chooses the keys that a query of sparse attention reads (DeepSeek-V3.2, arXiv 2512.02556): scores all keys before it
by a small index, and keeps the best.

Heads of the index share one key a token, which lies in a paged cache of its own beside the latents. The score of a key
is the sum over heads of weight * relu(query . key); factors that all keys share would change no order, and are left
out. Chosen keys are named by their positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.latent_config import SELECTED
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, by_row, find_request, rows_between, rows_of

MOST_ROWS = 256
"""heads of neighbouring queries that one product scores"""
KEYS = 128
"""keys of a tile"""
MOST_PROGRAMS = 1024
"""Where there are few queries, so many programs share their keys."""
SELECTING_WARPS = 8
"""warps that look at a chunk of SELECTED scores"""
_REFERENCE_NUMBERS = 1 << 24
"""products of heads that the reference holds at once"""


@triton.jit(
    do_not_specialize=["first_token", "count", "first_tile", "num_reqs", "search_steps", "block_rows", "splits"]
)
def _index_scores_kernel(
    out_ptr,
    q_ptr,
    weights_ptr,
    cache_ptr,
    block_table_ptr,
    rows_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    first_token,
    count,
    first_tile,
    num_reqs,
    search_steps,
    block_rows,
    splits,
    out_stride,
    weights_stride,
    table_stride,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK_Q queries of one request, and every `splits`-th tile of their keys."""
    wait_for_inputs(OVERLAP)
    tile = tl.program_id(0) + first_tile
    if DECODE:
        request = tile
        query_start = tile
        query_len = 1
        tile = 0
    else:
        request, query_start, query_len, tile = find_request(
            tile, query_start_loc_ptr, 0, num_reqs, search_steps, BLOCK_Q
        )
    seq_len = tl.load(seq_lens_ptr + request)
    place = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)  # among the request's queries
    token = query_start + place
    wanted = (place < query_len) & (token >= first_token) & (token < first_token + count)
    visible = tl.where(wanted, seq_len - query_len + place + 1, 0)
    most = tl.max(visible, axis=0)
    if most > TOP_K:
        lane = tl.arange(0, BLOCK_Q * BLOCK_H)
        head = lane % BLOCK_H
        of_query = tile * BLOCK_Q + lane // BLOCK_H
        lane_in = (head < HEADS) & (of_query < query_len)
        lane_token = (query_start + of_query).to(tl.int64)
        dim = tl.arange(0, BLOCK_D)
        q = tl.load(
            q_ptr + (lane_token * HEADS + head)[None, :] * DIM + dim[:, None],
            mask=lane_in[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        weights = tl.load(weights_ptr + lane_token * weights_stride + head, mask=lane_in, other=0.0).to(tl.float32)
        table = block_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
        target = out_ptr + (token - first_token).to(tl.int64) * out_stride
        for start in range(tl.program_id(1) * BLOCK_N, most, splits * BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            key_in = key < most
            block = tl.load(table + key // BLOCK_SIZE, mask=key_in, other=0).to(tl.int64)
            row = block * block_rows + key % BLOCK_SIZE
            keys = tl.load(
                cache_ptr + row[:, None] * DIM + dim[None, :], mask=key_in[:, None] & (dim < DIM)[None, :], other=0.0
            )
            products = tl.dot(keys.to(q.dtype), q, input_precision="ieee")
            products = tl.maximum(products, 0.0) * weights[None, :]
            scores = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_Q, BLOCK_H]), axis=2)
            scores = tl.where(scores == 0.0, 0.0, scores)  # there is one zero
            tl.store(target[None, :] + key[:, None], scores, mask=key[:, None] < visible[None, :])


def index_scores(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    sequences: Sequences,
    out: Tensor,
    first_token: int,
    top_k: int,
    decodes: bool,
) -> Tensor:
    """Write to `out` [count, most keys] fp32 the scores of the keys that queries first_token : first_token + count see,
    by the keys' positions, and return it. Queries with at most `top_k` keys may get none, and what lies behind a
    query's own key is not written.

    q [T, heads, dim] and index_keys [1, num_blocks, block_size, 1, dim] are rotated; weights [T, heads] may be a view.
    `decodes`: each request has one query.
    """
    count, (_, heads, dim) = len(out), q.shape
    num_reqs = sequences.rows.shape[0]
    block_h = max(16, next_power_of_2(heads))
    block_q = 1 if decodes else max(1, MOST_ROWS // block_h)
    first_tile = first_token if decodes else max(0, first_token // block_q - 1)
    tiles = count if decodes else (first_token + count - 1) // block_q + num_reqs - first_tile
    splits = max(1, min(-(-out.shape[1] // KEYS), MOST_PROGRAMS // tiles))
    arguments = (
        out, q, weights, index_keys, *sequences, first_token, count, first_tile, num_reqs, num_reqs.bit_length(),
        rows_between(index_keys)[1], splits, out.stride(0), weights.stride(0), sequences.block_table.stride(0),
    )  # fmt: skip
    constants = dict(
        TOP_K=top_k, HEADS=heads, BLOCK_H=block_h, DIM=dim, BLOCK_D=max(16, next_power_of_2(dim)), BLOCK_Q=block_q,
        BLOCK_N=KEYS, BLOCK_SIZE=index_keys.shape[2], DECODE=decodes, num_warps=8, num_stages=3, **overlap(),
    )  # fmt: skip
    launch(_index_scores_kernel, (tiles, splits, 1), arguments, constants)
    return out


def index_scores_reference(
    q: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    sequences: Sequences,
    out: Tensor,
    first_token: int,
    top_k: int,
    decodes: bool,
) -> Tensor:
    """Do what `index_scores` does, for all queries; behind a query's own key is -inf."""
    out.fill_(-torch.inf)
    size, flat = index_keys.shape[2], by_row(index_keys)[0, :, 0]
    starts, lengths, rows = (x.tolist() for x in (sequences.query_start_loc, sequences.seq_lens, sequences.rows))
    for start, end, length, row in zip(starts, starts[1:], lengths, rows, strict=False):
        first, last = max(start, first_token), min(end, first_token + len(out))
        if first >= last or length == 0:
            continue
        places = torch.arange(length, device=q.device)
        slots = sequences.block_table[row, places // size].long() * size + places % size
        keys = flat[rows_of(index_keys, slots)].float()  # [length, dim]
        step = max(1, _REFERENCE_NUMBERS // (q.shape[1] * length))
        for low in range(first, last, step):
            some = slice(low, min(low + step, last))
            products = (q[some].float() @ keys.T).relu_()  # [queries, heads, length]
            scores = torch.bmm(weights[some].float().unsqueeze(1), products).squeeze(1) + 0.0
            own = torch.arange(low, some.stop, device=q.device) - end + length
            out[low - first_token : some.stop - first_token, :length] = scores.masked_fill_(
                places > own[:, None], -torch.inf
            )
    return out


@triton.jit
def _ordered(scores):
    """Return uint32 numbers that are ordered as the fp32 `scores` are."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def _byte_of_edge(counts_ptr, num_chunks, chunk, wanted):
    """Return the byte of the lowest score that is kept, given how many scores of each chunk have which byte; how many
    scores have a higher one; and the counts of all chunks before `chunk` together."""
    bins = tl.arange(0, 256)
    counts = tl.zeros([256], tl.int32)
    before = tl.zeros([256], tl.int32)
    for start in range(0, num_chunks, 16):
        some = start + tl.arange(0, 16)
        held = tl.load(counts_ptr + some[:, None] * 256 + bins[None, :], mask=some[:, None] < num_chunks, other=0)
        counts += tl.sum(held, axis=0)
        before += tl.sum(tl.where(some[:, None] < chunk, held, 0), axis=0)
    higher = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    byte = tl.sum((higher >= wanted).to(tl.int32), axis=0)
    return byte, tl.sum(tl.where(bins == byte, higher, 0), axis=0), before


@triton.jit(do_not_specialize=["first_token", "num_reqs", "search_steps"])
def _top_keys_kernel(
    out_ptr,
    scores_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    counts_ptr,
    edges_ptr,
    above_ptr,
    first_token,
    num_reqs,
    search_steps,
    scores_stride,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PASS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the lowest score that is kept, byte by byte: a pass reads off one byte, and counts scores by the next. The
    last pass gathers keys. One program: one query and one chunk of its keys."""
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    rows = tl.num_programs(0)
    token = first_token + tl.program_id(0)
    request = 0
    high = num_reqs
    for _ in range(search_steps):  # the last request that begins at the token or before
        middle = (request + high) // 2
        before_it = tl.load(query_start_loc_ptr + middle) <= token
        request = tl.where(before_it, middle, request)
        high = tl.where(before_it, high, middle)
    visible = tl.load(seq_lens_ptr + request) - tl.load(query_start_loc_ptr + request + 1) + token + 1
    target = out_ptr + place * TOP_K
    key = chunk * CHUNK + tl.arange(0, CHUNK)
    if visible <= TOP_K:
        if PASS == 4:
            for start in range(chunk * CHUNK, TOP_K, chunks * CHUNK):
                some = start + tl.arange(0, CHUNK)
                tl.store(target + some, tl.where(some < visible, some, -1), mask=some < TOP_K)
    elif chunk * CHUNK < visible:
        num_chunks = (visible + CHUNK - 1) // CHUNK
        ordered = _ordered(tl.load(scores_ptr + place * scores_stride + key, mask=key < visible, other=0.0))
        inside = key < visible
        if PASS > 0:
            # what the passes before know: the first bytes of the lowest score that is kept, how many keys are wanted of
            # those whose scores begin with them, and how many of each chunk are above
            edge = 0
            wanted = TOP_K
            above = above_ptr + place * chunks
            if PASS > 1:
                known = edges_ptr + ((PASS - 2) * rows + place) * 2
                edge = tl.load(known)
                wanted = tl.load(known + 1)
            read = counts_ptr + ((PASS - 1) % 2 * rows + place) * chunks * 256
            byte, higher, before = _byte_of_edge(read, num_chunks, chunk, wanted)
            edge = (edge << 8) | byte
            wanted -= higher
            bins = tl.arange(0, 256)
            if PASS < 4:
                own = tl.load(read + chunk * 256 + bins)
                own_above = tl.sum(tl.where(bins > byte, own, 0), axis=0)
                if PASS > 1:
                    own_above += tl.load(above + chunk)
                tl.store(above + chunk, own_above)
                if chunk == 0:
                    known = edges_ptr + ((PASS - 1) * rows + place) * 2
                    tl.store(known, edge)
                    tl.store(known + 1, wanted)
                inside &= (ordered >> (32 - 8 * PASS)).to(tl.int32, bitcast=True) == edge
            else:
                lowest = edge.to(tl.uint32, bitcast=True)
                kept = tl.sum(tl.where(bins > byte, before, 0), axis=0)
                for start in range(0, chunk, 256):
                    kept += tl.sum(tl.load(above + start + bins, mask=start + bins < chunk, other=0), axis=0)
                ties = tl.sum(tl.where(bins == byte, before, 0), axis=0)
                kept += tl.minimum(ties, wanted)
                tie = inside & (ordered == lowest)
                rank = ties + tl.cumsum(tie.to(tl.int32), axis=0)
                keep = (inside & (ordered > lowest)) | (tie & (rank <= wanted))
                tl.store(target + kept + tl.cumsum(keep.to(tl.int32), axis=0) - 1, key, mask=keep)
        if PASS < 4:
            digits = ((ordered >> (24 - 8 * PASS)) & 255).to(tl.int32)
            write = counts_ptr + ((PASS % 2 * rows + place) * chunks + chunk) * 256 + tl.arange(0, 256)
            tl.store(write, tl.histogram(digits, 256, mask=inside))


def top_keys(scores: Tensor, sequences: Sequences, out: Tensor, first_token: int) -> Tensor:
    """Write to `out` [count, top_k] int32 the positions of the `top_k` keys with the highest of `scores` [count, most
    keys] for each of the queries from first_token on, and return it. They are in ascending order, and of keys with
    equal scores the first ones are kept. A query that sees fewer keys gets all of them, then -1."""
    num_reqs, rows, chunks = sequences.rows.shape[0], len(out), -(-scores.shape[1] // SELECTED)
    sizes = (2 * rows * chunks * 256, 3 * rows * 2, rows * chunks)
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=out.device).split_with_sizes(sizes)
    arguments = (
        out, scores, sequences.query_start_loc, sequences.seq_lens, *scratch, first_token, num_reqs,
        num_reqs.bit_length(), scores.stride(0),
    )  # fmt: skip
    for number in range(5):
        constants = dict(TOP_K=out.shape[1], CHUNK=SELECTED, PASS=number, num_warps=SELECTING_WARPS, **overlap())
        launch(_top_keys_kernel, (rows, chunks, 1), arguments, constants)
    return out


def top_keys_reference(scores: Tensor, sequences: Sequences, out: Tensor, first_token: int) -> Tensor:
    (count, top_k), device = out.shape, scores.device
    tokens = torch.arange(first_token, first_token + count, device=device)
    request = torch.searchsorted(sequences.query_start_loc[1:], tokens, right=True)
    visible = (sequences.seq_lens[request] - sequences.query_start_loc[request + 1] + tokens + 1)[:, None]
    most = max(top_k, scores.shape[1])
    places, scores = torch.arange(most, device=device), functional.pad(scores, (0, most - scores.shape[1]))
    best = scores.masked_fill(places >= visible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    chosen = torch.where(visible <= top_k, places[:top_k], best[:, :top_k].sort(dim=1).values)
    return out.copy_(torch.where(chosen < visible, chosen, -1))
