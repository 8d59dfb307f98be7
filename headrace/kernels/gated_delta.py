"""Computes one token a request of a gated delta-net (arXiv 2412.06464), and describes such a layer for its kernels.

Each value head keeps a matrix S # [key, value]. A token lets it decay, reads what its key recalls, writes the
difference to its own value, and reads with its query: S = exp(g) S, then S = S + k (beta (v - S^T k))^T, out = S^T q.
In front of queries, keys and values is a convolution over the latest few tokens; behind the outputs a norm of each
head, times silu(z). Several neighbouring value heads share a key head. Prompts are computed by delta_scan.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences

L2_EPS = 1e-6
"""Is added to the square of a query's or key's length before they are divided by it."""


class Places(NamedTuple):
    """Says where numbers lie in a token's row of the projections: those of the first key head, or of its value heads,
    and how far behind the next key head's are. Numbers of the value heads that share a key head lie side by side."""

    q: int
    k: int
    v: int
    z: int
    keys_apart: int
    """of q and k"""
    values_apart: int
    """of v and z"""
    b: int
    a: int
    gates_apart: int
    """of a and b, which lie in a row of their own"""


class DeltaHeads(NamedTuple):
    """Holds the sizes of a layer on one rank."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """tokens that the convolution sees, the latest included"""
    places: Places
    slots: int = 1
    """states that a request keeps, those behind its latest tokens: all but one of them may be guesses"""

    @property
    def group(self) -> int:
        """The value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The sizes of a request's matrices # [value heads, key, value]."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def state_size(self) -> int:
        """The number of values of a request's matrices."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def ring(self) -> int:
        """The tokens of a request's window."""
        return self.taps + self.slots - 1

    @property
    def numbers(self) -> int:
        """The number of values that a request keeps."""
        return self.slots * self.state_size + self.ring * self.channels

    @property
    def channels(self) -> int:
        """The numbers of a token that the convolution runs over: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class DeltaWeights(NamedTuple):
    """Holds the weights of a layer on one rank, beside those of its linears."""

    conv: Tensor
    """[channels, taps], for the oldest token first; channels are all queries, then keys, then values"""
    a_log: Tensor
    """[value heads] float32"""
    dt_bias: Tensor
    """[value heads] float32"""
    norm: Tensor
    """[value dim]"""
    eps: float
    """of the norm"""


# What a request keeps # [numbers] float32: its states # [slots, value heads, key, value], of which the one behind the
# token at position p is in slot p % slots, then the convolution's window # [ring, channels], in which that token is in
# row p % ring. So whichever of a step's guesses are right, what the next step begins with is there; a token's own row
# is none of those that it reads, and programs of one launch need not wait for each other.


@triton.jit
def within(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Tell which indices are below SIZE: all, as is known when compiling, where blocks of BLOCK make it up."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, True, tl.int1)
    return index < SIZE


@triton.jit
def convolved(
    new_ptr, old_ptr, conv_ptr, column, channel, inside, lane, place, position, live, token_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Return silu of the convolution of some channels of some tokens # [tokens, channels], in fp32; zeros where a token
    is not `live`.

    `column` # [channels]: where the channels are in a row of the step's projections, and `lane` # [tokens]: the tokens'
    rows from `new_ptr` on. `place` and `position` say which token of the request it is, of those in this step and of
    all. `old_ptr` is the request's window.
    """
    total = tl.zeros([lane.shape[0], column.shape[0]], tl.float32)
    for back in tl.static_range(TAPS):
        weight = tl.load(conv_ptr + channel * TAPS + (TAPS - 1 - back), mask=inside, other=0.0).to(tl.float32)
        new = new_ptr + ((lane - back) * token_stride)[:, None] + column[None, :]
        value = tl.load(new, mask=(live & (place >= back))[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if back > 0:
            kept = live & (place < back) & (position >= back)
            old = old_ptr + ((position - back) % (TAPS + SLOTS - 1) * CHANNELS)[:, None] + channel[None, :]
            value += tl.load(old, mask=kept[:, None] & inside[None, :], other=0.0)
        total += value * weight[None, :]
    return total / (1.0 + tl.exp(-total))


@triton.jit
def inverse_length(x, L2_EPS: tl.constexpr = L2_EPS):
    """Return what makes each vector of x # [vectors, numbers] as long as 1."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + L2_EPS)


@triton.jit
def gates(b, a, a_log, dt_bias):
    """Return the log of the decay, and beta, in fp32."""
    x = a.to(tl.float32) + dt_bias
    small = tl.exp(tl.minimum(x, 20.0))
    near_one = 1.0 + small
    # log(1 + small), right to the last bits where `small` is: rounding 1 + small is undone by the quotient
    added = tl.where(near_one == 1.0, 1.0, near_one - 1.0)
    log1p = tl.where(near_one == 1.0, small, tl.log(near_one) * (small / added))
    softplus = tl.where(x > 20.0, x, log1p)
    return -tl.exp(a_log) * softplus, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def gated_norm(out, z, weight, eps, DIM: tl.constexpr):
    """Return the norm of out # [heads, BLOCK], times weight and silu(z); beyond DIM `out` is zero."""
    normed = out * (1.0 / tl.sqrt(tl.sum(out * out, axis=1) / DIM + eps))[:, None] * weight
    return normed * z / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["block_table_stride"])
def _delta_step_kernel(
    out_ptr, projected_ptr, gates_ptr, states_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, block_table_ptr,
    rows_ptr, query_start_loc_ptr, seq_lens_ptr, eps, token_stride, gates_stride, state_stride, block_table_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TAPS: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, Z: tl.constexpr, KEYS_APART: tl.constexpr, VALUES_APART: tl.constexpr, B: tl.constexpr,
    A: tl.constexpr, GATES_APART: tl.constexpr, SLOTS: tl.constexpr, MANY: tl.constexpr, SHORT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute a request's tokens one after the other; grid (value heads, requests). MANY: there may be more than one,
    and the window is left as it was. SHORT: requests of more than SLOTS tokens are left out."""
    head = tl.program_id(0)
    request = tl.program_id(1)
    key_head = head // GROUP
    member = head % GROUP
    VALUE_HEADS: tl.constexpr = KEY_HEADS * GROUP
    ALL_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * ALL_KEYS + VALUE_HEADS * VALUE_DIM
    seq_len = tl.load(seq_lens_ptr + request)
    begin = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1)
    if SHORT and end - begin > SLOTS:
        return
    table_row = tl.load(rows_ptr + request).to(tl.int64)
    block = tl.load(block_table_ptr + table_row * block_table_stride)
    known = seq_len - (end - begin)  # tokens before this step's
    states_ptr += block.to(tl.int64) * state_stride
    key = tl.arange(0, BLOCK_K)
    value = tl.arange(0, BLOCK_V)
    in_key = within(key, KEY_DIM, BLOCK_K)
    in_value = within(value, VALUE_DIM, BLOCK_V)
    state_ptrs = states_ptr + (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    SIZE: tl.constexpr = VALUE_HEADS * KEY_DIM * VALUE_DIM
    if known > 0:
        # no kernel of this step has written it
        state = tl.load(state_ptrs + (known - 1) % SLOTS * SIZE, mask=inside, other=0.0)
    q_channel = key_head * KEY_DIM + key
    k_channel = ALL_KEYS + q_channel
    v_channel = 2 * ALL_KEYS + head * VALUE_DIM + value
    window_ptr = states_ptr + SLOTS * SIZE
    q_column = Q + key_head * KEYS_APART + key
    k_column = K + key_head * KEYS_APART + key
    v_column = V + key_head * VALUES_APART + member * VALUE_DIM + value
    z_column = Z + key_head * VALUES_APART + member * VALUE_DIM + value
    gates_ptr += key_head * GATES_APART + member
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    weight = tl.load(norm_ptr + value, mask=in_value, other=0.0).to(tl.float32)[None, :]
    one = tl.zeros([1], tl.int32)
    wait_for_inputs(OVERLAP)

    live = one + seq_len > 0  # else padding
    for row in range(begin, end):
        place = one + row - begin
        position = place + known
        at = tl.cast(row, tl.int64)
        new_ptr = projected_ptr + at * token_stride
        q = convolved(
            new_ptr, window_ptr, conv_ptr, q_column, q_channel, in_key, one, place, position, live, token_stride,
            CHANNELS, TAPS, SLOTS,
        )  # fmt: skip
        k = convolved(
            new_ptr, window_ptr, conv_ptr, k_column, k_channel, in_key, one, place, position, live, token_stride,
            CHANNELS, TAPS, SLOTS,
        )  # fmt: skip
        v = convolved(
            new_ptr, window_ptr, conv_ptr, v_column, v_channel, in_value, one, place, position, live, token_stride,
            CHANNELS, TAPS, SLOTS,
        )  # fmt: skip
        q = tl.sum(q * (inverse_length(q) * KEY_DIM**-0.5)[:, None], axis=0)
        k = tl.sum(k * inverse_length(k)[:, None], axis=0)
        v = tl.sum(v, axis=0)
        gate_ptr = gates_ptr + at * gates_stride
        log_decay, beta = gates(tl.load(gate_ptr + B), tl.load(gate_ptr + A), a_log, dt_bias)
        state = state * tl.exp(log_decay)
        delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state = state + k[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], axis=0)[None, :]
        z = tl.load(new_ptr + z_column, mask=in_value, other=0.0).to(tl.float32)
        out = gated_norm(out, z[None, :], weight, eps, VALUE_DIM)
        out_ptrs = out_ptr + (at * VALUE_HEADS + head) * VALUE_DIM + value[None, :]
        tl.store(out_ptrs, tl.where(seq_len > 0, out, 0.0).to(out_ptr.dtype.element_ty), mask=in_value[None, :])
        if MANY and SLOTS > 1:  # the last one's is stored below, as in any case
            mask = inside & (seq_len > 0) & (row < end - 1)
            tl.store(state_ptrs + (known + row - begin) % SLOTS * SIZE, state, mask=mask)
    if seq_len > 0:
        tl.store(state_ptrs + (seq_len - 1) % SLOTS * SIZE, state, mask=inside)
    if not MANY:
        window_ptr += (seq_len - 1) % (TAPS + SLOTS - 1) * CHANNELS
        projected_ptr += tl.cast(begin, tl.int64) * token_stride
        in_value = in_value & (seq_len + 0 * value > 0)
        new_v = tl.load(projected_ptr + v_column, mask=in_value, other=0.0)
        tl.store(window_ptr + v_channel, new_v.to(tl.float32), mask=in_value)
        first = in_key & (seq_len + 0 * key > 0) & (member + 0 * key == 0)
        new_q = tl.load(projected_ptr + q_column, mask=first, other=0.0)
        new_k = tl.load(projected_ptr + k_column, mask=first, other=0.0)
        tl.store(window_ptr + q_channel, new_q.to(tl.float32), mask=first)
        tl.store(window_ptr + k_channel, new_k.to(tl.float32), mask=first)


def sizes_of(heads: DeltaHeads) -> dict[str, int]:
    """Return what kernels are compiled for."""
    places = heads.places
    return {
        "KEY_HEADS": heads.key_heads, "GROUP": heads.group, "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim,
        "BLOCK_K": max(16, next_power_of_2(heads.key_dim)), "BLOCK_V": max(16, next_power_of_2(heads.value_dim)),
        "TAPS": heads.taps, "Q": places.q, "K": places.k, "V": places.v, "Z": places.z,
        "KEYS_APART": places.keys_apart, "VALUES_APART": places.values_apart, "B": places.b, "A": places.a,
        "GATES_APART": places.gates_apart, "SLOTS": heads.slots,
    }  # fmt: skip


def delta_steps(
    projected: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    states: Tensor,
    sequences: Sequences,
    out: Tensor,
    many: bool,
    short: bool = False,
) -> None:
    """Launch the kernel above for all requests of `sequences`."""
    requests = len(sequences.rows)
    if not requests:
        return
    sizes = sizes_of(heads)
    block = sizes["BLOCK_K"] * sizes["BLOCK_V"]
    arguments = (
        out, projected, gates, states, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        sequences.block_table, sequences.rows, sequences.query_start_loc, sequences.seq_lens, weights.eps,
        projected.stride(0), gates.stride(0), states.stride(0), sequences.block_table.stride(0),
    )  # fmt: skip
    keywords = {**sizes, "MANY": many, "SHORT": short, "num_warps": 8 if block > 4096 else 4, **overlap()}
    launch(_delta_step_kernel, (heads.value_heads, requests, 1), arguments, keywords)


def gated_delta_step(
    projected: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    states: Tensor,
    sequences: Sequences,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one token of each request, and update the requests' states; return # [num_tokens, value heads * value].

    `projected` [num_tokens, ...] holds q, k, v, z and `gates` [num_tokens, ...] b and a, where `heads.places` says.
    `states` # [num_blocks, numbers] float32: a request's is the first block of its table. A request whose only token
    is this one begins with zeros, whatever is in its block. Padding (seq_len 0) gives zeros and writes nothing. Rows
    of `out` that belong to no request of `sequences` are left as they are.
    """
    if out is None:
        out = projected.new_empty((len(projected), heads.value_heads * heads.value_dim))
    delta_steps(projected, gates, heads, weights, states, sequences, out, many=False)
    return out


# ---- references


class Projected(NamedTuple):
    """Holds what the projections of some tokens consist of."""

    mixed: Tensor
    """[num_tokens, channels], before the convolution, in fp32"""
    z: Tensor
    """[num_tokens, value heads, value]"""
    log_decay: Tensor
    """[num_tokens, value heads]"""
    beta: Tensor
    """[num_tokens, value heads]"""


def taken_apart(projected: Tensor, gates: Tensor, heads: DeltaHeads, weights: DeltaWeights) -> Projected:
    """Find the parts of the projections, in fp32."""

    def part(x: Tensor, first: int, apart: int, width: int) -> Tensor:
        size, strides = (len(x), heads.key_heads, width), (x.stride(0), apart, 1)
        return x.as_strided(size, strides, x.storage_offset() + first).float().flatten(1)

    places, values = heads.places, heads.group * heads.value_dim
    q, k = (part(projected, first, places.keys_apart, heads.key_dim) for first in (places.q, places.k))
    v, z = (part(projected, first, places.values_apart, values) for first in (places.v, places.z))
    b, a = (part(gates, first, places.gates_apart, heads.group) for first in (places.b, places.a))
    log_decay = -weights.a_log.exp() * F.softplus(a + weights.dt_bias)
    return Projected(torch.cat((q, k, v), dim=1), z.unflatten(1, (heads.value_heads, -1)), log_decay, b.sigmoid())


def queries_keys_values(mixed: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Split channels after the convolution into q and k # [num_tokens, value heads, key], of length 1 / sqrt(key) and
    1, and v # [num_tokens, value heads, value]."""
    keys = heads.key_heads * heads.key_dim
    q, k, v = mixed.split((keys, keys, heads.value_heads * heads.value_dim), dim=1)
    q, k = (x.unflatten(1, (heads.key_heads, heads.key_dim)) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    q, k = ((x.repeat_interleave(heads.group, dim=1)) for x in (q * heads.key_dim**-0.5, k))
    return q, k, v.unflatten(1, (heads.value_heads, heads.value_dim))


def normed_and_gated(out: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Return the norm of out # [num_tokens, value heads, value], times weight and silu(z)."""
    normed = out * (out.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm.float()
    return (normed * F.silu(z)).flatten(1)


def gated_delta_step_reference(
    projected: Tensor,
    gates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    states: Tensor,
    sequences: Sequences,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = projected.new_empty((len(projected), heads.value_heads * heads.value_dim))
    table, rows, query_start_loc, seq_lens = (x.long() for x in sequences)
    tokens, blocks = query_start_loc[:-1], table[rows, 0]
    live, positions = seq_lens > 0, seq_lens - 1
    kept, matrices = states[blocks], heads.slots * heads.state_size
    window = kept[:, matrices:].view(-1, heads.ring, heads.channels)
    now = taken_apart(projected[tokens], gates[tokens], heads, weights)
    each = torch.arange(len(rows), device=rows.device)
    window[each, positions % heads.ring] = now.mixed
    back = torch.arange(heads.taps - 1, -1, -1, device=rows.device)
    at = positions[:, None] - back
    latest = window[each[:, None], at % heads.ring].masked_fill((at < 0)[..., None], 0.0)  # oldest first
    q, k, v = queries_keys_values(F.silu((latest * weights.conv.float().T).sum(1)), heads)
    kept_states = kept[:, :matrices].view(-1, heads.slots, *heads.state_shape)
    begins = (positions <= 0)[:, None, None, None]
    state = kept_states[each, (positions - 1) % heads.slots].masked_fill(begins, 0.0)
    state *= now.log_decay.exp()[..., None, None]
    delta = (v - (state * k[..., None]).sum(2)) * now.beta[..., None]
    state += k[..., None] * delta[:, :, None, :]
    kept_states[each, positions % heads.slots] = state
    found = normed_and_gated((state * q[..., None]).sum(2), now.z, weights)
    out[tokens] = (found * live[:, None]).to(out.dtype)
    states[blocks[live]] = kept[live]
    return out
