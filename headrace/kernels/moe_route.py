"""Which experts a token goes to, and in which order token-expert pairs are worked off. Pair p is token p // top_k's.

Pairs are grouped by expert and cut into tiles of at most block_m, all on the device and in buffers whose sizes follow
from host integers. Nothing is added atomically: equal inputs give equal orders. Knows nothing of experts' weights.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton functions are typed by what they are launched with.
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.matmul import matmul
from headrace.kernels.norm import rms_norm

ONE_PROGRAM = 8192
"""Most logits (padded to powers of two) that a single program routes and sorts; more take two launches."""
ROUTER_TOKENS = 16
"""Most tokens whose router logits are computed by the kernel that routes them."""
_ROWS = 32
"""tokens a program where routing takes two launches"""
_LOWEST = -(1 << 63)


class Routing(NamedTuple):
    ids: Tensor
    """# [num_tokens, top_k] int32, best first; of equal logits the lower id"""
    weights: Tensor
    """# [num_tokens, top_k] fp32"""
    order: Tensor
    """# [num_tokens * top_k] int32: pairs, grouped by expert, in a group by token; empty if not asked for"""
    tiles: Tensor
    """# [3, max_tiles] int32: each tile's expert, its first place in `order`, and its pairs: 0 beyond the last tile,
    where the other two are not set"""


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles there can be, however the pairs fall."""
    groups = min(num_pairs, num_experts)
    return (num_pairs - groups) // block_m + groups


@triton.jit
def _choose(
    logits, num_experts, LOWEST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, RENORMALIZE: tl.constexpr
):
    """logits fp32 [T, E] -> (place [T, E]: the how-manieth choice an expert is, -1: none; ids, weights [T, BLOCK_K]).

    A logit and its expert make one integer key, so that a maximum finds both and no two are equal.
    """
    last = logits.shape[1] - 1
    expert = tl.arange(0, logits.shape[1])
    known = (expert < num_experts)[None, :]
    bits = logits.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    key = (bits.to(tl.int64) << 32) | (last - expert).to(tl.int64)[None, :]
    key = tl.where(known, key, LOWEST)
    place = tl.full(logits.shape, -1, tl.int32)
    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([logits.shape[0], BLOCK_K], tl.int32)
    weights = tl.zeros([logits.shape[0], BLOCK_K], tl.float32)
    highest = tl.zeros([logits.shape[0]], tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)
        found = key == best[:, None]
        place = tl.where(found, choice, place)
        key = tl.where(found, LOWEST, key)
        value = (best >> 32).to(tl.int32)
        value = (value ^ ((value >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if choice == 0:
            highest = value
        ids = tl.where(slot == choice, (last - (best & 0x7FFFFFFF)).to(tl.int32)[:, None], ids)
        weights = tl.where(slot == choice, tl.exp(value - highest)[:, None], weights)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1)
    else:
        total = tl.sum(tl.where(known, tl.exp(logits - highest[:, None]), 0.0), axis=1)
    return place, ids, weights / total[:, None]


@triton.jit
def _write_choice(ids_ptr, weights_ptr, ids, weights, token, num_tokens, TOP_K: tl.constexpr):
    slot = tl.arange(0, ids.shape[1])
    at = token[:, None] * TOP_K + slot[None, :]
    inside = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
    tl.store(ids_ptr + at, ids, mask=inside)
    tl.store(weights_ptr + at, weights, mask=inside)


@triton.jit
def _write_order(order_ptr, place, first, token, TOP_K: tl.constexpr):
    """`first` [E]: where each expert's pairs of these tokens begin; `place` as from `_choose`."""
    chosen = (place >= 0).to(tl.int32)
    at = first[None, :] + tl.cumsum(chosen, axis=0) - chosen
    tl.store(order_ptr + at, token[:, None] * TOP_K + place, mask=place >= 0)


