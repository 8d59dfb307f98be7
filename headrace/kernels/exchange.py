"""Brings rows of all ranks to each, and each rank's sums back to it, by the words in peer memory of peers.py.

Engines that share their experts gather the tokens of all before their experts compute, and scatter the sums behind
them. Both write a message to every rank and wait for one of every rank, so that calls of these and of sums follow each
other on the same buffers in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.fp8 import warps_of_row
from headrace.kernels.peers import EMPTY, MOST_PROGRAMS, SMALLEST_BLOCK, Peers, awaited_sum, end_turn

_MOST_PROGRAMS = tl.constexpr(MOST_PROGRAMS)
_WORDS = {2: (torch.int16, EMPTY), 4: (torch.int32, -2147450880)}
"""bytes of a number -> the type of its word, and the word of what has not arrived"""


@triton.jit
def _send(x_ptr, place, inside, addresses_ptr, other, first, EMPTY: tl.constexpr):
    """Write the words at `place` of x behind `first` of another rank's buffer."""
    words = tl.load(x_ptr + place, mask=inside, other=0)
    words = tl.where(words == EMPTY, tl.zeros_like(words), words)
    there = tl.load(addresses_ptr + other).to(x_ptr.dtype)
    tl.store(tl.multiple_of(there, 16) + first, words, mask=inside)


@triton.jit(do_not_specialize=["rank", "most_looks"])
def _gather_rows_kernel(
    x_ptr, out_ptr, size, addresses_ptr, turns_ptr, alarm_ptr, rank, room, most_looks,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Send a tile to one rank, and take the same tile of that rank's."""
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    other = program % RANKS
    place = program // RANKS * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    turn = tl.load(turns_ptr + program)
    most = tl.where(tl.load(turns_ptr + _MOST_PROGRAMS) == 0, most_looks, 1)
    first = (turn & 1) * RANKS * room
    _send(x_ptr, place, inside, addresses_ptr, other, first + rank * room + place, EMPTY)
    here = tl.multiple_of(tl.load(addresses_ptr + rank).to(x_ptr.dtype), 16) + first + other * room
    looks = tl.zeros([], tl.int32)
    arrived = tl.zeros([], tl.int32)
    words = tl.zeros(place.shape, x_ptr.dtype.element_ty)
    while (arrived == 0) & (looks < most):
        words = tl.load(here + place, mask=inside, other=0, volatile=True)
        arrived = tl.min((words != EMPTY).to(tl.int32), axis=0)
        looks += 1
    tl.store(here + place, tl.zeros_like(words) + EMPTY, mask=inside)
    tl.store(out_ptr + other * size + place, words, mask=inside)
    end_turn(turns_ptr, alarm_ptr, turn, arrived)


@triton.jit(do_not_specialize=["rank", "most_looks"])
def _scatter_rows_kernel(
    x_ptr, out_ptr, size, addresses_ptr, turns_ptr, alarm_ptr, rank, room, most_looks,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Send every rank a tile of its rows, and add up in fp32, in the order of ranks, what comes for this one's."""
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    turn = tl.load(turns_ptr + tl.program_id(0))
    most = tl.where(tl.load(turns_ptr + _MOST_PROGRAMS) == 0, most_looks, 1)
    first = (turn & 1) * RANKS * room
    for step in tl.static_range(RANKS):
        to = (rank + 1 + step) % RANKS
        _send(x_ptr + to * size, place, inside, addresses_ptr, to, first + rank * room + place, EMPTY)
    here = tl.multiple_of(tl.load(addresses_ptr + rank).to(x_ptr.dtype), 16) + first
    empty = tl.full([], EMPTY, x_ptr.dtype.element_ty)
    total, arrived = awaited_sum(here, place, inside, room, most, empty, out_ptr.dtype.element_ty, RANKS)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
    end_turn(turns_ptr, alarm_ptr, turn, arrived)


def gather_rows(x: Tensor, own: Peers) -> Tensor:
    """Return the rows of all ranks, in the order of ranks # [ranks * n, width], for this one's x [n, width], which
    kernels take. In 16-bit types -0.0 arrives as 0.0."""
    out, ranks, size = x.new_empty((own.ranks * len(x), *x.shape[1:])), own.ranks, x.numel()
    if size:
        block = max(SMALLEST_BLOCK, next_power_of_2(-(-size * ranks // MOST_PROGRAMS)))
        word, empty = _WORDS[x.itemsize]
        _gather_rows_kernel[(-(-size // block) * ranks,)](
            x.view(word), out.view(word), size, *own.arguments(x.dtype), BLOCK=block, RANKS=ranks, EMPTY=empty,
            num_warps=warps_of_row(block), **overlap(),
        )  # fmt: skip
    return out


def scatter_rows(x: Tensor, own: Peers) -> Tensor:
    """Return the sum over the ranks of this one's rows of x, rounded once # [n, width] of [ranks * n, width]."""
    out = x.new_empty((len(x) // own.ranks, *x.shape[1:]))
    if size := out.numel():
        block = max(SMALLEST_BLOCK, next_power_of_2(-(-size // MOST_PROGRAMS)))
        word, empty = _WORDS[x.itemsize]
        _scatter_rows_kernel[(-(-size // block),)](
            x.view(word), out, size, *own.arguments(x.dtype), BLOCK=block, RANKS=own.ranks, EMPTY=empty,
            num_warps=warps_of_row(block), **overlap(),
        )  # fmt: skip
    return out
