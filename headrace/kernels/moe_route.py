"""Chooses each token's experts, and sorts the (token, expert) pairs into tiles. Pair p is of token p // top_k.

Pairs are grouped by expert, and groups cut into tiles of at most block_m, on the device and in buffers whose sizes
follow from host integers. No order depends on atomic additions: equal inputs give equal orders.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.matmul import matmul
from headrace.kernels.norm import rms_norm, times_weight

ROUTER_TOKENS = 16
"""tokens whose norm, router logits and choice of experts take one launch, whatever the router's size"""
MOST_ROUTER_TOKENS = 64
"""of a router so small that no more than ROUTER_LOGITS come out; with more, several launches are faster"""
ROUTER_LOGITS = 2048


class Routing(NamedTuple):
    """Holds the tokens' experts, and the pairs in tiles."""

    ids: Tensor
    """# [num_tokens, top_k] int32, best first; of equal logits the lower id. Behind them are those of `joined` ones."""
    weights: Tensor
    """# [num_tokens, top_k] fp32"""
    order: Tensor
    """# [num_tokens * top_k] int32: the pairs by expert, those of an expert by token; empty if not asked for"""
    tiles: Tensor
    """# [3, max_tiles] int32: each tile's expert, its first place in `order`, and its number of pairs (0: no tile). The
    tiles of expert e begin at max_tiles(pairs of the experts before e, e, block_m)."""


class Scoring(NamedTuple):
    """Says how router logits become weights of experts, in fp32."""

    sigmoid: bool = False
    """by the sigmoid of each; False: by the softmax over all"""
    bias: Tensor | None = None
    """# [num_experts], added to the weights for the choice alone"""
    scaling: float = 1.0
    """a factor of the weights, applied last"""
    groups: int = 1
    """experts are in so many groups of equal size (DeepSeek-V2, arXiv 2405.04434)"""
    used_groups: int = 1
    """a token's experts come from its best so many groups. A group is as good as its best expert, or with a sigmoid as
    its best two together."""
    factors: Tensor | None = None
    """# [num_experts]: factors of the weights, which do not choose"""
    near: float = 0.0
    """Above 0, a weight is by the softmax over those experts alone that were not chosen before and whose logits are at
    most so far below, as a share of the larger of their size and the chosen logit (SparseMixer, arXiv 2409.12136)."""
    joined: int = 0
    """so many further experts behind the others, which all tokens go to without being chosen; not in the reference"""
    gated: bool = False
    """their weight is the sigmoid of the logit behind those of the other experts; False: it is one"""


SOFTMAX = Scoring()


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most tiles that the pairs can make, whichever experts they go to."""
    groups = min(num_pairs, num_experts)
    return (num_pairs - groups) // block_m + groups


@triton.jit
def _max_tiles(num_pairs, num_experts, BLOCK_M: tl.constexpr):
    groups = tl.minimum(num_pairs, num_experts)
    return (num_pairs - groups) // BLOCK_M + groups


@triton.jit
def _of_best_groups(
    score, expert, inside, size, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr
):
    """Return `score` [ROWS, BLOCK_E], -inf for experts outside the best groups; of equal groups the first is better."""
    group = expert // size
    worth = tl.zeros(score.shape, tl.float32)  # of each expert's group
    better = tl.zeros(score.shape, tl.int32)  # groups that are better than it
    value = tl.where(inside, score.to(tl.float32), float("-inf"))
    for other in tl.static_range(GROUPS):
        worth = tl.where(group == other, _worth(value, group == other, SIGMOID), worth)
    for other in tl.static_range(GROUPS):
        theirs = _worth(value, group == other, SIGMOID)
        better += ((theirs > worth) | ((theirs == worth) & (other < group))).to(tl.int32)
    return tl.where(better < USED_GROUPS, score, float("-inf"))


@triton.jit
def _worth(value, members, SIGMOID: tl.constexpr):
    """Return # [ROWS, 1]: the best of the members' values, or the sum of the best two."""
    value = tl.where(members, value, float("-inf"))
    best = tl.max(value, axis=1)[:, None]
    if SIGMOID:
        again = tl.sum((value == best).to(tl.int32), axis=1)[:, None] > 1
        second = tl.max(tl.where(value < best, value, float("-inf")), axis=1)[:, None]
        best += tl.where(again, best, second)
    return best


