"""Computes the experts of a sparse layer: a product to gate and up, the activation, a product down, the weighted sum.

With few tokens, a program reads one expert's rows for one token, and the second kernel adds up a token's experts. With
more, (token, expert) pairs are sorted into tiles of one expert (moe_route.py), and a third kernel adds up a token's
experts in the order in which it chose them. Either way no sum depends on which program finishes first. The kernels are
in moe_kernels.py.

Shared experts of the routed ones' form may be further experts to these kernels (`Joined`): as long as their weights
are read no more often than a dense product reads them, that spares launches of their own.

Weights may be fp8 with a scale an output: tiles are then rounded to fp8 too, since matrix units take that without
unpacking, while a token by itself is not rounded. Weights of 4 and 8 bits beside activations of 16 (tiled.py) have
kernels of their own, for few tokens in moe_vector.py, for more in moe_tiled.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, next_power_of_2, overlap
from headrace.kernels.activation import GATES
from headrace.kernels.fp8 import Rounding, quantize, quantize_reference
from headrace.kernels.gemm import vector_of
from headrace.kernels.gemm_config import BUCKETS
from headrace.kernels.gemm_epilogue import ACTIVATIONS
from headrace.kernels.moe_adapters import ExpertAdapters, SortedAdapters, added_reference
from headrace.kernels.moe_config import FEW_TOKENS, Kind, MoeConfig, Tile, pick_moe_config
from headrace.kernels.moe_kernels import down_one_by_one_kernel, sum_kernel, tiles_kernel, up_one_by_one_kernel
from headrace.kernels.moe_route import SOFTMAX, Routing, Scoring, norm_and_route, route_reference, routing_here
from headrace.kernels.moe_tiled import launch_tiled_experts
from headrace.kernels.moe_vector import launch_vector_down, launch_vector_up
from headrace.kernels.norm import (
    HalfNormed,
    half_norm_reference,
    half_normed_over,
    rms_norm_reference,
)
from headrace.kernels.tiled import TiledWeight

Shared = Tensor | Callable[[Tensor], Tensor] | None
"""The output of a shared expert # [T, hidden], or what computes it of the layer's input, normed; None: there is none"""
LEAST_ADAPTED = 1 + max(FEW_TOKENS.values())
"""tokens that are computed by tiles on every device"""
READ_AGAIN = 16 << 20
"""Bytes that tiles of shared experts may read more than once: an L2 cache gives as many while a kernel is launched or
two. Not measured."""
HALF_NORMED_TOKENS = BUCKETS[-1]
"""the most tokens for which the next linear may be one of our kernels, which finish a norm"""


class SwigluClamp(NamedTuple):
    """Describes gpt-oss's activation, in place of activation(gate) * up: gate * sigmoid(alpha * gate) * (up + 1), where
    gate is at most `limit` and up is within +-limit."""

    alpha: float
    limit: float


class Joined(NamedTuple):
    """Holds shared experts, a feed-forward `number` times as wide as a routed expert, whose tensors lie right behind
    those of the routed ones. To kernels they are `number` further experts, which all tokens go to."""

    number: int
    w13: Tensor
    """# [number * 2 * n, hidden], gates above ups"""
    w2: Tensor
    """# [hidden, number * n]"""
    w13_scale: Tensor | None
    """# [number * 2 * n] fp32; None: weights are not fp8"""
    w2_scale: Tensor | None
    """# [hidden] fp32"""

    def spares_launches(self, shared: Shared, tiles: int) -> bool:
        """Tell whether kernels are to take them for experts, where each has so many `tiles` of tokens."""
        if isinstance(shared, Tensor):
            return False
        return shared is None or (tiles - 1) * (self.w13.nbytes + self.w2.nbytes) <= READ_AGAIN


