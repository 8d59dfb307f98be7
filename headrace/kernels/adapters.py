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

from headrace.kernels._triton import into_l2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.gemm_epilogue import add_adapters

RANK_STEP = 16
"""Memory is laid out for ranks that are multiples of this, for the matrix units."""
BLOCK_TOKENS, BLOCK_INPUTS, BLOCK_OUTPUTS, LINE = 64, 128, 32, 64
MOST_SPLITS, FEW_SLOTS = 8, 16
"""Parts into which inputs are divided, so that few tokens keep a GPU busy, fewer if there are more slots than so many;
their sums are added in order"""
TOGETHER, MOST_TOGETHER = 64, 2048
"""columns of second matrices, of several slots, that are multiplied at once; and those times the tokens of a program"""
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
    """[2 * MOST_BLOCKS] int32 zeros: of each block of tokens, the programs that have shrunk it, and that know it"""

    @property
    def rank(self) -> int:
        """The rank that memory is laid out for."""
        return self.b.shape[2]

    @property
    def block(self) -> int:
        """The rows of first matrices, of one part, that are multiplied at once."""
        return next(block for block in (64, 32, RANK_STEP) if self.rank % block == 0)


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
    h: Tensor | None = None
    """as `shrink_adapters` returns it; None: the kernel does that too"""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return what `add_adapters` reads."""
        held = self.weights
        return self.h, *self.slots, held.b, held.ranks, held.starts, held.b.stride(0)

    def options(self, tokens: int) -> dict[str, int]:
        """Return what it is compiled for, in a program of so many tokens."""
        held, splits = self.weights, 1 if self.h is None else self.h.shape[0]
        block = min(held.block, 32)
        columns = max(block, min(TOGETHER, MOST_TOGETHER // tokens))
        sizes = {"SPLITS": splits, "SEATS": len(held.sizes), "RANK": held.rank}
        return {**sizes, "BLOCK_R": block, "TOGETHER": columns // block}


NO_ADAPTERS = {"SPLITS": 0, "SEATS": 0, "RANK": 0, "BLOCK_R": 0, "TOGETHER": 0}
"""the options of a kernel that adds none"""


@triton.jit
def _shrink_kernel(
    x_ptr, slots_ptr, used_ptr, a_ptr, ranks_ptr, h_ptr, slot_step, x_stride, num_tokens, inputs, split_inputs,
    RANK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
    LINE: tl.constexpr = LINE,
):  # fmt: skip
    """Multiply by first matrices; grid (blocks of tokens, slots, splits x blocks of ROWS). A program whose slot no
    token has, or whose rows lie beyond its rank, takes no turn of the loop: it has no product under a condition."""
    split = tl.program_id(2) // (ROWS // BLOCK_R)
    row = tl.program_id(2) % (ROWS // BLOCK_R) * BLOCK_R
    in_use = tl.program_id(1) < tl.load(used_ptr)
    slot = tl.load(used_ptr + 1 + tl.program_id(1), mask=in_use, other=0)
    of_rows = a_ptr + slot.to(tl.int64) * slot_step + (row + tl.arange(0, BLOCK_R)) * inputs
    if OVERLAP:
        for ahead in range(0, tl.where(in_use, split_inputs, 0), LINE):
            into_l2(of_rows + tl.minimum(split * split_inputs + ahead, inputs - 1))
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    mine = mine & in_use & (row % RANK < tl.load(ranks_ptr + slot))
    start = split * split_inputs
    end = tl.where(tl.max(mine.to(tl.int32), 0) > 0, tl.minimum(start + split_inputs, inputs), start)
    rows = row + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (k < inputs)[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride + k[None, :], mask=mine[:, None] & inside, other=0.0)
        a = tl.load(of_rows[:, None] + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    tl.store(h_ptr + (split * num_tokens + token[:, None]) * ROWS + rows, acc, mask=mine[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    out_ptr, h_ptr, slots_ptr, used_ptr, b_ptr, ranks_ptr, starts_ptr, slot_step, out_stride, num_tokens, outputs,
    SPLITS: tl.constexpr, SEATS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply by second matrices and add to outputs; grid (blocks of tokens, blocks of outputs)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_in, count = row < num_tokens, tl.load(used_ptr)
    if OVERLAP:
        for place in range(1, count + 1):
            of_slot = b_ptr + tl.load(used_ptr + place).to(tl.int64) * slot_step
            into_l2(of_slot + tl.minimum(column, outputs - 1) * RANK)
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots_ptr + row, mask=row_in, other=-1)
    acc = add_adapters(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32), h_ptr, used_ptr, b_ptr, ranks_ptr, starts_ptr, slot_step, slot, row,
        column, num_tokens, tl.where(tl.max(slot, axis=0) < 0, 0, count), False, SPLITS, SEATS, RANK, BLOCK_R,
        TOGETHER,
    )  # fmt: skip
    changed = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0) > 0
    places, held = out_ptr + row.to(tl.int64)[:, None] * out_stride + column, changed[:, None] & (column < outputs)
    out = tl.load(places, mask=held, other=0.0).to(tl.float32) + acc
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=held)


def shrink_adapters(x: Tensor, slots: StepSlots, weights: AdapterWeights) -> Tensor:
    """Return x # [num_tokens, inputs] times each token's first matrices, for `expand_adapters` #
    [splits, num_tokens, parts * rank] float32, to be summed over splits.

    Numbers of a token that has no adapter are not written, nor are those beyond an adapter's rank.
    """
    num_slots, rows, inputs = weights.a.shape
    num_tokens, rank, block = x.shape[0], weights.rank, weights.block
    splits = max(1, min(MOST_SPLITS, inputs // (4 * BLOCK_INPUTS), MOST_SPLITS * FEW_SLOTS // num_slots))
    h = torch.empty(splits, num_tokens, rows, dtype=torch.float32, device=x.device)
    if num_tokens:
        split_inputs = -(-inputs // (splits * BLOCK_INPUTS)) * BLOCK_INPUTS
        _shrink_kernel[(-(-num_tokens // BLOCK_TOKENS), num_slots, splits * (rows // block))](
            x, *slots, weights.a, weights.ranks, h, weights.a.stride(0), x.stride(0), num_tokens, inputs, split_inputs,
            RANK=rank, ROWS=rows, BLOCK_M=BLOCK_TOKENS, BLOCK_R=block, BLOCK_K=BLOCK_INPUTS, num_warps=4, **overlap(),
        )  # fmt: skip
    return h


def expand_adapters(out: Tensor, h: Tensor, slots: StepSlots, weights: AdapterWeights) -> None:
    """Add to out # [num_tokens, at least outputs], whose rows are contiguous, what `shrink_adapters` made times each
    token's second matrices."""
    num_tokens, outputs = h.shape[1], sum(weights.sizes)
    given = Adapted(slots, weights, h)
    options: dict[str, Any] = given.options(BLOCK_TOKENS)
    if num_tokens:
        _expand_kernel[(-(-num_tokens // BLOCK_TOKENS), -(-outputs // BLOCK_OUTPUTS))](
            out, *given.arguments, out.stride(0), num_tokens, weights.b.shape[1],
            BLOCK_M=BLOCK_TOKENS, BLOCK_N=BLOCK_OUTPUTS, num_warps=4, **options, **overlap(),
        )  # fmt: skip


def shrink_adapters_reference(x: Tensor, slots: StepSlots, weights: AdapterWeights) -> Tensor:
    h = torch.zeros(x.shape[0], weights.a.shape[1], dtype=torch.float32, device=x.device)
    for slot, a in enumerate(weights.a):
        h = torch.where((slots.of_tokens == slot)[:, None], x.float() @ a.float().T, h)
    return h[None]


def expand_adapters_reference(out: Tensor, h: Tensor, slots: StepSlots, weights: AdapterWeights) -> None:
    shrunk = h.sum(0).to(weights.b.dtype).float().unflatten(1, (-1, weights.rank))
    total = sum(weights.sizes)
    for slot, b in enumerate(weights.b):
        mine = ((slots.of_tokens == slot) & (weights.ranks[slot] > 0))[:, None]
        places, matrices = out[:, :total].split(weights.sizes, 1), b[:total].split(weights.sizes)
        for part, (own, rows) in enumerate(zip(places, matrices, strict=True)):
            own.copy_(torch.where(mine, own.float() + shrunk[:, part] @ rows.float().T, own.float()))
