"""Computes prompts, or chunks of them, of a gated delta-net (gated_delta.py) by products of matrices.

Within a chunk of 64 tokens the state after each token follows from the state before the chunk by one triangular system
(the WY form of arXiv 2406.06484, with decays as in 2412.06464). With G the sum of the logs of decays from the chunk's
beginning, and A[i, j] = beta_i (k_i k_j) exp(G_i - G_j) for j < i, T = (I + A)^-1 gives u = T (beta v) and
w = T (beta exp(G) k). Then, with S the state before the chunk, the values that are written are n = u - w S, the outputs
(exp(G) q) S + P n with P[i, j] = (q_i k_j) exp(G_i - G_j) for j <= i, and the state after it is
exp(G_last) S + sum_j exp(G_last - G_j) k_j n_j^T. One kernel computes all chunks' u, w, P and scaled q and k at once,
the next goes through each request's chunks in turn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, next_power_of_2, tl, triton
from headrace.kernels.gated_delta import (
    DeltaHeads,
    DeltaWeights,
    convolved,
    delta_steps,
    gated_norm,
    gates,
    inverse_length,
    normed_and_gated,
    queries_keys_values,
    sizes_of,
    taken_apart,
    within,
)
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, find_request

CHUNK = 64
SUB = 16
"""Tokens of the blocks on the diagonal of A that are inverted row by row"""
TOKENS = 16
"""Tokens of a program that convolves or norms outputs"""
WIDTH = 128
"""Channels of a program that convolves or keeps a window"""
WARPS = {"cuda": 8, "hip": 4}
"""of a program that prepares a chunk: AMD's have twice the threads"""
COLUMNS = {"cuda": 32, "hip": 16}
"""of a state that a program of the scan holds: with more, AMD's scalar registers run out"""
OF_CHANNELS = (
    "TAPS", "SLOTS", "KEY_HEADS", "GROUP", "KEY_DIM", "VALUE_DIM", "Q", "K", "V", "KEYS_APART", "VALUES_APART",
)  # fmt: skip
OF_CHUNKS = ("KEY_HEADS", "GROUP", "KEY_DIM", "VALUE_DIM", "BLOCK_K", "BLOCK_V", "B", "A", "GATES_APART")
"""What kernels that do so, and those that prepare chunks, are compiled for, of `sizes_of`"""


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + below, which is strictly lower triangular # [CHUNK, CHUNK].

    Blocks on the diagonal are solved row by row, since a sum of powers would cancel where keys are alike. The rest is
    the sum of the powers of a matrix of BLOCKS x BLOCKS blocks that is strictly lower triangular too.
    """
    BLOCKS: tl.constexpr = CHUNK // SUB
    of_row = tl.arange(0, BLOCKS)[:, None, None, None]
    of_column = tl.arange(0, BLOCKS)[None, None, :, None]
    blocks = tl.reshape(below, [BLOCKS, SUB, BLOCKS, SUB])
    diagonal = tl.sum(tl.where(of_row == of_column, blocks, 0.0), axis=2)  # [BLOCKS, SUB, SUB]
    row = tl.arange(0, SUB)[None, :, None]
    column = tl.arange(0, SUB)[None, None, :]
    solved = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCKS, SUB, SUB], tl.float32)
    for step in range(SUB - 1):  # row `step` is done: take its part from the rows below
        factor = tl.sum(tl.where(column == step, diagonal, 0.0), axis=2)
        done = tl.sum(tl.where(row == step, solved, 0.0), axis=1)
        solved -= factor[:, :, None] * done[:, None, :]
    wide = tl.where(of_row == of_column, solved[:, :, None, :], 0.0)
    inverses = tl.reshape(wide, [CHUNK, CHUNK])
    rest = tl.reshape(tl.where(of_row == of_column, 0.0, blocks), [CHUNK, CHUNK])
    once = -tl.dot(inverses, rest, input_precision=PRECISION)
    power, total = once, inverses
    result = inverses + tl.dot(once, inverses, input_precision=PRECISION)
    for _ in tl.static_range(BLOCKS - 2):
        power = tl.dot(power, once, input_precision=PRECISION)
        result += tl.dot(power, total, input_precision=PRECISION)
    return result


@triton.jit
def _column_of(
    channel, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS_APART: tl.constexpr, VALUES_APART: tl.constexpr,
):  # fmt: skip
    """Return where channels of the convolution are in a row of the projections."""
    ALL_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = GROUP * VALUE_DIM
    of_key = channel % ALL_KEYS
    key = tl.where(channel < ALL_KEYS, Q, K) + of_key // KEY_DIM * KEYS_APART + of_key % KEY_DIM
    of_value = channel - 2 * ALL_KEYS
    value = V + of_value // VALUES * VALUES_APART + of_value % VALUES
    return tl.where(channel < 2 * ALL_KEYS, key, value)


@triton.jit(do_not_specialize=["block_table_stride", "first_req", "num_reqs", "search_steps"])
def _convolve_kernel(
    mixed_ptr, projected_ptr, states_ptr, conv_ptr, block_table_ptr, rows_ptr, query_start_loc_ptr, seq_lens_ptr,
    token_stride, state_stride, block_table_stride, first_req, num_reqs, search_steps, STATE: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SLOTS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS_APART: tl.constexpr, VALUES_APART: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the channels of TOKENS tokens behind the convolution; grid (tiles of tokens, blocks of channels)."""
    request, query_start, query_len, tile = find_request(
        tl.program_id(0), query_start_loc_ptr, first_req, num_reqs, search_steps, TOKENS
    )
    seq_len = tl.load(seq_lens_ptr + request)
    if (tile * TOKENS >= query_len) | (seq_len == 0):
        return
    block = tl.load(block_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * block_table_stride)
    lane = tl.arange(0, TOKENS)
    place = tile * TOKENS + lane
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    column = _column_of(channel, KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, Q, K, V, KEYS_APART, VALUES_APART)
    first = (query_start + tile * TOKENS).to(tl.int64)
    mixed = convolved(
        projected_ptr + first * token_stride, states_ptr + block.to(tl.int64) * state_stride + STATE, conv_ptr, column,
        channel, inside, lane, place, seq_len - query_len + place, place < query_len, token_stride, CHANNELS, TAPS,
        SLOTS,
    )  # fmt: skip
    mixed_ptrs = mixed_ptr + first * CHANNELS + lane[:, None] * CHANNELS + channel[None, :]
    tl.store(mixed_ptrs, mixed.to(mixed_ptr.dtype.element_ty), mask=(place < query_len)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_req", "num_reqs", "search_steps"])
def _delta_chunks_kernel(
    u_ptr, w_ptr, p_ptr, q_ptr, k_ptr, decay_ptr, mixed_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, query_start_loc_ptr,
    seq_lens_ptr, gates_stride, first_req, num_reqs, search_steps, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, B: tl.constexpr,
    A: tl.constexpr, GATES_APART: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Prepare a chunk of one value head; grid (chunks, value heads). What it writes # [chunks, value heads, CHUNK, n]
    is u, w, P, exp(G) q and exp(G_last - G) k as the file's beginning says, and exp(G_last) # [chunks, value heads]."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // GROUP
    VALUE_HEADS: tl.constexpr = KEY_HEADS * GROUP
    ALL_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * ALL_KEYS + VALUE_HEADS * VALUE_DIM
    request, query_start, query_len, of_request = find_request(
        chunk, query_start_loc_ptr, first_req, num_reqs, search_steps, CHUNK
    )
    if (of_request * CHUNK >= query_len) | (tl.load(seq_lens_ptr + request) == 0):
        return
    lane = tl.arange(0, CHUNK)
    count = tl.minimum(query_len - of_request * CHUNK, CHUNK)
    live = lane < count
    row = tl.minimum(
        lane, count - 1
    )  # behind the last token is the last one again, which beta = 0 leaves without effect
    first = (query_start + of_request * CHUNK).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    value = tl.arange(0, BLOCK_V)
    in_key = within(key, KEY_DIM, BLOCK_K)[None, :]
    mixed_ptr += first * CHANNELS
    key_ptrs = mixed_ptr + row[:, None] * CHANNELS + (key_head * KEY_DIM + key)[None, :]
    q = tl.load(key_ptrs, mask=in_key, other=0.0)
    k = tl.load(key_ptrs + ALL_KEYS, mask=in_key, other=0.0)
    # lengths are divided out behind products, which are then exact
    q_scale = inverse_length(q.to(tl.float32)) * KEY_DIM**-0.5
    k_scale = inverse_length(k.to(tl.float32))

    gates_ptr += first * gates_stride + key_head * GATES_APART + head % GROUP
    b = tl.load(gates_ptr + row * gates_stride + B)
    a = tl.load(gates_ptr + row * gates_stride + A)
    log_decay, beta = gates(b, a, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head))
    log_decay = tl.where(live, log_decay, 0.0)
    beta = tl.where(live, beta, 0.0)
    total = tl.cumsum(log_decay, axis=0)
    whole = tl.sum(log_decay, axis=0)
    decays = tl.where(lane[:, None] >= lane[None, :], total[:, None] - total[None, :], float("-inf"))
    decays = tl.exp(decays) * k_scale[None, :]

    out = chunk.to(tl.int64) * VALUE_HEADS + head
    pairs = lane[:, None] * CHUNK + lane[None, :]
    keys = lane[:, None] * BLOCK_K + key[None, :]
    kind: tl.constexpr = u_ptr.dtype.element_ty
    inner = tl.dot(q, tl.trans(k), input_precision="ieee") * decays * q_scale[:, None]
    tl.store(p_ptr + out * (CHUNK * CHUNK) + pairs, inner.to(kind))
    keys_out = out * (CHUNK * BLOCK_K)
    tl.store(q_ptr + keys_out + keys, (q.to(tl.float32) * (q_scale * tl.exp(total))[:, None]).to(kind))
    tl.store(k_ptr + keys_out + keys, (k.to(tl.float32) * (k_scale * tl.exp(whole - total))[:, None]).to(kind))
    tl.store(decay_ptr + out, tl.exp(whole))

    below = tl.dot(k, tl.trans(k), input_precision="ieee") * decays * (beta * k_scale)[:, None]
    inverse = _inverse(tl.where(lane[:, None] > lane[None, :], below, 0.0), CHUNK, SUB, PRECISION)
    of_keys = (inverse * (beta * k_scale * tl.exp(total))[None, :]).to(kind)
    tl.store(w_ptr + keys_out + keys, tl.dot(of_keys, k, input_precision="ieee").to(kind))
    value_ptrs = mixed_ptr + row[:, None] * CHANNELS + (2 * ALL_KEYS + head * VALUE_DIM + value)[None, :]
    v = tl.load(value_ptrs, mask=within(value, VALUE_DIM, BLOCK_V)[None, :], other=0.0)
    of_values = (inverse * beta[None, :]).to(kind)
    values = out * (CHUNK * BLOCK_V) + lane[:, None] * BLOCK_V + value[None, :]
    tl.store(u_ptr + values, tl.dot(of_values, v, input_precision="ieee").to(kind))


@triton.jit(do_not_specialize=["block_table_stride", "first_req"])
def _delta_scan_kernel(
    out_ptr, u_ptr, w_ptr, p_ptr, q_ptr, k_ptr, decay_ptr, states_ptr, block_table_ptr, rows_ptr, query_start_loc_ptr,
    seq_lens_ptr, state_stride, block_table_stride, first_req, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE_V: tl.constexpr, CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Go through a request's chunks for some columns of one value head's state; grid (tiles of columns, value heads,
    requests). Writes outputs before their norm; padding's are zero. Where there are several SLOTS, requests of so many
    tokens are left out."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = first_req + tl.program_id(2)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    if query_len <= (SLOTS if SLOTS > 1 else 0):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    block = tl.load(block_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * block_table_stride)
    first = (query_start - first_req) // CHUNK + request - first_req
    key = tl.arange(0, BLOCK_K)
    value = tile * TILE_V + tl.arange(0, TILE_V)
    lane = tl.arange(0, CHUNK)
    in_value = within(value, VALUE_DIM, TILE_V)
    inside = within(key, KEY_DIM, BLOCK_K)[:, None] & in_value[None, :]
    state_ptrs = states_ptr + block.to(tl.int64) * state_stride
    state_ptrs += (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    state = tl.zeros([BLOCK_K, TILE_V], tl.float32)
    SIZE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    if seq_len > query_len:
        state = tl.load(state_ptrs + (seq_len - query_len - 1) % SLOTS * SIZE, mask=inside, other=0.0)
    kind: tl.constexpr = u_ptr.dtype.element_ty
    keys = lane[:, None] * BLOCK_K + key[None, :]
    out_ptr += (query_start.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM
    out_ptrs = out_ptr + lane[:, None] * (VALUE_HEADS * VALUE_DIM) + value[None, :]
    chunks = tl.cdiv(query_len, CHUNK)
    if seq_len == 0:  # padding, apart: Triton 3.6 compiles products under a condition wrongly for 9.0
        for number in range(chunks):
            mask = (lane < query_len - number * CHUNK)[:, None] & in_value[None, :]
            tl.store(out_ptrs, tl.zeros([CHUNK, TILE_V], out_ptr.dtype.element_ty), mask=mask)
            out_ptrs += CHUNK * VALUE_HEADS * VALUE_DIM
        return
    for number in range(chunks):
        chunk = tl.cast(first + number, tl.int64) * VALUE_HEADS + head
        w = tl.load(w_ptr + chunk * (CHUNK * BLOCK_K) + keys)
        q = tl.load(q_ptr + chunk * (CHUNK * BLOCK_K) + keys)
        k = tl.load(k_ptr + chunk * (CHUNK * BLOCK_K) + keys)
        u = tl.load(u_ptr + chunk * (CHUNK * BLOCK_V) + lane[:, None] * BLOCK_V + value[None, :])
        p = tl.load(p_ptr + chunk * (CHUNK * CHUNK) + lane[:, None] * CHUNK + lane[None, :])
        narrow = state.to(kind)
        new = (u.to(tl.float32) - tl.dot(w, narrow, input_precision="ieee")).to(kind)
        out = tl.dot(p, new, tl.dot(q, narrow, input_precision="ieee"), input_precision="ieee")
        state = tl.dot(tl.trans(k), new, state * tl.load(decay_ptr + chunk), input_precision="ieee")
        mask = (lane < query_len - number * CHUNK)[:, None] & in_value[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        out_ptrs += CHUNK * VALUE_HEADS * VALUE_DIM
    tl.store(state_ptrs + (seq_len - 1) % SLOTS * SIZE, state, mask=inside)


@triton.jit(do_not_specialize=["first_row", "end_row"])
def _gated_norm_kernel(
    out_ptr, projected_ptr, norm_ptr, eps, token_stride, first_row, end_row, VALUE_HEADS: tl.constexpr,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, Z: tl.constexpr, VALUES_APART: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Norm outputs in place, times silu(z); grid (tiles of tokens, value heads)."""
    head = tl.program_id(1)
    row = (first_row + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    value = tl.arange(0, BLOCK_V)
    in_value = within(value, VALUE_DIM, BLOCK_V)
    mask = (row < end_row)[:, None] & in_value[None, :]
    out_ptrs = out_ptr + (row * VALUE_HEADS + head)[:, None] * VALUE_DIM + value[None, :]
    z_ptrs = projected_ptr + (row * token_stride)[:, None] + value[None, :]
    z_ptrs += Z + head // GROUP * VALUES_APART + head % GROUP * VALUE_DIM
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + value, mask=in_value, other=0.0).to(tl.float32)
    tl.store(out_ptrs, gated_norm(out, z, weight[None, :], eps, VALUE_DIM).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["block_table_stride", "first_req"])
def _keep_window_kernel(
    states_ptr, projected_ptr, block_table_ptr, rows_ptr, query_start_loc_ptr, seq_lens_ptr, token_stride, state_stride,
    block_table_stride, first_req, STATE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    SLOTS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS_APART: tl.constexpr, VALUES_APART: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keep the channels of a request's latest tokens, as projected; grid (blocks of channels, requests). It is a launch
    of its own, since convolutions of the same step read what it overwrites."""
    request = first_req + tl.program_id(1)
    query_start = tl.load(query_start_loc_ptr + request)
    query_end = tl.load(query_start_loc_ptr + request + 1)
    seq_len = tl.load(seq_lens_ptr + request)
    block = tl.load(block_table_ptr + tl.load(rows_ptr + request).to(tl.int64) * block_table_stride)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    column = _column_of(channel, KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, Q, K, V, KEYS_APART, VALUES_APART)
    back = tl.arange(0, TOKENS)
    RING: tl.constexpr = TAPS + SLOTS - 1
    kept = (back < RING) & (query_end - 1 - back >= query_start) & (seq_len + 0 * back > 0)
    mask = kept[:, None] & (channel < CHANNELS)[None, :]
    projected_ptr += (query_end - 1).to(tl.int64) * token_stride
    new = tl.load(projected_ptr + (-back * token_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    states_ptr += block.to(tl.int64) * state_stride + STATE
    place = (seq_len - 1 - back) % RING * CHANNELS
    tl.store(states_ptr + place[:, None] + channel[None, :], new.to(tl.float32), mask=mask)


def gated_delta_scan(
    projected: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    states: Tensor,
    sequences: Sequences,
    first_req: int = 0,
    out: Tensor | None = None,
    in_turn: bool = False,
) -> Tensor:
    """Compute the tokens of all requests from `first_req` on, before which each request has one token; else this is
    `gated_delta_step`, to any number of tokens of a request. `in_turn`: one token after the other, so that its result
    does not depend on how its prompt is cut into steps. Rows of `out` before `first_req` are left as they are. Of
    requests with at most `heads.slots` tokens, or `in_turn`, the states behind all of them are kept, else behind the
    last alone."""
    num_tokens, num_reqs = len(projected), len(sequences.rows) - first_req
    if out is None:
        out = projected.new_empty((num_tokens, heads.value_heads * heads.value_dim))
    if num_tokens <= first_req or num_reqs <= 0:
        return out
    sizes, (table, rows, starts, lengths) = sizes_of(heads), sequences
    channels = {"STATE": heads.slots * heads.state_size, "CHANNELS": heads.channels, "WIDTH": WIDTH, "num_warps": 4}
    channels |= {name: sizes[name] for name in OF_CHANNELS}
    strides = (projected.stride(0), states.stride(0), table.stride(0), first_req)
    if not in_turn:
        mixed = projected.new_empty((num_tokens, heads.channels))
        all_reqs = len(rows), (num_reqs - 1).bit_length()
        blocks = -(-heads.channels // WIDTH)
        arguments = (mixed, projected, states, weights.conv, *sequences, *strides, *all_reqs)
        tiles = (num_tokens - first_req) // TOKENS + num_reqs
        launch(_convolve_kernel, (tiles, blocks, 1), arguments, {**channels, "TOKENS": TOKENS})
        _scan_chunks(mixed, gates, heads, weights, states, sequences, first_req, out)
        of_norm = (out, projected, weights.norm, weights.eps, projected.stride(0), first_req, num_tokens)
        own = {name: sizes[name] for name in ("GROUP", "VALUE_DIM", "BLOCK_V", "Z", "VALUES_APART")}
        own |= {"VALUE_HEADS": heads.value_heads, "TOKENS": TOKENS, "num_warps": 4}
        launch(_gated_norm_kernel, (-(-(num_tokens - first_req) // TOKENS), heads.value_heads, 1), of_norm, own)
    if in_turn or heads.slots > 1:
        behind = Sequences(table, rows[first_req:], starts[first_req:], lengths[first_req:])
        delta_steps(projected, gates, heads, weights, states, behind, out, many=True, short=not in_turn)
    keywords = {**channels, "TOKENS": next_power_of_2(heads.ring)}
    kept = (states, projected, *sequences, *strides)
    launch(_keep_window_kernel, (-(-heads.channels // WIDTH), num_reqs, 1), kept, keywords)
    return out


def _scan_chunks(
    mixed: Tensor, gates: Tensor, heads: DeltaHeads, weights: DeltaWeights, states: Tensor, sequences: Sequences,
    first_req: int, out: Tensor,
) -> None:  # fmt: skip
    """Write outputs before their norm, and states, given the channels behind the convolution."""
    num_reqs, sizes, count = len(sequences.rows) - first_req, sizes_of(heads), heads.value_heads
    chunks = (len(mixed) - first_req) // CHUNK + num_reqs
    block_k, block_v = sizes["BLOCK_K"], sizes["BLOCK_V"]
    made = [mixed.new_empty((chunks, count, CHUNK, n)) for n in (block_v, block_k, CHUNK, block_k, block_k)]
    decays = torch.empty((chunks, count), dtype=torch.float32, device=mixed.device)
    arguments = (
        *made, decays, mixed, gates, weights.a_log, weights.dt_bias, sequences.query_start_loc, sequences.seq_lens,
        gates.stride(0), first_req, len(sequences.rows), (num_reqs - 1).bit_length(),
    )  # fmt: skip
    precision = "tf32" if DEVICE_FAMILY == "cuda" and mixed.dtype != torch.float32 else "ieee"
    keywords: dict[str, Any] = {name: sizes[name] for name in OF_CHUNKS}
    keywords |= {"CHUNK": CHUNK, "SUB": SUB, "PRECISION": precision, "num_warps": WARPS[DEVICE_FAMILY]}
    launch(_delta_chunks_kernel, (chunks, count, 1), arguments, keywords)
    tile = min(block_v, COLUMNS[DEVICE_FAMILY])
    of_scan = (out, *made, decays, states, *sequences, states.stride(0), sequences.block_table.stride(0), first_req)
    keywords = {name: sizes[name] for name in ("KEY_DIM", "VALUE_DIM", "BLOCK_K", "BLOCK_V", "SLOTS")}
    keywords |= {"VALUE_HEADS": count, "TILE_V": tile, "CHUNK": CHUNK, "num_warps": 4}
    if mixed.dtype == torch.float32:  # which has no room in shared memory for what is read ahead
        keywords["num_stages"] = 1
    launch(_delta_scan_kernel, (-(-heads.value_dim // tile), count, num_reqs), of_scan, keywords)


# ---- reference


def gated_delta_scan_reference(
    projected: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    states: Tensor,
    sequences: Sequences,
    first_req: int = 0,
    out: Tensor | None = None,
    in_turn: bool = False,
) -> Tensor:
    if out is None:
        out = projected.new_empty((len(projected), heads.value_heads * heads.value_dim))
    blocks = sequences.block_table[sequences.rows.long(), 0].tolist()
    starts, lengths = sequences.query_start_loc.tolist(), sequences.seq_lens.tolist()
    for request in range(first_req, len(blocks)):
        begin, end = starts[request : request + 2]
        if begin == end:
            continue
        if not lengths[request]:
            out[begin:end] = 0
            continue
        known = lengths[request] - (end - begin)
        own, matrices = states[blocks[request]], heads.slots * heads.state_size
        parts = taken_apart(projected[begin:end], gates[begin:end], heads, weights)
        window = own[matrices:].view(heads.ring, heads.channels)
        before = torch.arange(known - heads.taps + 1, known, device=own.device)
        history = window[before % heads.ring].masked_fill((before < 0)[:, None], 0.0)
        rows = torch.cat((history, parts.mixed))
        taps = (rows[back : back + end - begin] * weights.conv[:, back].float() for back in range(heads.taps))
        q, k, v = queries_keys_values(F.silu(sum(taps, torch.zeros_like(parts.mixed))), heads)
        kept, found, done = own[:matrices].view(heads.slots, *heads.state_shape), [], known
        state = kept[(known - 1) % heads.slots] if known else torch.zeros_like(kept[0])
        size = 1 if in_turn or end - begin <= heads.slots else CHUNK
        for chunk in zip(*(x.split(size) for x in (q, k, v, parts.log_decay, parts.beta)), strict=True):
            read, state = _chunk_reference([x.transpose(0, 1) for x in chunk], state)
            found.append(read.transpose(0, 1))
            done += len(found[-1])
            if size == 1 or done == lengths[request]:
                kept[(done - 1) % heads.slots] = state
        out[begin:end] = normed_and_gated(torch.cat(found), parts.z, weights)
        latest = torch.arange(max(known, known + end - begin - heads.ring), known + end - begin, device=own.device)
        window[latest % heads.ring] = parts.mixed[latest - known]
    return out


def _chunk_reference(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs # [value heads, tokens, value] of a chunk and the state after it, given q, k, v, the logs of
    decays, and beta # [value heads, tokens, ...] and the state before it."""
    q, k, v, log_decay, beta = inputs
    total = log_decay.cumsum(1)
    decays = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    below = (k @ k.mT * decays * beta[..., None]).tril(-1)
    right = torch.cat((v, k * total.exp()[..., None]), dim=-1) * beta[..., None]
    u, w = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), dim=-1
    )
    new = u - w @ state
    out = (q * total.exp()[..., None]) @ state + (q @ k.mT * decays) @ new
    last = total[:, -1:]
    return out, state * last.exp()[..., None] + (k * (last - total).exp()[..., None]).mT @ new
