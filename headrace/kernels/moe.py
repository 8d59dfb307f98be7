"""Computes the experts of a sparse layer: a product to gate and up, silu(gate) * up, a product down, the weighted sum.

With few tokens, a program reads one expert's rows for one token, and the second kernel adds up a token's experts. With
more, (token, expert) pairs are sorted into tiles of one expert (moe_route.py), and a third kernel adds up a token's
experts in the order in which it chose them. Either way no sum depends on which program finishes first. Weights may be
fp8 with a scale an output: tiles are then rounded to fp8 too, since matrix units take that without unpacking, while a
token by itself is not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import (
    DEVICE_FAMILY,
    next_power_of_2,
    overlap,
    tl,
    triton,
    wait_before_next,
    wait_for_inputs,
)
from headrace.kernels.fp8 import quantize_per_token, quantize_per_token_reference
from headrace.kernels.gemm import silu, sums_of_vectors, vector_of
from headrace.kernels.gemm_config import BUCKETS
from headrace.kernels.moe_config import MoeConfig, Tile, pick_moe_config
from headrace.kernels.moe_route import SOFTMAX, Routing, Scoring, norm_and_route, route_reference
from headrace.kernels.norm import (
    HalfNormed,
    half_norm_reference,
    half_norm_row,
    half_normed_over,
    rms_norm_reference,
)

HALF_NORMED_TOKENS = BUCKETS[-1]
"""the most tokens for which the next linear may be one of our kernels, which finish a norm"""


@triton.jit
def _residual_and_shared(
    residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, HIDDEN: tl.constexpr
):  # fmt: skip
    """Return residual + sigmoid(gate) * shared of one token in fp32; each may be missing."""
    total = tl.zeros(column.shape, tl.float32)
    at = token * HIDDEN + column
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            shared /= 1.0 + tl.exp(-tl.load(gate_ptr + token * gate_stride).to(tl.float32))
        total += shared
    return total


@triton.jit
def _up_one_by_one_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, ids_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out[pair] = silu(gate) * up; grid (blocks of N, pairs). `weight` is [experts, 2 * N, K]."""
    wait_before_next(OVERLAP)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    lane = tl.arange(0, 2 * BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + lane // 2
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(column, N - 1) + lane % 2 * N  # gate and up next to each other
    weight_ptrs = weight_ptr + expert * (2 * N * K) + row[:, None] * K + k[None, :]
    x_ptrs = x_ptr + pair // TOP_K * K + k
    acc = tl.zeros([2 * BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + start)
            weight = tl.load(weight_ptrs + start, eviction_policy="evict_first")
        else:
            inside = start + k < K
            x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        acc += sums_of_vectors(weight, x[None, :], VECTOR)
    total = tl.sum(acc, axis=1)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + expert * (2 * N) + row)
    gate, up = tl.split(tl.reshape(total, [BLOCK_N, 2]))
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + pair * N + column, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=column < N)


