"""Makes sums over GPUs inside the kernels that need them: every rank writes its share into the memory of all ranks.

Each rank has a buffer that the others reach over their links, with room for a share of every rank, twice. A rank writes
its share to all buffers and then looks at its own until all shares are there. What has not arrived yet is known by its
bits: a buffer that waits holds EMPTY everywhere, so that data and flag are the same word, and neither a fence nor a
barrier is needed (as in TensorRT-LLM's one-shot all-reduce). Who has read a share fills its place with EMPTY again.

Two places for each share are enough: a rank ends a call only when it has the others' shares of it, which they write
after they have ended the call before, and so have emptied that call's place. Which of the two it is, each program of a
kernel counts in memory, so that a replayed graph needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.fp8 import warps_of_row

EMPTY = -32768
"""The 16 bits of what has not arrived: -0.0 in 16-bit types, which is sent as 0.0; in fp32 two of them, -4.6e-41."""
MOST_PROGRAMS = 1024
"""of a kernel that sums"""
MOST_LOOKS = 1 << 26
"""After so many looks, most of a minute, a rank gives up: another one has died or lost its way."""
SMALLEST_BLOCK = 1024
SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_PROGRAMS, _EMPTY_16, _EMPTY_32 = tl.constexpr(MOST_PROGRAMS), tl.constexpr(EMPTY), tl.constexpr(-2147450880)


@dataclass(eq=False)
class Peers:
    """Holds what the kernels of one rank need to sum over the ranks of its group."""

    rank: int
    addresses: Tensor
    """of every rank's buffer, as this rank reaches it # [ranks] int64. A buffer is [2, ranks, room] bytes"""
    room: int
    """bytes of the largest share; a multiple of 64"""
    library: Callable[[Tensor], Tensor]
    """sums a tensor over the same ranks, in place, by a library: what the kernels are checked against"""
    memory: Any = None
    """keeps this rank's buffer alive"""
    most_looks: int = MOST_LOOKS
    on: bool = True
    """Shares are summed here. Every rank must have the same."""

    def __post_init__(self) -> None:
        device = self.addresses.device
        self._turns = torch.zeros(MOST_PROGRAMS + 1, dtype=torch.int32, device=device)
        """how many calls each program has counted, and whether one of them has given up"""
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        """the latter, where the host sees it without asking the device"""

    @property
    def ranks(self) -> int:
        return len(self.addresses)

    @property
    def gave_up(self) -> bool:
        """Tell whether a kernel did not get all shares: whatever was computed since is wrong."""
        return bool(self._alarm[0])

    def take(self, share: Tensor) -> bool:
        """Tell whether the kernels sum a share like this, which is the same on every rank."""
        fits = share.nbytes <= self.room and len(share) <= MOST_PROGRAMS and share.dtype in SUMMED_DTYPES
        return self.on and fits and share.is_contiguous()

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return what `sum_over_ranks` takes behind its share, up to RANKS."""
        room = self.room // dtype.itemsize
        return self.addresses, self._turns, self._alarm, self.rank, room, self.most_looks


ALONE = (None,) * 6
"""Stands for the same arguments in a kernel that sums over no ranks."""


@triton.jit
def send_to_ranks(words, place, inside, addresses_ptr, first, rank, room, RANKS: tl.constexpr):
    """Write the tile `words` into every rank's buffer, own rank's last, and return a pointer to that."""
    here = tl.load(addresses_ptr + rank).to(tl.pointer_type(words.dtype))
    for step in tl.static_range(RANKS):
        other = tl.load(addresses_ptr + (rank + 1 + step) % RANKS).to(tl.pointer_type(words.dtype))
        tl.store(tl.multiple_of(other, 16) + first + rank * room + place, words, mask=inside)
    return tl.multiple_of(here, 16) + first


@triton.jit
def sum_over_ranks(
    share, place, inside, addresses_ptr, turns_ptr, alarm_ptr, rank, room, most_looks, RANKS: tl.constexpr
):
    """Return the sum of the ranks' tiles `share` in fp32, added in the order of ranks, which gives all the same bits,
    and rounded to the share's type, as a library would.

    `place`: where in the message the tile lies, which must be the same on every rank; `room`: of a message, in numbers.
    """
    program = tl.program_id(0)
    turn = tl.load(turns_ptr + program)
    lost = tl.load(turns_ptr + _MOST_PROGRAMS)
    if share.dtype.primitive_bitwidth == 16:
        words, empty = share.to(tl.int16, bitcast=True), tl.full([], _EMPTY_16, tl.int16)
    else:
        words, empty = share.to(tl.int32, bitcast=True), tl.full([], _EMPTY_32, tl.int32)
    words = tl.where(words == empty, tl.zeros_like(words), words)
    here = send_to_ranks(words, place, inside, addresses_ptr, (turn & 1) * RANKS * room, rank, room, RANKS)
    most = tl.where(lost == 0, most_looks, 1)
    looks = tl.zeros([], tl.int32)
    arrived = tl.zeros([], tl.int32)
    total = tl.zeros_like(share).to(tl.float32)
    while (arrived == 0) & (looks < most):
        total = tl.zeros_like(total)
        present = tl.full(words.shape, 1, tl.int32)
        for other in tl.static_range(RANKS):
            word = tl.load(here + other * room + place, mask=inside, other=0, volatile=True)
            present = tl.where(word == empty, 0, present)
            total += word.to(share.dtype, bitcast=True).to(tl.float32)
        arrived = tl.min(present, axis=0)
        looks += 1
    for other in tl.static_range(RANKS):
        tl.store(here + other * room + place, tl.zeros_like(words) + empty, mask=inside)
    if arrived == 0:
        tl.store(turns_ptr + _MOST_PROGRAMS, 1)
        tl.store(alarm_ptr, 1)
    tl.store(turns_ptr + program, turn + 1)
    if program == 0:  # for the programs that this call does not have, too
        idle = tl.num_programs(0) + tl.arange(0, _MOST_PROGRAMS)
        tl.store(turns_ptr + idle, tl.zeros_like(idle) + turn + 1, mask=idle < _MOST_PROGRAMS)
    return total.to(share.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rank", "most_looks"])
def _all_reduce_kernel(
    x_ptr,
    size,
    addresses_ptr,
    turns_ptr,
    alarm_ptr,
    rank,
    room,
    most_looks,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    share = tl.load(x_ptr + place, mask=inside, other=0.0)
    total = sum_over_ranks(
        share, place, inside, addresses_ptr, turns_ptr, alarm_ptr, rank, room, most_looks, RANKS
    )  # fmt: skip
    tl.store(x_ptr + place, total.to(share.dtype), mask=inside)


def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """Sum x, which `peers` take, over the ranks, in place, and return it."""
    if size := x.numel():
        block = max(SMALLEST_BLOCK, next_power_of_2(-(-size // MOST_PROGRAMS)))
        _all_reduce_kernel[(-(-size // block),)](
            x, size, *peers.arguments(x.dtype), BLOCK=block, RANKS=peers.ranks, num_warps=warps_of_row(block),
            **overlap(),
        )  # fmt: skip
    return x


def all_reduce_reference(x: Tensor, peers: Peers) -> Tensor:
    return peers.library(x)