@triton.jit
def _choose(
    logits_ptr, ids_ptr, weights_ptr, bias_ptr, factors_ptr, row, num_tokens, num_experts, logits_stride, scaling,
    BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, NEAR: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write the choices of tokens `row` [ROWS], where less than num_tokens.

    A logit and its expert make one integer key, so that a maximum finds both and no two are equal. Values stay with the
    thread that has their logit: where a warp has a whole row, it never waits for another.
    """
    expert = tl.arange(0, BLOCK_E)[None, :]
    row = row[:, None]
    inside = (row < num_tokens) & (expert < num_experts)
    # not from the first-level cache: another program may have written them
    at = logits_ptr + row.to(tl.int64) * logits_stride + expert
    logits = tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg")
    score = logits  # which order experts as their sigmoids do, and large ones better
    if SIGMOID:
        if bias_ptr is not None or USED_GROUPS < GROUPS:
            score = 1.0 / (1.0 + tl.exp(-logits.to(tl.float32)))
    elif bias_ptr is not None:
        score = tl.exp(logits.to(tl.float32) - tl.max(logits.to(tl.float32), axis=1)[:, None])
        score /= tl.sum(score, axis=1)[:, None]
    if bias_ptr is not None:
        score += tl.load(bias_ptr + expert, mask=expert < num_experts, other=0.0).to(tl.float32)
    if USED_GROUPS < GROUPS:
        score = _of_best_groups(score, expert, inside, num_experts // GROUPS, SIGMOID, GROUPS, USED_GROUPS)
    BITS: tl.constexpr = score.dtype.primitive_bitwidth
    if BITS == 16:
        key = score.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        key = score.to(tl.int32, bitcast=True).to(tl.int64)
    key = key ^ ((key >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))  # an integer that orders like the float
    LOWEST: tl.constexpr = -(1 << (2 * BITS - 1))
    key = tl.where(inside, (key << BITS) | (BLOCK_E - 1 - expert), LOWEST)
    place = tl.full(logits.shape, -1, tl.int32)  # which of the choices an expert is; -1: none
    if NEAR > 0.0:
        alone, wide = tl.zeros(logits.shape, tl.float32), logits.to(tl.float32)
    for choice in tl.static_range(TOP_K):
        found = key == tl.max(key, axis=1)[:, None]
        place = tl.where(found, choice, place)
        if NEAR > 0.0:
            best = tl.max(tl.where(found, wide, float("-inf")), axis=1)[:, None]
            near = (key > LOWEST) & (best - wide <= NEAR * tl.maximum(tl.abs(wide), best))
            total = tl.sum(tl.where(near, tl.exp(wide - best), 0.0), axis=1)[:, None]
            alone = tl.where(found, 1.0 / total, alone)
        key = tl.where(found, LOWEST, key)
    logits = logits.to(tl.float32)
    chosen = inside & (place >= 0)
    if NEAR > 0.0:
        weights = alone
    elif SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-logits))
    else:
        weights = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    if NEAR == 0.0 and (RENORMALIZE or not SIGMOID):
        total = tl.sum(tl.where(chosen if RENORMALIZE else inside, weights, 0.0), axis=1)
        weights /= total[:, None]
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + expert, mask=expert < num_experts, other=0.0).to(tl.float32)
    at = row * (TOP_K + JOINED) + place
    tl.store(ids_ptr + at, tl.broadcast_to(expert, place.shape), mask=chosen)
    tl.store(weights_ptr + at, weights * scaling, mask=chosen)
    for further in tl.static_range(JOINED):
        share = tl.full(row.shape, 1.0, tl.float32)
        if GATED:
            gate_ptrs = logits_ptr + row.to(tl.int64) * logits_stride + num_experts
            gate = tl.load(gate_ptrs, mask=row < num_tokens, other=0.0, cache_modifier=".cg")
            share /= 1.0 + tl.exp(-gate.to(tl.float32))
        at = row * (TOP_K + JOINED) + TOP_K + further
        tl.store(ids_ptr + at, tl.zeros_like(at) + num_experts + further, mask=row < num_tokens)
        tl.store(weights_ptr + at, share, mask=row < num_tokens)


@triton.jit
def _router_kernel(
    normed_ptr, logits_ptr, arrived_ptr, x_ptr, norm_ptr, router_ptr, router_bias_ptr, ids_ptr, weights_ptr, bias_ptr,
    factors_ptr, num_experts, x_stride, eps, scaling,
    NUM_ROWS: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    USED_GROUPS: tl.constexpr, NEAR: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm and route; one program: ROWS rows of the router for one token. The last to finish chooses its experts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_H)
    row_in, column_in = row < NUM_ROWS, column < HIDDEN
    weight_ptrs = router_ptr + row[:, None] * HIDDEN + column[None, :]
    weight = tl.load(weight_ptrs, mask=row_in[:, None] & column_in[None, :], other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + column, mask=column_in, other=0.0)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(1)
    dtype = normed_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + column, mask=column_in, other=0.0).to(tl.float32)
    x = times_weight(x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps), norm, dtype, False).to(dtype)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + token * HIDDEN + column, x, mask=column_in)
    logit = tl.sum(weight * x.to(tl.float32)[None, :], axis=1)
    if router_bias_ptr is not None:
        logit += tl.load(router_bias_ptr + row, mask=row_in, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * NUM_ROWS + row, logit.to(dtype), mask=row_in)
    tl.debug_barrier()  # all threads have stored before the counter says so
    if tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr + token, 0)
        warp = tl.arange(0, WARPS)  # the first one has the token, and need not wait for the others
        _choose(
            logits_ptr, ids_ptr, weights_ptr, bias_ptr, factors_ptr, token + warp * tl.num_programs(1),
            tl.num_programs(1), num_experts, NUM_ROWS, scaling, BLOCK_E, TOP_K, RENORMALIZE, SIGMOID, GROUPS,
            USED_GROUPS, NEAR, JOINED, GATED,
        )  # fmt: skip


@triton.jit
def _route_kernel(
    logits_ptr, ids_ptr, weights_ptr, bias_ptr, factors_ptr, num_experts, logits_stride, scaling,
    BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, NEAR: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts; one program a token."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) + tl.arange(0, 1)
    _choose(
        logits_ptr, ids_ptr, weights_ptr, bias_ptr, factors_ptr, row, tl.num_programs(0), num_experts, logits_stride,
        scaling, BLOCK_E, TOP_K, RENORMALIZE, SIGMOID, GROUPS, USED_GROUPS, NEAR, JOINED, GATED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _sort_kernel(
    ids_ptr, order_ptr, tiles_ptr, num_tokens, max_tiles,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sort an expert's pairs; one program an expert. Of the others it needs to know how many pairs precede its own."""
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0)
    pairs = num_tokens * TOP_K
    lane = tl.arange(0, BLOCK)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < pairs, other=0x7FFFFFFF)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    first, count = tl.sum(before, axis=0), tl.sum(own, axis=0)

    tile = _max_tiles(first, expert, BLOCK_M)
    tiles = _max_tiles(first + count, expert + 1, BLOCK_M) - tile
    for start in range(0, tiles, BLOCK_TILES):
        i = start + tl.arange(0, BLOCK_TILES)
        at, inside = tiles_ptr + tile + i, i < tiles
        tl.store(at, tl.zeros_like(i) + expert, mask=inside)
        tl.store(at + max_tiles, first + i * BLOCK_M, mask=inside)
        tl.store(at + 2 * max_tiles, tl.minimum(tl.maximum(count - i * BLOCK_M, 0), BLOCK_M), mask=inside)

    for start in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < pairs, other=0x7FFFFFFF)
        found = (ids == expert).to(tl.int32)
        tl.store(order_ptr + first + tl.cumsum(found, axis=0) - 1, start + lane, mask=ids == expert)
        first += tl.sum(found, axis=0)