@triton.jit
def _down_one_by_one_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, ids_ptr, weights_ptr, residual_ptr, shared_ptr, gate_ptr, gate_stride,
    next_scaled_ptr, next_squares_ptr, next_weight_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, VECTOR: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out[token] = residual and shared expert + the weighted sum of its experts' weight [experts, N, K] @ x,
    GROUP experts at a time; grid (blocks of N, tokens).

    The choice of experts was made before the kernel that computes x, so the first weights are loaded before x is there.
    """
    token = tl.program_id(1)
    lane = tl.arange(0, GROUP * BLOCK_N)
    member = lane // BLOCK_N
    row = tl.minimum(tl.program_id(0) * BLOCK_N + lane % BLOCK_N, N - 1)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([GROUP * BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for first in tl.static_range(0, TOP_K, GROUP):
        pair = token * TOP_K + first + member
        chosen = first + member < TOP_K
        # not from the first-level cache: the kernel that wrote these is done, but this one has not waited for it
        expert = tl.load(ids_ptr + pair, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
        share = tl.load(weights_ptr + pair, mask=chosen, other=0.0, cache_modifier=".cg")
        if scale_ptr is not None:
            share *= tl.load(scale_ptr + expert * N + row)
        weight_ptrs = weight_ptr + expert[:, None] * (N * K) + row[:, None] * K + k[None, :]
        x_ptrs = x_ptr + pair[:, None] * K + k[None, :]
        for start in range(0, K, BLOCK_K):
            inside = chosen[:, None] & (start + k < K)[None, :]
            weight = tl.load(weight_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
            if first == 0:
                wait_for_inputs(OVERLAP)
            x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            acc += sums_of_vectors(weight, x, VECTOR) * share[:, None]
    total = tl.sum(tl.reshape(tl.sum(acc, axis=1), [GROUP, BLOCK_N]), axis=0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    extras = _residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    rounded = (extras + total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + token * tl.num_programs(0) + tl.program_id(0)
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)


@triton.jit(do_not_specialize=["max_tiles"])
def _tiles_kernel(
    out_ptr, x_ptr, x_scale_ptr, weight_ptr, scale_ptr, order_ptr, tiles_ptr, max_tiles,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out [pairs, N]; one program: BLOCK_N outputs of one tile's pairs.

    GATED: x has a row a token, weight is [experts, 2 * N, K], and out is silu(gate) * up. Otherwise x has a row a pair,
    and weight is [experts, N, K]. If they are fp8, each has a scale a row.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    tile, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK_N
    lane = tl.arange(0, ROWS)
    if GATED:  # gate and up next to each other
        row = tl.minimum(first + lane // 2, N - 1) + lane % 2 * N
    else:
        row = tl.minimum(first + lane, N - 1)
    wait_for_inputs(OVERLAP)
    count = tl.load(tiles_ptr + 2 * max_tiles + tile)
    if count > 0:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        member = tl.arange(0, BLOCK_M)
        inside = (member < count)[:, None]
        pair = tl.load(order_ptr + tl.load(tiles_ptr + max_tiles + tile) + member, mask=member < count, other=0)
        source = (pair // TOP_K if GATED else pair).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + source[:, None] * K + k[None, :]
        weight_ptrs = weight_ptr + expert * (ROWS // BLOCK_N * N * K) + row[:, None] * K + k[None, :]
        if SWAP:
            acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, ROWS], tl.float32)
        for start in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                weight = tl.load(weight_ptrs + start)
                x = tl.load(x_ptrs + start, mask=inside, other=0.0)
            else:
                rest = (start + k < K)[None, :]
                weight = tl.load(weight_ptrs + start, mask=rest, other=0.0)
                x = tl.load(x_ptrs + start, mask=inside & rest, other=0.0)
            if SWAP:
                acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if SWAP:
            acc = tl.trans(acc)
        if scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr + source, mask=member < count, other=0.0)
            acc *= x_scale[:, None] * tl.load(scale_ptr + expert * (ROWS // BLOCK_N * N) + row)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
            acc = silu(gate) * up
        column = first + tl.arange(0, BLOCK_N)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside & (column < N)[None, :])


@triton.jit
def _sum_kernel(
    out_ptr, x_ptr, weights_ptr, residual_ptr, shared_ptr, gate_ptr, gate_stride,
    next_scaled_ptr, next_squares_ptr, next_weight_ptr,
    N: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute out[token] = residual and shared expert + the weighted sum of x [pairs, N] over its pairs. The grid is
    (tokens * blocks of N,), since its other dimensions end at 65535."""
    wait_for_inputs(OVERLAP)
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    total = _residual_and_shared(residual_ptr, shared_ptr, gate_ptr, gate_stride, token, column, inside, N)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        x = tl.load(x_ptr + pair * N + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * x
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * N + column, rounded, mask=inside)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + program
        half_norm_row(out, column, inside, next_scaled_ptr + token * N, square_ptr, next_weight_ptr)


class SwigluClamp(NamedTuple):
    """Describes gpt-oss's activation, in place of silu(gate) * up: gate * sigmoid(alpha * gate) * (up + 1), where
    gate is at most `limit` and up is within +-limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """Holds one sparse layer's weights on this rank, contiguous, and how tokens are routed. The experts' weights have
    the router's dtype, or are fp8 with scales."""

    norm_weight: Tensor | None
    """# [hidden]: the input goes through an RMS norm first; None: it comes normed"""
    eps: float
    router: Tensor
    """# [experts, hidden], and one more row if the shared expert has a gate"""
    w13: Tensor
    """# [experts, 2 * n, hidden], gate above up"""
    w2: Tensor
    """# [experts, hidden, n]"""
    top_k: int
    renormalize: bool
    """A token's weights are divided by their sum over its experts."""
    invariant: bool = False
    """A token's output must have the same bits whatever else is in the batch."""
    scoring: Scoring = SOFTMAX
    next_norm: Tensor | None = None
    """# [hidden]: weight of the norm of the sum with the residual, if the linear that reads it takes it HalfNormed;
    None: the sum is handed on whole"""
    w13_scale: Tensor | None = None
    """# [experts, 2 * n] fp32, the factor of each output; None: weights are not fp8"""
    w2_scale: Tensor | None = None
    """# [experts, hidden] fp32"""
    router_bias: Tensor | None = None
    """# [experts], added to the router's logits"""
    w13_bias: Tensor | None = None
    """# [experts, 2 * n], added before the activation"""
    w2_bias: Tensor | None = None
    """# [experts, hidden], added to an expert's output, which is then weighted; None: another rank adds it"""
    clamp: SwigluClamp | None = None
    """None: the activation is silu(gate) * up"""


