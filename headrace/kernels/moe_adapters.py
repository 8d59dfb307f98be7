"""Adds what low-rank adapters (LoRA, arXiv 2106.09685) make of experts' inputs, to tokens with different ones or none.

A slot's adapter of an expert is an expert of its own: (token, expert) pairs are sorted by both, and go through the
products of moe_kernels.py twice, for first and for second matrices. What comes out is added to the products of the
experts themselves, whatever the form of their weights, before they are gated or weighted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap
from headrace.kernels.adapters import AdapterWeights
from headrace.kernels.moe_kernels import tiles_kernel
from headrace.kernels.moe_route import Routing, routing_of

BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 64
"""pairs, outputs and inputs at a time: not measured"""


class ExpertAdapters(NamedTuple):
    """Holds the adapters of one layer's experts: of each, `a` and `b` have the rows one behind another's."""

    slots: Tensor
    """# [num_tokens] int32: each token's slot, negative for a token that has no adapter"""
    w13: AdapterWeights
    """of gate and up, two parts"""
    w2: AdapterWeights


class SortedAdapters(NamedTuple):
    """Holds the same, and the pairs of a step that have some."""

    adapters: ExpertAdapters
    num_experts: int
    routing: Routing
    """by slot and expert"""

    @classmethod
    def of(cls, adapters: ExpertAdapters, ids: Tensor, first: int, num_experts: int) -> SortedAdapters:
        """Sort the pairs of `ids` # [num_tokens, top_k] int32 whose experts are here: `num_experts` from `first` on."""
        slot, own, every = adapters.slots[:, None], ids - first, len(adapters.w13.a) * num_experts
        counts = (slot >= 0) & (own >= 0) & (own < num_experts)
        of_slot = torch.where(counts, slot * num_experts + own, every)
        return cls(adapters, num_experts, routing_of(of_slot, every, BLOCK_M))

    def added(self, x: Tensor, weights: AdapterWeights, top_k: int) -> Tensor:
        """Return what the adapters' `weights` make of x # [pairs / top_k, inputs]: # [pairs, outputs], zeros for pairs
        without any."""
        order, tiles = self.routing.order, self.routing.tiles
        held, rank, pairs = self.num_experts, weights.rank, len(order)
        parts = weights.a.shape[1] // (held * rank)
        s = x.new_empty(pairs, parts * rank)
        out = x.new_zeros(pairs, weights.b.shape[1] // held)
        _product(s, x, weights.a, order, tiles, top_k, held)
        if parts > 1:  # each is an expert, and its outputs are a row: pairs of one have their places in all of them
            part = torch.arange(parts, dtype=torch.int32, device=x.device)[:, None]
            expert, begin, count = tiles[:, None]
            of_parts = (expert * parts + part, begin + part * pairs, count.expand(parts, -1))
            order, tiles = (order * parts + part).flatten(), torch.stack(of_parts).flatten(1)
        _product(out.view(pairs * parts, -1), s.view(pairs * parts, rank), weights.b, order, tiles, 1, held * parts)
        return out


def _product(out: Tensor, x: Tensor, weight: Tensor, order: Tensor, tiles: Tensor, top_k: int, in_slot: int) -> None:
    """Write the rows of x times the matrices of their pairs to `out`; a slot of `weight` has `in_slot` matrices."""
    (_, n), k, most = out.shape, x.shape[1], tiles.shape[1]
    block_n, block_k = min(BLOCK_N, max(16, next_power_of_2(n))), min(BLOCK_K, max(16, next_power_of_2(k)))
    tiles_kernel[(most * -(-n // block_n),)](
        out, x, None, weight, None, None, None, None, order, tiles, most, weight.stride(0),
        N=n, K=k, TOP_K=top_k, GATED=False, IN_SLOT=in_slot, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k,
        SWAP=False, KIND=0, LIMIT=0.0, ALPHA=1.0, num_warps=4, num_stages=3, **overlap(),
    )  # fmt: skip


def added_reference(x: Tensor, weights: AdapterWeights, slots: Tensor, expert: int, num_experts: int) -> Tensor:
    """Return what adapters make of the tokens x # [tokens, inputs] of one expert # [tokens, outputs]."""
    out = x.new_zeros(len(x), weights.b.shape[1] // num_experts)
    for slot in slots[slots >= 0].unique().tolist():
        own = slots == slot
        a = weights.a[slot].unflatten(0, (num_experts, -1, weights.rank))[expert].float()
        b = weights.b[slot].unflatten(0, (num_experts, len(a), -1))[expert].float()
        s = torch.einsum("ti,pri->tpr", x[own].float(), a).to(x.dtype).float()
        out[own] = torch.einsum("tpr,por->tpo", s, b).flatten(1).to(x.dtype)
    return out