@dataclass(frozen=True)
class Experts:
    """Holds one sparse layer's weights on this rank, contiguous, and how tokens are routed. The experts' weights have
    the router's dtype, or are fp8 with scales, or both are tiled. Biases have the router's dtype."""

    norm_weight: Tensor | None
    """# [hidden]: the input goes through an RMS norm first; None: it comes normed"""
    eps: float
    router: Tensor
    """# [experts, hidden], and one more row if the shared expert has a gate"""
    w13: Tensor | TiledWeight
    """# [experts, 2 * n, hidden], gate above up; tiled as `gated`"""
    w2: Tensor | TiledWeight
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
    """# [experts], added to the router's logits; only where the shared expert has no gate"""
    w13_bias: Tensor | None = None
    """# [experts, 2 * n], added before the activation"""
    w2_bias: Tensor | None = None
    """# [experts, hidden], added to an expert's output, which is then weighted; None: another rank adds it"""
    clamp: SwigluClamp | None = None
    """None: gates go through `activation`"""
    w13_rounding: Rounding | None = None
    """how tiles of fp8 weights have their input rounded; None: each token with a scale of its own. The reference rounds
    the input of other weights too, where it is given."""
    w2_rounding: Rounding | None = None
    scales_input: bool = False
    """a token's weight of an expert is a factor of what the expert is given, not of its output (Llama 4)"""
    place: tuple[int, int] | None = None
    """(the first of these experts, how many the router chooses among); None: these are all"""
    is_token: Tensor | None = None
    """# [rows or more] bool, where some experts are elsewhere: rows that are none go to no expert; None: all are"""
    activation: str = "silu"
    """a key of GATES"""
    router_norm: Tensor | None = None
    """# [hidden]: weights of the norm that the router reads; None: it reads what the experts read"""
    joined: Joined | None = None
    """shared experts that kernels may take for experts; they have no biases, and with `scales_input` no gate"""

    @property
    def num_experts(self) -> int:
        """Counts the experts that are here."""
        return len(self.w13.codes if isinstance(self.w13, TiledWeight) else self.w13)

    @property
    def num_routed(self) -> int:
        """Counts the experts that the router chooses among."""
        return self.num_experts if self.place is None else self.place[1]

    @property
    def inner_size(self) -> int:
        """The n of one expert on this rank."""
        return (self.w13.out_features if isinstance(self.w13, TiledWeight) else self.w13.shape[1]) // 2

    @property
    def kind(self) -> Kind:
        """Tells how the experts' weights are held."""
        if isinstance(self.w13, TiledWeight):
            return "tiled4" if self.w13.bits == 4 else "tiled8"
        return "fp8" if self.w13_scale is not None else "float" if self.w13.element_size() == 4 else "half"