def fused_moe(
    x: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    config: MoeConfig | None = None,
) -> tuple[Tensor | HalfNormed, Tensor]:
    """Return the layer's output [T, hidden] for x [T, hidden], and each token's experts [T, top_k] int32, best first.

    A token's experts are weighted by the softmax (or as `scoring` says), in fp32, of its router logits in x's dtype.
    `shared` [T, hidden]: the shared expert's output, added times the sigmoid of its gate if it has one. `residual`
    [T, hidden] contiguous: the sum with it is written over it, and returned; it may be x. Then, up to
    HALF_NORMED_TOKENS and if the layer has a `next_norm`, the result is HalfNormed.
    """
    num_tokens, hidden = x.shape
    num_experts, n = experts.w13.shape[0], experts.w13.shape[1] // 2
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device) if residual is None else residual
    if not num_tokens:
        return out, torch.empty((0, experts.top_k), dtype=torch.int32, device=x.device)
    if config is None:
        size = experts.w13.element_size()
        config = pick_moe_config(num_tokens, experts.top_k, num_experts, size, DEVICE_FAMILY, experts.invariant)
    one_by_one = config.block_m == 1
    routing, logits, normed = norm_and_route(
        x, experts.norm_weight, experts.eps, experts.router, num_experts, experts.top_k, experts.renormalize,
        0 if one_by_one else config.block_m, experts.invariant, experts.scoring,
    )  # fmt: skip
    inner = torch.empty((num_tokens * experts.top_k, n), dtype=x.dtype, device=x.device)
    gated = logits.shape[1] > num_experts
    gate = (shared, logits[:, num_experts:] if gated else None, logits.stride(0))
    run = _one_by_one if one_by_one else _by_tiles
    return run(out, normed, inner, experts, routing, (residual, *gate), config), routing.ids


Extras = tuple[Tensor | None, Tensor | None, Tensor | None, int]
"""(residual, shared expert's output, its gate's logits, their stride)"""


def _next_norm(experts: Experts, residual: Tensor | None, num_tokens: int) -> Tensor | None:
    """Return the weight of the norm that is to be half done; None: none is."""
    return experts.next_norm if residual is not None and num_tokens <= HALF_NORMED_TOKENS else None


