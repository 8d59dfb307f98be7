"""Adds what low-rank adapters (LoRA, arXiv 2106.09685) make of a linear's input, to tokens with different ones or none.

Adapters lie in slots of stacked memory, and each token names its slot. Once a step the device lists the slots in use,
so that nothing is sorted, the host knows nothing, and a graph may hold the kernels. The kernel of a linear of 16-bit
weights, over few tokens, does all by itself (kernels/gemm.py): the first matrices are further rows of its weight, and
the second ones further inputs (kernels/gemm_epilogue.py). Others multiply by the first in a kernel of their own
(shrink), and those of the vendor's library by the second too (expand). What lies beyond an adapter's own rank is not
read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels._triton import into_l2, next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.gemm_epilogue import add_adapters, rows_in_use, store_shrunk, sum_of_parts

RANK_STEP = 16
"""Memory is laid out for ranks that are multiples of this, for the matrix units."""
BLOCK_INPUTS, BLOCK_OUTPUTS, BLOCK_ROWS = 128, 32, 32
MOST_SPLITS, SPLIT_TOKENS = 4, 128
"""Parts into which inputs are divided, so that up to so many tokens keep a GPU busy; the last program adds them up"""
COLUMNS = 64
"""of second matrices, of several slots, that are multiplied at once"""
MOST_BLOCKS = 8
"""blocks of tokens of a linear whose kernel does all that its adapters ask for"""


class AdapterWeights(NamedTuple):
    """Holds the adapters of one linear, which may be several of a checkpoint's, fused, over one input."""

    a: Tensor
    """[slots, parts * rank, inputs]: the parts' first matrices, one after the other; rows beyond a rank are zeros. What
    is within a slot is contiguous, and slots are as far apart as those of `b`"""
    b: Tensor
    """[slots, outputs, rank]: their second matrices, times the adapter's scale; columns beyond a rank are zeros"""
    ranks: Tensor
    """[slots] int32: the largest rank of the parts; 0: the adapter leaves this linear alone"""
    starts: Tensor
    """[parts + 1] int32: the output with which each part begins, and with which the last one ends"""
    sizes: tuple[int, ...]
    """outputs of each part"""
    arrived: Tensor
    """[counters_of(slots, parts * rank)] int32 zeros: of each block of tokens, the programs that have shrunk it and
    those that know; then of each block of rows, those that have added up their share of the inputs"""

    @property
    def rank(self) -> int:
        """The rank that memory is laid out for."""
        return self.b.shape[2]