def fused_moe(
    x: Tensor,
    experts: Experts,
    shared: Shared = None,
    residual: Tensor | None = None,
    config: MoeConfig | None = None,
    adapters: ExpertAdapters | None = None,
) -> tuple[Tensor | HalfNormed, Tensor]:
    """Return the layer's output [T, hidden] for x [T, hidden], and each token's experts [T, top_k] int32, best first.

    A token's experts are weighted by the softmax (or as `scoring` says), in fp32, of its router logits in x's dtype.
    `shared` is added times the sigmoid of its gate if it has one; what computes it is not called where `joined` experts
    spare that. If it is None, they are computed unless there are `adapters`. `residual` [T, hidden] contiguous: the sum
    with it is written over it, and returned; it may be x. Then, up to HALF_NORMED_TOKENS and if the layer has a
    `next_norm`, the result is HalfNormed. Experts that are not here add nothing. With `adapters` even few tokens are
    computed by tiles, and a `config` must say so.
    """
    num_tokens, hidden = x.shape
    num_experts, n = experts.num_experts, experts.inner_size
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device) if residual is None else residual
    if not num_tokens:
        return out, torch.empty((0, experts.top_k), dtype=torch.int32, device=x.device)
    if config is None:
        most = num_tokens if adapters is None else max(num_tokens, LEAST_ADAPTED)
        config = pick_moe_config(most, experts.top_k, num_experts, experts.kind, DEVICE_FAMILY, experts.invariant)
    alone = config.block_m == 1
    here = experts.place is None
    gated, scoring, top_k = len(experts.router) > experts.num_routed, experts.scoring, experts.top_k
    joined = experts.joined if adapters is None else None
    if joined is not None and joined.spares_launches(shared, -(-num_tokens // config.block_m)):
        scoring, top_k, shared = scoring._replace(joined=joined.number, gated=gated), top_k + joined.number, None
    routing, logits, normed = norm_and_route(
        x, experts.norm_weight, experts.eps, experts.router, experts.num_routed, experts.top_k, experts.renormalize,
        config.block_m if here and not alone else 0, experts.invariant, scoring, experts.router_bias,
        experts.router_norm,
    )  # fmt: skip
    ids = routing.ids[:, : experts.top_k]
    if experts.place is not None:
        block_m = 0 if alone else config.block_m
        routing = routing_here(routing, experts.place[0], num_experts, block_m, experts.is_token)
    inner = torch.empty((num_tokens * top_k, n), dtype=x.dtype, device=x.device)
    shared = shared(normed) if callable(shared) else shared
    gate = (shared, logits[:, experts.num_routed :] if gated else None, logits.stride(0))
    if alone:
        return _one_by_one(out, normed, inner, experts, routing, (residual, *gate), config), ids
    first = 0 if experts.place is None else experts.place[0]
    adapted = None if adapters is None else SortedAdapters.of(adapters, ids, first, num_experts)
    return _by_tiles(out, normed, inner, experts, routing, (residual, *gate), config, adapted), ids


def _shares(experts: Experts, routing: Routing) -> tuple[Tensor | None, Tensor | None]:
    """Return the pairs' factors of what experts are given, and of their outputs; None: they are one."""
    return (routing.weights, None) if experts.scales_input else (None, routing.weights)


Extras = tuple[Tensor | None, Tensor | None, Tensor | None, int]
"""(residual, shared expert's output, its gate's logits, their stride)"""


def _joined_options(experts: Experts, joined: int) -> dict[str, int]:
    """Return the options by which kernels find so many joined experts; one alone lies as a routed one does."""
    return {"ROUTED": experts.num_experts, "JOINED": joined} if joined > 1 else {}


def _next_norm(experts: Experts, residual: Tensor | None, num_tokens: int) -> Tensor | None:
    """Return the weight of the norm that is to be half done; None: none is."""
    return experts.next_norm if residual is not None and num_tokens <= HALF_NORMED_TOKENS else None


def gate_options(experts: Experts) -> dict[str, float]:
    """Return the options by which kernels gate."""
    alpha, limit = experts.clamp or (1.0, 0.0)
    return {"KIND": ACTIVATIONS[experts.activation], "LIMIT": limit, "ALPHA": alpha}


def _one_by_one(
    out: Tensor, x: Tensor, inner: Tensor, experts: Experts, routing: Routing, extras: Extras, config: MoeConfig
) -> Tensor | HalfNormed:
    (num_tokens, hidden), (pairs, n) = x.shape, inner.shape
    w13, w2, gates, top_k = experts.w13, experts.w2, gate_options(experts), pairs // num_tokens
    joined = _joined_options(experts, top_k - experts.top_k)
    ids, (share, out_share) = routing.ids, _shares(experts, routing)
    down = config.down if isinstance(w2, TiledWeight) else _fit(config.down, hidden, n, w2)
    blocks = -(-hidden // down.block_n)
    result, following = half_normed_over(out, _next_norm(experts, extras[0], num_tokens), blocks)
    if isinstance(w13, TiledWeight):
        launch_vector_up(inner, x, w13, experts.w13_bias, ids, share, config.up, gates)
    else:
        up = _fit(config.up, n, hidden, w13)
        up_one_by_one_kernel[(-(-n // up.block_n), pairs)](
            inner, x, w13, experts.w13_scale, experts.w13_bias, ids, share,
            N=n, K=hidden, TOP_K=top_k, BLOCK_N=up.block_n, BLOCK_K=up.block_k, VECTOR=vector_of(w13),
            num_warps=up.num_warps, **gates, **joined, **overlap(),
        )  # fmt: skip
    if isinstance(w2, TiledWeight):
        launch_vector_down(out, inner, w2, experts.w2_bias, ids, out_share, extras, following, down)
    else:
        down_one_by_one_kernel[(blocks, num_tokens)](
            out, inner, w2, experts.w2_scale, experts.w2_bias, ids, out_share, *extras, *following,
            N=hidden, K=n, TOP_K=top_k, BLOCK_N=down.block_n, BLOCK_K=down.block_k, VECTOR=vector_of(w2),
            MEMBERS=min(down.group, next_power_of_2(top_k)), num_warps=down.num_warps, **joined, **overlap(),
        )  # fmt: skip
    return result


def _by_tiles(
    out: Tensor, x: Tensor, inner: Tensor, experts: Experts, routing: Routing, extras: Extras, config: MoeConfig,
    adapted: SortedAdapters | None = None,
) -> Tensor | HalfNormed:  # fmt: skip
    (num_tokens, hidden), pairs = x.shape, len(inner)
    make = torch.empty if experts.place is None else torch.zeros  # no tile writes the pairs of experts elsewhere
    outer = make((pairs, hidden), dtype=x.dtype, device=x.device)
    tiles, gates, chosen = routing.tiles.shape[1], gate_options(experts), pairs // num_tokens
    joined = _joined_options(experts, chosen - experts.top_k)
    in_share, out_share = _shares(experts, routing)
    for target, source, weight, scale, bias, rounding, share, tile in (
        (inner, x, experts.w13, experts.w13_scale, experts.w13_bias, experts.w13_rounding, in_share, config.up),
        (outer, inner, experts.w2, experts.w2_scale, experts.w2_bias, experts.w2_rounding, None, config.down),
    ):
        gated, added = target is inner, None
        top_k = chosen if gated else 1
        if adapted is not None:
            added = adapted.added(source, adapted.adapters.w13 if gated else adapted.adapters.w2, top_k)
        if isinstance(weight, TiledWeight):
            launch_tiled_experts(
                target, source, weight, added, bias, share, routing, top_k, config.block_m, tile, gates
            )
            continue
        tile = _fit(tile, target.shape[1], source.shape[1], weight)
        values, x_scale = source, None
        if scale is not None:
            values, x_scale, *_ = quantize(source, rounding or Rounding(weight.dtype))
        tiles_kernel[(tiles * -(-target.shape[1] // tile.block_n),)](
            target, values, x_scale, weight, scale, added, bias, share, routing.order, routing.tiles, tiles, None,
            N=target.shape[1], K=source.shape[1], TOP_K=top_k, GATED=gated, IN_SLOT=0, BLOCK_M=config.block_m,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SWAP=tile.swap,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **gates, **joined, **overlap(),
        )  # fmt: skip
    # Blocks of another size are compiled otherwise, and now and then round the last bit to another side.
    block = min(1024 if num_tokens > 64 or experts.invariant else 256, next_power_of_2(hidden))
    blocks = -(-hidden // block)
    result, following = half_normed_over(out, _next_norm(experts, extras[0], num_tokens), blocks)
    sum_kernel[(num_tokens * blocks,)](
        out, outer, out_share, *extras, *following, N=hidden, TOP_K=chosen, BLOCK_N=block,
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
    shared: Shared = None,
    residual: Tensor | None = None,
    config: MoeConfig | None = None,
    adapters: ExpertAdapters | None = None,
) -> tuple[Tensor | HalfNormed, Tensor]:
    """Compute as the kernels do: tokens are rounded if weights are fp8, unless `config` computes each by itself."""
    normed = x if experts.norm_weight is None else rms_norm_reference(x, experts.norm_weight, experts.eps)
    read = normed if experts.router_norm is None else rms_norm_reference(x, experts.router_norm, experts.eps)
    logits = F.linear(read, experts.router, experts.router_bias)
    chosen = logits[:, : experts.num_routed]
    ids, weights, *_ = route_reference(chosen, experts.top_k, experts.renormalize, scoring=experts.scoring)
    out = torch.zeros_like(x)
    rounds = config is None or config.block_m > 1
    up = (experts.w13, experts.w13_scale, experts.w13_bias, experts.w13_rounding)
    down = (experts.w2, experts.w2_scale, experts.w2_bias, experts.w2_rounding)
    first = 0 if experts.place is None else experts.place[0]
    for expert in ids.unique().tolist():
        goes_there = ids == expert
        if experts.is_token is not None:
            goes_there &= experts.is_token[: len(ids), None]
        token, choice = goes_there.nonzero(as_tuple=True)
        expert -= first
        if not 0 <= expert < experts.num_experts:
            continue
        share = weights[token, choice, None]
        both = _product_reference(normed[token], *up, expert, rounds, share if experts.scales_input else None)
        if adapters is not None:
            of_token, num_experts = adapters.slots[token], experts.num_experts
            added = added_reference(normed[token], adapters.w13, of_token, expert, num_experts)
            both += (added * share).to(x.dtype) if experts.scales_input else added
        gate, up_half = both.chunk(2, dim=-1)
        inner = gated_reference(gate, up_half, experts)
        own = _product_reference(inner, *down, expert, rounds)
        if adapters is not None:
            own += added_reference(inner, adapters.w2, of_token, expert, num_experts)
        out.index_add_(0, token, own if experts.scales_input else (own * share).to(x.dtype))
    shared = shared(normed) if callable(shared) else shared
    if shared is None and experts.joined is not None and adapters is None:
        shared = _joined_reference(normed, experts, experts.joined, rounds)
    if shared is not None:
        gated = logits.shape[1] > experts.num_routed
        out += torch.sigmoid(logits[:, experts.num_routed :]) * shared if gated else shared
    if residual is None:
        return out, ids
    residual.add_(out)
    next_norm = _next_norm(experts, residual, len(x))
    return residual if next_norm is None else half_norm_reference(residual, next_norm), ids


def _joined_reference(x: Tensor, experts: Experts, joined: Joined, rounds: bool) -> Tensor:
    """Return what shared experts make of x [T, hidden], each by itself, as `rounds` says."""
    scales = [None if scale is None else scale[None] for scale in (joined.w13_scale, joined.w2_scale)]
    both = _product_reference(x, joined.w13[None], scales[0], None, experts.w13_rounding, 0, rounds)
    gate, up = both.chunk(2, dim=-1)
    inner, out = gated_reference(gate, up, experts), torch.zeros_like(x)
    for own, weight in zip(inner.chunk(joined.number, dim=-1), joined.w2.chunk(joined.number, dim=-1), strict=True):
        out += _product_reference(own, weight[None], scales[1], None, experts.w2_rounding, 0, rounds)
    return out


def gated_reference(gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
    """Return the activation of gate and up, which it may overwrite."""
    clamp = experts.clamp
    if clamp is None:
        return GATES[experts.activation](gate).mul_(up)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)


def _product_reference(
    x: Tensor,
    weight: Tensor | TiledWeight,
    scale: Tensor | None,
    bias: Tensor | None,
    rounding: Rounding | None,
    expert: int,
    rounds: bool,
    share: Tensor | None = None,
) -> Tensor:
    """Return x [T, K] @ weight[expert].T + bias[expert]; `rounds`: of rounded x, to the weight's type if it is fp8.
    `share`: factors [T, 1] of the product."""
    if rounding is None and isinstance(weight, Tensor) and scale is not None:
        rounding = Rounding(weight.dtype)
    if rounds and rounding is not None:
        x = quantize_reference(x, rounding).dequantize(x.dtype)
    if isinstance(weight, TiledWeight):
        one = weight.expert(expert).dequantize(x.dtype)
    elif scale is not None:
        one = (weight[expert].float() * scale[expert, :, None]).to(x.dtype)
    else:
        one = weight[expert]
    if share is None:
        return F.linear(x, one, None if bias is None else bias[expert])
    product = (F.linear(x, one) * share).to(x.dtype)
    return product if bias is None else product + bias[expert]
