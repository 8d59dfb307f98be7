"""Adds what low-rank adapters (LoRA, arXiv 2106.09685) make of a linear's input, to tokens with different ones or none.

Adapters lie in slots of stacked memory, and each token names its slot. A program serves the tokens of one block that
have one slot, and ends at once where there are none, so nothing is sorted, the host knows nothing, and a graph may
hold both kernels. Work grows with an adapter's own rank, not with the rank that memory is laid out for. A token's
outputs do not depend on how many tokens there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels._triton import overlap, tl, triton, wait_for_inputs

RANK_STEP = 16
"""Memory is laid out for ranks that are multiples of this, for the matrix units."""
BLOCK_TOKENS, BLOCK_INPUTS, BLOCK_OUTPUTS = 32, 128, 128
MOST_SPLITS = 8
"""Parts into which inputs are divided, so that few tokens keep a GPU busy; their sums are added in order"""


class AdapterWeights(NamedTuple):
    """Holds the adapters of one linear, which may be several of a checkpoint's, fused, over one input."""

    a: Tensor
    """[slots, parts * rank, inputs]: the parts' first matrices, one after the other; rows beyond a rank are zeros"""
    b: Tensor
    """[slots, outputs, rank]: their second matrices, times the adapter's scale; columns beyond a rank are zeros"""
    ranks: Tensor
    """[slots] int32: the largest rank of the parts; 0: the adapter leaves this linear alone"""
    starts: Tensor
    """[parts + 1] int32: the output with which each part begins, and with which the last one ends"""
    sizes: tuple[int, ...]
    """outputs of each part"""

    @property
    def rank(self) -> int:
        """The rank that memory is laid out for."""
        return self.b.shape[2]