def counters_of(slots: int, rows: int) -> int:
    """Return how many counters programs need that share work, with so many slots of so many rows of first matrices."""
    return 2 * MOST_BLOCKS + -(-slots * rows // BLOCK_ROWS)


class StepSlots(NamedTuple):
    """Says which slots the tokens of a step use."""

    of_tokens: Tensor
    """[num_tokens] int32: each token's slot, negative for a token that has no adapter"""
    used: Tensor
    """[num_slots + 1] int32: how many slots some token has, and these slots, ascending; others are not read"""

    @classmethod
    def of(cls, slots: Tensor, num_slots: int) -> StepSlots:
        """Return the tokens' `slots` # [num_tokens] int32 with those that are used.

        Kernels read `used` before they wait for others, so that a launch comes after it that waits for it."""
        every = torch.arange(num_slots, dtype=torch.int32, device=slots.device)
        is_used = (slots[:, None] == every).any(0)
        in_front = torch.where(is_used, every, num_slots).sort().values
        used = torch.cat((is_used.sum(dtype=torch.int32).view(1), in_front))
        return cls(slots.clamp(min=-1), used)


class Adapted(NamedTuple):
    """Holds the adapters that the kernel of a linear is to add."""

    slots: StepSlots
    weights: AdapterWeights
    s: Tensor | None = None
    """as `shrink_adapters` returns it; None: the kernel does that too"""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return what `add_adapters` reads."""
        return self.s, *self.slots, self.weights.b, self.weights.starts, self.weights.b.stride(0)

    @property
    def options(self) -> dict[str, int]:
        """Return what it is compiled for."""
        held = self.weights
        return {"SEATS": len(held.sizes), "RANK": held.rank, "SLOTS": len(held.a), "COLUMNS": COLUMNS}


NO_ADAPTERS = {"SEATS": 0, "RANK": 0, "SLOTS": 0, "COLUMNS": 0}
"""the options of a kernel that adds none"""


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr, slots_ptr, used_ptr, a_ptr, ranks_ptr, s_ptr, parts_ptr, arrived_ptr, slot_step, x_stride, num_tokens,
    inputs, split_inputs,
    SEATS: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply by first matrices; grid (blocks of their rows, SPLIT, blocks of tokens). A program whose rows none of
    its tokens uses takes no turn of the loop: it has no product under a condition."""
    across, split, down = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot_of_row, column, rows_ptrs = rows_in_use(
        across, a_ptr, used_ptr, ranks_ptr, slot_step, inputs, SEATS, RANK, SLOTS, BLOCK_N
    )
    if EVEN_K:
        rows_ptrs = tl.multiple_of(rows_ptrs, 16)
    start = split * split_inputs
    in_use = across * BLOCK_N < tl.load(used_ptr, cache_modifier=".cg") * (SEATS * RANK)
    end = tl.where(in_use, tl.minimum(start + split_inputs, inputs), start)
    if OVERLAP:
        for ahead in range(start, end, 64):
            into_l2(rows_ptrs + ahead)
    wait_for_inputs(OVERLAP)
    row = down * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = row < num_tokens
    slot = tl.load(slots_ptr + row, mask=row_in, other=-1)
    own = (slot[:, None] == slot_of_row[None, :]).to(tl.int32)
    end = tl.where(tl.max(tl.max(own, axis=1), axis=0) > 0, end, start)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=row_in[:, None], other=0.0)
            a = tl.load(rows_ptrs[:, None] + k[None, :])
        else:
            inside = (k < inputs)[None, :]
            held = row_in[:, None] & inside
            x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=held, other=0.0)
            a = tl.load(rows_ptrs[:, None] + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    acc, done = sum_of_parts(acc, row_in, split, across, parts_ptr, arrived_ptr, SPLIT)
    if done:
        store_shrunk(acc, s_ptr, row, row_in, slot, slot_of_row, column, SEATS * SLOTS * RANK)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    out_ptr, s_ptr, slots_ptr, used_ptr, b_ptr, starts_ptr, slot_step, out_stride, num_tokens, outputs,
    SEATS: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply by second matrices, from the first slot that one of the tokens has to the last, and add to outputs; grid
    (blocks of tokens, blocks of outputs)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, count = row < num_tokens, tl.load(used_ptr, cache_modifier=".cg")
    every = tl.arange(0, PLACES)
    used = tl.load(used_ptr + 1 + every, mask=every < count, other=SLOTS, cache_modifier=".cg")
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots_ptr + row, mask=row_in, other=-1)
    lowest, highest = tl.min(tl.where(slot < 0, SLOTS, slot), axis=0), tl.max(slot, axis=0)
    first, end = tl.sum((used < lowest).to(tl.int32), axis=0), tl.sum((used <= highest).to(tl.int32), axis=0)
    acc = add_adapters(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32), s_ptr, used_ptr, b_ptr, starts_ptr, slot_step, row, row_in, column,
        first, end, False, SEATS, RANK, SLOTS, COLUMNS,
    )  # fmt: skip
    places, held = out_ptr + row.to(tl.int64)[:, None] * out_stride + column, row_in[:, None] & (column < outputs)
    out = tl.load(places, mask=held, other=0.0).to(tl.float32) + acc
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=held)