@triton.jit
def _write_tiles(tiles_ptr, max_tiles, counts, begin, end, step, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """The begin-th, (begin + step)-th... tile of every expert; the program that writes the first also ends the list."""
    expert = tl.arange(0, counts.shape[0])
    first = tl.cumsum(counts, axis=0) - counts
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    tile = tl.cumsum(tiles, axis=0) - tiles
    for i in range(begin, end, step):
        inside = i < tiles
        tl.store(tiles_ptr + tile + i, expert, mask=inside)
        tl.store(tiles_ptr + max_tiles + tile + i, first + i * BLOCK_M, mask=inside)
        tl.store(tiles_ptr + 2 * max_tiles + tile + i, tl.minimum(counts - i * BLOCK_M, BLOCK_M), mask=inside)
    if begin == 0:
        total = tl.sum(tiles, axis=0)
        for start in range(0, max_tiles, BLOCK_TILES):
            at = start + tl.arange(0, BLOCK_TILES)
            tl.store(tiles_ptr + 2 * max_tiles + at, 0, mask=(at >= total) & (at < max_tiles))


@triton.jit
def _route_and_sort(
    logits, ids_ptr, weights_ptr, order_ptr, tiles_ptr, num_tokens, num_experts, max_tiles,
    LOWEST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, logits.shape[0])
    place, ids, weights = _choose(logits, num_experts, LOWEST, TOP_K, BLOCK_K, RENORMALIZE)
    _write_choice(ids_ptr, weights_ptr, ids, weights, token, num_tokens, TOP_K)
    if BLOCK_M:
        place = tl.where((token < num_tokens)[:, None], place, -1)
        counts = tl.sum((place >= 0).to(tl.int32), axis=0)
        _write_order(order_ptr, place, tl.cumsum(counts, axis=0) - counts, token, TOP_K)
        _write_tiles(tiles_ptr, max_tiles, counts, 0, tl.cdiv(num_tokens, BLOCK_M), 1, BLOCK_M, BLOCK_TILES)


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _router_kernel(
    normed_ptr, logits_ptr, arrived_ptr, x_ptr, norm_ptr, router_ptr, ids_ptr, weights_ptr, order_ptr, tiles_ptr,
    num_tokens, num_experts, max_tiles, x_stride, eps,
    NUM_ROWS: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, LOWEST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of the router for one token, which it norms first. The last to finish routes and sorts all
    tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_H)
    row_in, column_in = row < NUM_ROWS, column < HIDDEN
    weight_ptrs = router_ptr + row[:, None] * HIDDEN + column[None, :]
    weight = tl.load(weight_ptrs, mask=row_in[:, None] & column_in[None, :], other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + column, mask=column_in, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(1)
    dtype = normed_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + column, mask=column_in, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)).to(dtype).to(tl.float32)
    x = (x * norm).to(dtype)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + token * HIDDEN + column, x, mask=column_in)
    logit = tl.sum(weight * x.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * NUM_ROWS + row, logit.to(dtype), mask=row_in)
    tl.debug_barrier()  # every thread's logits are written before the program says so
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(arrived_ptr, 0)
        tokens, expert = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
        inside = (tokens < num_tokens)[:, None] & (expert < num_experts)[None, :]
        at = logits_ptr + tokens[:, None] * NUM_ROWS + expert[None, :]
        logits = tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
        _route_and_sort(
            logits, ids_ptr, weights_ptr, order_ptr, tiles_ptr, num_tokens, num_experts, max_tiles,
            LOWEST, TOP_K, BLOCK_K, RENORMALIZE, BLOCK_M, BLOCK_TILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _route_and_sort_kernel(
    logits_ptr, ids_ptr, weights_ptr, order_ptr, tiles_ptr, num_tokens, num_experts, max_tiles, logits_stride,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, LOWEST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A single program for all tokens."""
    wait_for_inputs(OVERLAP)
    token, expert = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    at = logits_ptr + token[:, None] * logits_stride + expert[None, :]
    logits = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    _route_and_sort(
        logits, ids_ptr, weights_ptr, order_ptr, tiles_ptr, num_tokens, num_experts, max_tiles,
        LOWEST, TOP_K, BLOCK_K, RENORMALIZE, BLOCK_M, BLOCK_TILES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr, ids_ptr, weights_ptr, counts_ptr, num_tokens, num_experts, logits_stride,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, LOWEST: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: ROWS tokens; says how many of them chose each expert # counts [programs, BLOCK_E]"""
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    token, expert = program * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    at = logits_ptr + token.to(tl.int64)[:, None] * logits_stride + expert[None, :]
    logits = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    place, ids, weights = _choose(logits, num_experts, LOWEST, TOP_K, BLOCK_K, RENORMALIZE)
    _write_choice(ids_ptr, weights_ptr, ids, weights, token, num_tokens, TOP_K)
    chosen = (place >= 0) & (token < num_tokens)[:, None]
    tl.store(counts_ptr + program * BLOCK_E + expert, tl.sum(chosen.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _sort_kernel(
    ids_ptr, counts_ptr, order_ptr, tiles_ptr, num_tokens, max_tiles,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: the same ROWS tokens, placed behind those of the programs before it."""
    wait_for_inputs(OVERLAP)
    program, programs = tl.program_id(0), tl.num_programs(0)
    expert, lane = tl.arange(0, BLOCK_E), tl.arange(0, 16)
    counts, before = tl.zeros([16, BLOCK_E], tl.int32), tl.zeros([16, BLOCK_E], tl.int32)
    for start in range(0, programs, 16):
        other = start + lane
        part = tl.load(
            counts_ptr + other[:, None] * BLOCK_E + expert[None, :], mask=(other < programs)[:, None], other=0
        )
        counts += part
        before += tl.where((other < program)[:, None], part, 0)
    counts, before = tl.sum(counts, axis=0), tl.sum(before, axis=0)
    token = program * ROWS + tl.arange(0, ROWS)
    place = tl.full([ROWS, BLOCK_E], -1, tl.int32)
    for choice in tl.static_range(TOP_K):
        chosen = tl.load(ids_ptr + token * TOP_K + choice, mask=token < num_tokens, other=-1)
        place = tl.where(chosen[:, None] == expert[None, :], choice, place)
    _write_order(order_ptr, place, tl.cumsum(counts, axis=0) - counts + before, token, TOP_K)
    _write_tiles(
        tiles_ptr, max_tiles, counts, program, tl.cdiv(num_tokens, BLOCK_M), programs, BLOCK_M, BLOCK_TILES
    )  # fmt: skip


@lru_cache(maxsize=16)
def _arrivals(device: torch.device) -> Tensor:
    """How many programs of the router kernel have finished; zero between launches."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def norm_and_route(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, num_experts: int, top_k: int, renormalize: bool,
    block_m: int, invariant: bool = False,
) -> tuple[Routing, Tensor, Tensor]:  # fmt: skip
    """x [num_tokens, hidden], router [num_experts or more, hidden] -> (routing, all logits, normed x), in x's dtype.

    `block_m` 0: ids and weights alone, without order and tiles. At most ROUTER_TOKENS tokens take one launch, those of
    ONE_PROGRAM three, more four. `invariant`: always four, whose sums know nothing of the number of tokens.
    """
    num_tokens, hidden = x.shape
    num_rows = router.shape[0]
    arrived = _arrivals(x.device)  # also where it is not needed yet: no graph's memory may hold it
    if num_tokens > ROUTER_TOKENS or invariant:
        normed = rms_norm(x, norm_weight, eps)
        logits = matmul(normed, router) if invariant else F.linear(normed, router)
        return route(logits[:, :num_experts], top_k, renormalize, block_m, invariant), logits, normed
    routing = _empty_routing(num_tokens, num_experts, top_k, block_m, x.device)
    logits = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    normed = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    block_h = next_power_of_2(hidden)
    # few tokens: a warp chooses without waiting for others; a warp a row of the router, unless rows are very long
    warps = max(1 if num_tokens <= 4 else 4, block_h // 2048)
    rows = max(1, min(warps, warps * 2048 // block_h))
    _router_kernel[(-(-num_rows // rows), num_tokens)](
        normed, logits, arrived, x, norm_weight, router, *routing,
        num_tokens, num_experts, routing.tiles.shape[1], x.stride(0), eps,
        NUM_ROWS=num_rows, HIDDEN=hidden, ROWS=rows, BLOCK_H=block_h, BLOCK_T=_next_power_of_4(num_tokens),
        BLOCK_E=next_power_of_2(num_experts), LOWEST=_LOWEST, TOP_K=top_k, BLOCK_K=next_power_of_2(top_k),
        RENORMALIZE=renormalize, BLOCK_M=block_m, BLOCK_TILES=256, num_warps=warps, **overlap(),
    )  # fmt: skip
    return routing, logits, normed


def route(logits: Tensor, top_k: int, renormalize: bool, block_m: int, invariant: bool = False) -> Routing:
    """logits [num_tokens, num_experts] (last dim contiguous) -> softmax in fp32, then the best `top_k` of it, whose
    weights sum to one if `renormalize`. `block_m` and `invariant` as above."""
    num_tokens, num_experts = logits.shape
    routing = _empty_routing(num_tokens, num_experts, top_k, block_m, logits.device)
    block_e = next_power_of_2(num_experts)
    choice = {"BLOCK_E": block_e, "LOWEST": _LOWEST, "TOP_K": top_k, "BLOCK_K": next_power_of_2(top_k),
              "RENORMALIZE": renormalize}  # fmt: skip
    block_t = _next_power_of_4(num_tokens)
    if block_t * block_e <= ONE_PROGRAM and not invariant:
        _route_and_sort_kernel[(1,)](
            logits, *routing, num_tokens, num_experts, routing.tiles.shape[1], logits.stride(0),
            BLOCK_T=block_t, BLOCK_M=block_m, BLOCK_TILES=256, **choice,
            num_warps=min(16, max(1, block_t * block_e // 256)), **overlap(),
        )  # fmt: skip
        return routing
    programs = -(-num_tokens // _ROWS)
    counts = torch.empty((programs, block_e), dtype=torch.int32, device=logits.device)
    _route_kernel[(programs,)](
        logits, routing.ids, routing.weights, counts, num_tokens, num_experts, logits.stride(0),
        ROWS=_ROWS, **choice, num_warps=8, **overlap(),
    )  # fmt: skip
    if block_m:
        _sort_kernel[(programs,)](
            routing.ids, counts, routing.order, routing.tiles, num_tokens, routing.tiles.shape[1],
            ROWS=_ROWS, BLOCK_E=block_e, TOP_K=top_k, BLOCK_M=block_m, BLOCK_TILES=256, num_warps=8, **overlap(),
        )  # fmt: skip
    return routing


def _next_power_of_4(n: int) -> int:
    """Half as many variants to compile as with powers of two."""
    return 1 << ((n - 1).bit_length() + 1) // 2 * 2


def _empty_routing(num_tokens: int, num_experts: int, top_k: int, block_m: int, device: torch.device) -> Routing:
    pairs = num_tokens * top_k
    tiles = max_tiles(pairs, num_experts, block_m) if block_m else 0
    return Routing(
        torch.empty((num_tokens, top_k), dtype=torch.int32, device=device),
        torch.empty((num_tokens, top_k), dtype=torch.float32, device=device),
        torch.empty(pairs if block_m else 0, dtype=torch.int32, device=device),
        torch.empty((3, tiles), dtype=torch.int32, device=device),
    )


def route_reference(logits: Tensor, top_k: int, renormalize: bool, block_m: int = 0) -> Routing:
    num_tokens, num_experts = logits.shape
    ids = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, ids)
    if renormalize:
        weights /= weights.sum(dim=-1, keepdim=True)
    routing = _empty_routing(num_tokens, num_experts, top_k, block_m, logits.device)
    routing.ids.copy_(ids)
    routing.weights.copy_(weights)
    if block_m:
        routing.order.copy_(ids.flatten().sort(stable=True).indices)
        counts = ids.flatten().bincount(minlength=num_experts).tolist()
        tiles, first = [], 0
        for expert, count in enumerate(counts):
            tiles += [(expert, first + i, min(block_m, count - i)) for i in range(0, count, block_m)]
            first += count
        tiles += [(0, 0, 0)] * (routing.tiles.shape[1] - len(tiles))
        routing.tiles.copy_(torch.tensor(tiles, dtype=torch.int32).t())
    return routing