@triton.jit
def _shrink_kernel(
    x_ptr, slots_ptr, a_ptr, ranks_ptr, h_ptr, x_stride, num_tokens, inputs, split_inputs,
    RANK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply by first matrices; grid (blocks of tokens, slots, splits x blocks of ROWS)."""
    wait_for_inputs(OVERLAP)
    slot, split = tl.program_id(1), tl.program_id(2) // (ROWS // BLOCK_R)
    row = tl.program_id(2) % (ROWS // BLOCK_R) * BLOCK_R
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    if (tl.max(mine.to(tl.int32), 0) > 0) & (row % RANK < tl.load(ranks_ptr + slot)):
        rows = row + tl.arange(0, BLOCK_R)
        of_rows = a_ptr + (slot.to(tl.int64) * ROWS + rows[:, None]) * inputs
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for first in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, inputs), BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            inside = k < inputs
            x = tl.load(x_ptr + token[:, None] * x_stride + k, mask=mine[:, None] & inside, other=0.0)
            a = tl.load(of_rows + k, mask=inside, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        tl.store(h_ptr + (split * num_tokens + token[:, None]) * ROWS + rows, acc, mask=mine[:, None])


@triton.jit
def _expand_kernel(
    h_ptr, slots_ptr, b_ptr, ranks_ptr, starts_ptr, out_ptr, out_stride, num_tokens, outputs,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply by second matrices and add to outputs; grid (blocks of tokens, slots, blocks of outputs x PARTS)."""
    wait_for_inputs(OVERLAP)
    slot, part = tl.program_id(1), tl.program_id(2) % PARTS
    first = tl.load(starts_ptr + part) + tl.program_id(2) // PARTS * BLOCK_N
    end, rank = tl.load(starts_ptr + part + 1), tl.load(ranks_ptr + slot)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    if (tl.max(mine.to(tl.int32), 0) > 0) & (first < end) & (rank > 0):
        column, r = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        inside = (column < end)[:, None]
        of_columns = b_ptr + (slot.to(tl.int64) * outputs + column[:, None]) * RANK
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, rank, BLOCK_R):
            h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for split in tl.static_range(SPLITS):
                of_split = h_ptr + (split * num_tokens + token[:, None]) * (PARTS * RANK) + part * RANK
                h += tl.load(of_split + step + r, mask=mine[:, None], other=0.0)
            b = tl.load(of_columns + step + r, mask=inside, other=0.0)
            acc = tl.dot(h.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
        places, held = out_ptr + token[:, None] * out_stride + column, mine[:, None] & (column < end)
        out = tl.load(places, mask=held, other=0.0).to(tl.float32) + acc
        tl.store(places, out.to(out_ptr.dtype.element_ty), mask=held)


def shrink_adapters(x: Tensor, slots: Tensor, weights: AdapterWeights) -> Tensor:
    """Return x # [num_tokens, inputs] times each token's first matrices, for `expand_adapters` #
    [splits, num_tokens, parts * rank] float32, to be summed over splits.

    slots # [num_tokens] int32: negative for a token that has no adapter, whose numbers are not written, nor are those
    beyond an adapter's rank.
    """
    num_slots, rows, inputs = weights.a.shape
    num_tokens, rank = x.shape[0], weights.rank
    splits = max(1, min(MOST_SPLITS, inputs // (4 * BLOCK_INPUTS)))
    h = torch.empty(splits, num_tokens, rows, dtype=torch.float32, device=x.device)
    if num_tokens:
        block = next(block for block in (64, 32, RANK_STEP) if rank % block == 0)
        split_inputs = -(-inputs // (splits * BLOCK_INPUTS)) * BLOCK_INPUTS
        _shrink_kernel[(-(-num_tokens // BLOCK_TOKENS), num_slots, splits * (rows // block))](
            x, slots, weights.a, weights.ranks, h, x.stride(0), num_tokens, inputs, split_inputs,
            RANK=rank, ROWS=rows, BLOCK_M=BLOCK_TOKENS, BLOCK_R=block, BLOCK_K=BLOCK_INPUTS, num_warps=4, **overlap(),
        )  # fmt: skip
    return h


def expand_adapters(out: Tensor, h: Tensor, slots: Tensor, weights: AdapterWeights) -> None:
    """Add to out # [num_tokens, at least outputs], whose rows are contiguous, what `shrink_adapters` made times each
    token's second matrices."""
    splits, num_tokens, _ = h.shape
    num_slots, outputs, rank = weights.b.shape
    parts, widest = len(weights.sizes), max(1, *weights.sizes)
    if num_tokens:
        _expand_kernel[(-(-num_tokens // BLOCK_TOKENS), num_slots, -(-widest // BLOCK_OUTPUTS) * parts)](
            h, slots, weights.b, weights.ranks, weights.starts, out, out.stride(0), num_tokens, outputs,
            SPLITS=splits, PARTS=parts, RANK=rank, BLOCK_M=BLOCK_TOKENS, BLOCK_N=BLOCK_OUTPUTS, BLOCK_R=RANK_STEP,
            num_warps=4, num_stages=1, **overlap(),
        )  # fmt: skip


def shrink_adapters_reference(x: Tensor, slots: Tensor, weights: AdapterWeights) -> Tensor:
    h = torch.zeros(x.shape[0], weights.a.shape[1], dtype=torch.float32, device=x.device)
    for slot, a in enumerate(weights.a):
        h = torch.where((slots == slot)[:, None], x.float() @ a.float().T, h)
    return h[None]


def expand_adapters_reference(out: Tensor, h: Tensor, slots: Tensor, weights: AdapterWeights) -> None:
    shrunk = h.sum(0).to(weights.b.dtype).float().unflatten(1, (-1, weights.rank))
    total = sum(weights.sizes)
    for slot, b in enumerate(weights.b):
        mine = ((slots == slot) & (weights.ranks[slot] > 0))[:, None]
        places, matrices = out[:, :total].split(weights.sizes, 1), b[:total].split(weights.sizes)
        for part, (own, rows) in enumerate(zip(places, matrices, strict=True)):
            own.copy_(torch.where(mine, own.float() + shrunk[:, part] @ rows.float().T, own.float()))