def shrink_adapters(x: Tensor, slots: StepSlots, weights: AdapterWeights) -> Tensor:
    """Return x # [num_tokens, inputs] times first matrices, for `expand_adapters` # [num_tokens, parts * slots * rank]
    in the type of the matrices: for each part, each slot in use and each of its rows a number, which is zero where a
    token has another slot. What lies behind the slots in use is not written."""
    num_slots, rows, inputs = weights.a.shape
    num_tokens, sizes = x.shape[0], {"SEATS": len(weights.sizes), "RANK": weights.rank, "SLOTS": num_slots}
    s = weights.a.new_empty(num_tokens, num_slots * rows)
    if num_tokens:
        few = num_tokens <= SPLIT_TOKENS
        block = min(128, max(16, next_power_of_2(num_tokens))) if few else 64
        split = max(1, min(MOST_SPLITS, inputs // (4 * BLOCK_INPUTS))) if few else 1
        blocks = -(-num_slots * rows // BLOCK_ROWS)
        parts = x.new_empty((blocks * split, block, BLOCK_ROWS), dtype=torch.float32) if split > 1 else None
        split_inputs = -(-inputs // (split * BLOCK_INPUTS)) * BLOCK_INPUTS
        _shrink_kernel[(blocks, split, -(-num_tokens // block))](
            x, *slots, weights.a, weights.ranks, s, parts, weights.arrived[2 * MOST_BLOCKS :], weights.a.stride(0),
            x.stride(0), num_tokens, inputs, split_inputs, SPLIT=split, BLOCK_M=block, BLOCK_N=BLOCK_ROWS,
            BLOCK_K=BLOCK_INPUTS, EVEN_K=inputs % BLOCK_INPUTS == 0, num_warps=4, **sizes, **overlap(),
        )  # fmt: skip
    return s


def expand_adapters(out: Tensor, s: Tensor, slots: StepSlots, weights: AdapterWeights) -> None:
    """Add to out # [num_tokens, at least outputs], whose rows are contiguous, what `shrink_adapters` made times each
    token's second matrices."""
    num_tokens, outputs, given = len(s), sum(weights.sizes), Adapted(slots, weights, s)
    if num_tokens:
        block = 128 if 64 < num_tokens <= SPLIT_TOKENS else 64
        _expand_kernel[(-(-num_tokens // block), -(-outputs // BLOCK_OUTPUTS))](
            out, *given.arguments, out.stride(0), num_tokens, outputs,
            PLACES=next_power_of_2(len(weights.a)), BLOCK_M=block, BLOCK_N=BLOCK_OUTPUTS, num_warps=4,
            **given.options, **overlap(),
        )  # fmt: skip


def spread(h: Tensor, slots: StepSlots, weights: AdapterWeights) -> Tensor:
    """Return h # [num_tokens, parts * rank], of each token's own slot, as `shrink_adapters` does."""
    own = slots.of_tokens[:, None] == slots.used[None, 1:]
    apart = h.to(weights.a.dtype).unflatten(1, (-1, 1, weights.rank))
    return torch.where(own[:, None, :, None], apart, 0).flatten(1)


def shrink_adapters_reference(x: Tensor, slots: StepSlots, weights: AdapterWeights) -> Tensor:
    h = torch.zeros(x.shape[0], weights.a.shape[1], dtype=torch.float32, device=x.device)
    for slot, a in enumerate(weights.a):
        h = torch.where((slots.of_tokens == slot)[:, None], x.float() @ a.float().T, h)
    return spread(h, slots, weights)


def expand_adapters_reference(out: Tensor, s: Tensor, slots: StepSlots, weights: AdapterWeights) -> None:
    total, every, rank = sum(weights.sizes), len(weights.b), weights.rank
    in_use = torch.arange(every, device=s.device) < slots.used[0]
    of_slots = torch.where(in_use[:, None], s.float().unflatten(1, (-1, every, rank)), 0.0).flatten(2)
    matrices = weights.b.index_select(0, slots.used[1:].clamp(max=every - 1)).float().transpose(0, 1)
    places = out[:, :total].split(weights.sizes, 1), matrices[:total].flatten(1).split(weights.sizes)
    for part, (own, rows) in enumerate(zip(*places, strict=True)):
        own.copy_(own.float() + of_slots[:, part] @ rows.T)