@lru_cache(maxsize=16)
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters of programs of the router kernel that have finished, by token; zero between launches."""
    return torch.zeros(MOST_ROUTER_TOKENS, dtype=torch.int32, device=device)


def norm_and_route(
    x: Tensor, norm_weight: Tensor | None, eps: float, router: Tensor, num_experts: int, top_k: int, renormalize: bool,
    block_m: int, invariant: bool = False, scoring: Scoring = SOFTMAX, router_bias: Tensor | None = None,
    router_norm: Tensor | None = None,
) -> tuple[Routing, Tensor, Tensor]:  # fmt: skip
    """Return the routing of x [num_tokens, hidden], its router logits, and normed x, the latter two in x's dtype.

    `router` is # [num_experts or more, hidden], `router_bias` has as many. `block_m` 0: no order and tiles. Up to
    ROUTER_TOKENS tokens, or more of a small router, take one launch; more, and all tokens if `invariant`, take three,
    whose sums do not depend on the number of tokens.
    `norm_weight` None: x comes normed. `router_norm` [hidden]: the router reads x normed by this instead.
    """
    num_tokens, hidden = x.shape
    num_rows = router.shape[0]
    arrived = _arrivals(x.device)  # even if not needed yet: it must not lie in a graph's memory
    most = min(MOST_ROUTER_TOKENS, max(ROUTER_TOKENS, ROUTER_LOGITS // num_rows))
    if num_tokens > most or invariant or norm_weight is None or router_norm is not None:
        normed = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        read = normed if router_norm is None else rms_norm(x, router_norm, eps)
        logits = (matmul if invariant else F.linear)(read, router, router_bias)
        return route(logits[:, :num_experts], top_k, renormalize, block_m, scoring), logits, normed
    routing = _empty_routing(num_tokens, num_experts + scoring.joined, top_k + scoring.joined, block_m, x.device)
    logits = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    normed = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    block_h = next_power_of_2(hidden)
    # with few tokens one warp norms, without waiting for others; a warp a row of the router, unless rows are very long
    warps = max(1 if num_tokens <= 4 else 4, block_h // 2048)
    rows = max(1, min(warps, warps * 2048 // block_h))
    _router_kernel[(-(-num_rows // rows), num_tokens)](
        normed, logits, arrived, x, norm_weight, router, router_bias, routing.ids, routing.weights,
        scoring.bias, scoring.factors, num_experts, x.stride(0), eps, scoring.scaling,
        NUM_ROWS=num_rows, HIDDEN=hidden, ROWS=rows, BLOCK_H=block_h, BLOCK_E=next_power_of_2(num_experts),
        TOP_K=top_k, RENORMALIZE=renormalize, SIGMOID=scoring.sigmoid, GROUPS=scoring.groups,
        USED_GROUPS=scoring.used_groups, NEAR=scoring.near, JOINED=scoring.joined, GATED=scoring.gated, WARPS=warps,
        num_warps=warps, **overlap(),
    )  # fmt: skip
    if block_m:
        _sort(routing, num_experts + scoring.joined, block_m)
    return routing, logits, normed


def route(logits: Tensor, top_k: int, renormalize: bool, block_m: int, scoring: Scoring = SOFTMAX) -> Routing:
    """Return the routing by logits [num_tokens, num_experts] (last dim contiguous): softmax in fp32, the best `top_k`.
    Their weights add up to one if `renormalize`. `block_m` 0: no order and tiles. If further experts are `gated`, the
    gate's logit lies behind a token's others in memory."""
    num_tokens, num_experts = logits.shape
    routing = _empty_routing(num_tokens, num_experts + scoring.joined, top_k + scoring.joined, block_m, logits.device)
    _route_kernel[(num_tokens,)](
        logits, routing.ids, routing.weights, scoring.bias, scoring.factors, num_experts, logits.stride(0),
        scoring.scaling, BLOCK_E=next_power_of_2(num_experts), TOP_K=top_k, RENORMALIZE=renormalize,
        SIGMOID=scoring.sigmoid, GROUPS=scoring.groups, USED_GROUPS=scoring.used_groups, NEAR=scoring.near,
        JOINED=scoring.joined, GATED=scoring.gated, num_warps=1, **overlap(),
    )  # fmt: skip
    if block_m:
        _sort(routing, num_experts + scoring.joined, block_m)
    return routing


def routing_here(
    routing: Routing, first: int, num_experts: int, block_m: int, is_token: Tensor | None = None
) -> Routing:
    """Return the routing, so far without order and tiles, for a rank that holds `num_experts` experts from `first` on
    and numbers them from 0.

    Pairs of other experts weigh nothing, nor do those of rows that are no tokens (`is_token` [rows or more] bool; None:
    all are). In tiles they do not come up; without tiles (`block_m` 0) they read the best expert of their token that is
    here, so that no more memory is read than a token needs."""
    own = routing.ids - first
    here = (own >= 0) & (own < num_experts)
    if is_token is not None:
        here &= is_token[: len(own), None]
    weights = routing.weights.masked_fill(~here, 0.0)
    if block_m:
        found = routing_of(own.masked_fill(~here, num_experts), num_experts, block_m)
        found.weights.copy_(weights)
        return found
    best = own.gather(1, here.int().argmax(dim=1, keepdim=True)).clamp(0, num_experts - 1)
    return routing._replace(ids=torch.where(here, own, best).contiguous(), weights=weights)


def routing_of(ids: Tensor, num_experts: int, block_m: int) -> Routing:
    """Return the order and tiles of pairs with the experts `ids` # [num_tokens, top_k]; `num_experts` stands for none.
    Its weights are not written."""
    found = _empty_routing(len(ids), num_experts, ids.shape[1], block_m, ids.device)
    found.ids.copy_(ids)
    found.tiles.zero_()  # those that the pairs of no expert would fill have no members
    _sort(found, num_experts, block_m)
    return found


def _sort(routing: Routing, num_experts: int, block_m: int) -> None:
    """Fill `order` and `tiles` from the ids."""
    num_tokens, top_k = routing.ids.shape
    small = num_tokens * top_k <= 2048
    _sort_kernel[(num_experts,)](
        routing.ids, routing.order, routing.tiles, num_tokens, routing.tiles.shape[1],
        TOP_K=top_k, BLOCK_M=block_m, BLOCK=1024 if small else 8192, BLOCK_TILES=32,
        num_warps=4 if small else 16, **overlap(),
    )  # fmt: skip


def _empty_routing(num_tokens: int, num_experts: int, top_k: int, block_m: int, device: torch.device) -> Routing:
    pairs = num_tokens * top_k
    tiles = max_tiles(pairs, num_experts, block_m) if block_m else 0
    return Routing(
        torch.empty((num_tokens, top_k), dtype=torch.int32, device=device),
        torch.empty((num_tokens, top_k), dtype=torch.float32, device=device),
        torch.empty(pairs if block_m else 0, dtype=torch.int32, device=device),
        torch.empty((3, tiles), dtype=torch.int32, device=device),
    )


def _near_weights(logits: Tensor, ids: Tensor, near: float) -> Tensor:
    """Return the weights of chosen experts `ids` that Scoring says of `near`."""
    left, found = logits, []
    for chosen in ids.split(1, dim=1):
        best = logits.gather(1, chosen)
        too_far = best - logits > near * torch.maximum(logits.abs(), best)
        found.append(left.masked_fill(too_far, -torch.inf).softmax(dim=-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(found, dim=1)


def route_reference(
    logits: Tensor, top_k: int, renormalize: bool, block_m: int = 0, scoring: Scoring = SOFTMAX
) -> Routing:
    num_tokens, num_experts = logits.shape
    chosen_by = logits.float()
    weights = chosen_by.sigmoid() if scoring.sigmoid else chosen_by.softmax(dim=-1)
    in_groups = scoring.used_groups < scoring.groups
    if scoring.bias is not None:
        chosen_by = weights + scoring.bias.float()
    elif scoring.sigmoid and in_groups:
        chosen_by = weights
    if in_groups:
        grouped = chosen_by.view(num_tokens, scoring.groups, -1)
        worth = grouped.sort(dim=-1, descending=True).values[..., : 2 if scoring.sigmoid else 1].sum(dim=-1)
        left_out = worth.sort(dim=-1, descending=True, stable=True).indices[:, scoring.used_groups :]
        chosen_by = grouped.scatter(1, left_out[..., None].expand(-1, -1, grouped.shape[2]), -torch.inf).flatten(1)
    ids = chosen_by.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = _near_weights(logits.float(), ids, scoring.near) if scoring.near else weights.gather(1, ids)
    if renormalize and not scoring.near:
        weights /= weights.sum(dim=-1, keepdim=True)
    if scoring.factors is not None:
        weights *= scoring.factors[ids].float()
    if scoring.scaling != 1.0:
        weights *= scoring.scaling
    routing = _empty_routing(num_tokens, num_experts, top_k, block_m, logits.device)
    routing.ids.copy_(ids)
    routing.weights.copy_(weights)
    if block_m:
        routing.order.copy_(ids.flatten().sort(stable=True).indices)
        counts = ids.flatten().bincount(minlength=num_experts).tolist()
        routing.tiles[2] = 0
        first = 0
        for expert, count in enumerate(counts):
            tile = max_tiles(first, expert, block_m)
            for i in range(0, count, block_m):
                routing.tiles[:, tile + i // block_m] = torch.tensor([expert, first + i, min(block_m, count - i)])
            first += count
    return routing