def _one_by_one(
    out: Tensor, x: Tensor, inner: Tensor, experts: Experts, routing: Routing, extras: Extras, config: MoeConfig
) -> Tensor | HalfNormed:
    (num_tokens, hidden), (pairs, n) = x.shape, inner.shape
    w2, top_k = experts.w2, experts.top_k
    up, down = _fit(config.up, n, hidden, w2), _fit(config.down, hidden, n, w2)
    blocks = -(-hidden // down.block_n)
    result, following = half_normed_over(out, _next_norm(experts, extras[0], num_tokens), blocks)
    _up_one_by_one_kernel[(-(-n // up.block_n), pairs)](
        inner, x, experts.w13, experts.w13_scale, routing.ids,
        N=n, K=hidden, TOP_K=top_k, BLOCK_N=up.block_n, BLOCK_K=up.block_k,
        VECTOR=vector_of(w2), num_warps=up.num_warps, **overlap(),
    )  # fmt: skip
    _down_one_by_one_kernel[(blocks, num_tokens)](
        out, inner, w2, experts.w2_scale, routing.ids, routing.weights, *extras, *following,
        N=hidden, K=n, TOP_K=top_k, BLOCK_N=down.block_n, BLOCK_K=down.block_k,
        GROUP=min(down.group, next_power_of_2(top_k)), VECTOR=vector_of(w2), num_warps=down.num_warps, **overlap(),
    )  # fmt: skip
    return result


def _by_tiles(
    out: Tensor, x: Tensor, inner: Tensor, experts: Experts, routing: Routing, extras: Extras, config: MoeConfig
) -> Tensor | HalfNormed:
    (num_tokens, hidden), (pairs, n) = x.shape, inner.shape
    outer = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    tiles, w13, w2 = routing.tiles.shape[1], experts.w13, experts.w2
    for target, source, weight, scale, gated, tile in (
        (inner, x, w13, experts.w13_scale, True, _fit(config.up, n, hidden, w2)),
        (outer, inner, w2, experts.w2_scale, False, _fit(config.down, hidden, n, w2)),
    ):
        values, x_scale, *_ = (source, None) if scale is None else quantize_per_token(source, weight.dtype)
        _tiles_kernel[(tiles * -(-target.shape[1] // tile.block_n),)](
            target, values, x_scale, weight, scale, routing.order, routing.tiles, tiles,
            N=target.shape[1], K=source.shape[1], TOP_K=experts.top_k, GATED=gated, BLOCK_M=config.block_m,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SWAP=tile.swap,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(),
        )  # fmt: skip
    block = min(1024 if num_tokens > 64 else 256, next_power_of_2(hidden))
    blocks = -(-hidden // block)
    result, following = half_normed_over(out, _next_norm(experts, extras[0], num_tokens), blocks)
    _sum_kernel[(num_tokens * blocks,)](
        out, outer, routing.weights, *extras, *following, N=hidden, TOP_K=experts.top_k, BLOCK_N=block,
        num_warps=block // 256 or 1, **overlap(),
    )  # fmt: skip
    return result


def _fit(tile: Tile, n: int, k: int, weight: Tensor) -> Tile:
    """Return `tile` with blocks no larger than the weight. Matrix units take 16 numbers of a row or more, 32 in fp8."""
    least = 32 if weight.element_size() == 1 else 16
    block_n, block_k = min(tile.block_n, max(16, next_power_of_2(n))), min(tile.block_k, max(least, next_power_of_2(k)))
    return replace(tile, block_n=block_n, block_k=block_k)


def fused_moe_reference(
    x: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    config: MoeConfig | None = None,
) -> tuple[Tensor | HalfNormed, Tensor]:
    """Compute as the kernels do: tokens are rounded if weights are fp8, unless `config` computes each by itself."""
    num_experts = experts.w13.shape[0]
    normed = x if experts.norm_weight is None else rms_norm_reference(x, experts.norm_weight, experts.eps)
    logits = F.linear(normed, experts.router, experts.router_bias)
    chosen = logits[:, :num_experts]
    ids, weights, *_ = route_reference(chosen, experts.top_k, experts.renormalize, scoring=experts.scoring)
    out = torch.zeros_like(x)
    rounds = experts.w13_scale is not None and (config is None or config.block_m > 1)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        both = _product_reference(normed[token], experts.w13, experts.w13_scale, experts.w13_bias, expert, rounds)
        inner = gated_reference(both, experts.clamp)
        own = _product_reference(inner, experts.w2, experts.w2_scale, experts.w2_bias, expert, rounds)
        out.index_add_(0, token, (own * weights[token, choice, None]).to(x.dtype))
    if shared is not None:
        out += torch.sigmoid(logits[:, num_experts:]) * shared if logits.shape[1] > num_experts else shared
    if residual is None:
        return out, ids
    residual.add_(out)
    next_norm = _next_norm(experts, residual, len(x))
    return residual if next_norm is None else half_norm_reference(residual, next_norm), ids


def gated_reference(both: Tensor, clamp: SwigluClamp | None) -> Tensor:
    """Return the activation # [T, n] of gate beside up # [T, 2 * n], which it may overwrite."""
    gate, up = both.chunk(2, dim=-1)
    if clamp is None:
        return F.silu(gate).mul_(up)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)


def _product_reference(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, expert: int, rounds: bool
) -> Tensor:
    """Return x [T, K] @ weight[expert].T + bias[expert]; `rounds`: of x rounded to the weight's type."""
    one = weight[expert]
    if scale is not None:
        one = (one.float() * scale[expert, :, None]).to(x.dtype)
    taken = quantize_per_token_reference(x, weight.dtype).dequantize(x.dtype) if rounds else x
    return F.linear(taken, one, None if bias is None else bias[expert])
