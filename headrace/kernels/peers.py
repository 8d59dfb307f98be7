"""Makes sums over GPUs inside the kernels that need them, which write into the memory of all ranks.

Small shares take one shot: every rank writes its own to all. Each rank has a buffer that the others reach over their
links, with room for a share of every rank, twice. A rank writes its share to all buffers and then looks at its own
until all shares are there. What has not arrived yet is known by its bits: a buffer that waits holds EMPTY everywhere,
so that data and flag are the same word, and neither a fence nor a barrier is needed (as in TensorRT-LLM's one-shot
all-reduce). Who has read a share fills its place with EMPTY again.

Two places for each share are enough: a rank ends a call only when it has the others' shares of it, which they write
after they have ended the call before, and so have emptied that call's place. Which of the two it is, each program of a
kernel counts in memory, so that a replayed graph needs nothing from the host.

Large ones take two: each rank sums one part, of which the others send it their shares, and sends the sum to all. What
is sent may be rounded to 8, 6 or 4 bits with a scale for each 32 numbers, as AMD's Quick Reduce does. A rank's place in
a buffer then holds its shares in the first half and its sums in the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
QUICK_BITS = {"FP": 16, "INT8": 8, "INT6": 6, "INT4": 4}
"""How many bits a number of a large share travels in, by the names of Quick Reduce"""
GROUP = 32
"""numbers that share a scale"""
TILE, TILE_PROGRAMS = 2048, 512
"""numbers that a program sends a rank together; and programs of such a kernel at most"""
_GROUP, _TILE, _SMALLEST = tl.constexpr(GROUP), tl.constexpr(TILE), tl.constexpr(1e-37)
_THREADS = tl.constexpr(256)  # of 4 warps at most
_MOST_PROGRAMS, _EMPTY_16, _EMPTY_32 = tl.constexpr(MOST_PROGRAMS), tl.constexpr(EMPTY), tl.constexpr(-2147450880)


class TwoShots(NamedTuple):
    """Says which shares are summed in two shots, and in how many bits their numbers travel."""

    bits: int
    least: int
    """bytes of a share"""
    most: int


@dataclass(eq=False)
class Peers:
    """Holds what the kernels of one rank need to sum over the ranks of its group."""

    rank: int
    addresses: Tensor
    """of every rank's buffer, as this rank reaches it # [ranks] int64. A buffer is [2, ranks, room] bytes"""
    room: int
    """bytes of a rank's place; a multiple of 64"""
    library: Callable[[Tensor], Tensor]
    """sums a tensor over the same ranks, in place, by a library: what the kernels are checked against"""
    memory: Any = None
    """keeps this rank's buffer alive"""
    most: int = 0
    """bytes of the largest share that takes one shot; 0: the whole room"""
    two_shots: TwoShots | None = None
    most_looks: int = MOST_LOOKS
    on: bool = True
    """Shares are summed here. Every rank must have the same."""

    def __post_init__(self) -> None:
        device, self.most = self.addresses.device, self.most or self.room
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

    def fit(self, tensor: Tensor, messages: int = 1) -> bool:
        """Tell whether the buffers take a tensor like this, which is so many messages and alike on every rank."""
        small = tensor.nbytes <= messages * self.most and tensor.dtype in SUMMED_DTYPES
        return self.on and small and tensor.is_contiguous()

    def take(self, share: Tensor) -> bool:
        """Tell whether the kernels sum a share like this, which is alike on every rank."""
        return self.fit(share) and len(share) <= MOST_PROGRAMS and not self.bits_in_two(share)

    def bits_in_two(self, share: Tensor) -> int:
        """Return the bits in which `all_reduce_in_two` sums a share like this; 0: it does not."""
        two = self.two_shots
        if two is None or not self.on or share.itemsize != 2 or not share.is_contiguous():
            return 0
        return two.bits if two.least <= share.nbytes <= two.most else 0

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
def end_turn(turns_ptr, alarm_ptr, turn, arrived):
    """Count a call, and tell the host if not all has arrived."""
    program = tl.program_id(0)
    if arrived == 0:
        tl.store(turns_ptr + _MOST_PROGRAMS, 1)
        tl.store(alarm_ptr, 1)
    tl.store(turns_ptr + program, turn + 1)
    if program == 0:  # for the programs that this call does not have, too
        idle = tl.num_programs(0) + tl.arange(0, _MOST_PROGRAMS)
        tl.store(turns_ptr + idle, tl.zeros_like(idle) + turn + 1, mask=idle < _MOST_PROGRAMS)


@triton.jit
def awaited_sum(here, place, inside, room, most, empty, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """Look at most `most` times at the own buffer for every rank's words at `place`, and empty their places. Return
    their sum as numbers of DTYPE, in fp32 and in the order of ranks, and whether (1 or 0) all had arrived."""
    looks = tl.zeros([], tl.int32)
    arrived = tl.zeros([], tl.int32)
    total = tl.zeros(place.shape, tl.float32)
    while (arrived == 0) & (looks < most):
        total = tl.zeros_like(total)
        present = tl.full(place.shape, 1, tl.int32)
        for other in tl.static_range(RANKS):
            word = tl.load(here + other * room + place, mask=inside, other=0, volatile=True)
            present = tl.where(word == empty, 0, present)
            total += word.to(DTYPE, bitcast=True).to(tl.float32)
        arrived = tl.min(present, axis=0)
        looks += 1
    for other in tl.static_range(RANKS):
        tl.store(here + other * room + place, tl.zeros(place.shape, empty.dtype) + empty, mask=inside)
    return total, arrived


@triton.jit
def sum_over_ranks(
    share, place, inside, addresses_ptr, turns_ptr, alarm_ptr, rank, room, most_looks, RANKS: tl.constexpr
):
    """Return the sum of the ranks' tiles `share` in fp32, added in the order of ranks, which gives all the same bits,
    and rounded to the share's type, as a library would.

    `place`: where in the message the tile lies, which must be the same on every rank; `room`: of a message, in numbers.
    """
    turn = tl.load(turns_ptr + tl.program_id(0))
    lost = tl.load(turns_ptr + _MOST_PROGRAMS)
    if share.dtype.primitive_bitwidth == 16:
        words, empty = share.to(tl.int16, bitcast=True), tl.full([], _EMPTY_16, tl.int16)
    else:
        words, empty = share.to(tl.int32, bitcast=True), tl.full([], _EMPTY_32, tl.int32)
    words = tl.where(words == empty, tl.zeros_like(words), words)
    here = send_to_ranks(words, place, inside, addresses_ptr, (turn & 1) * RANKS * room, rank, room, RANKS)
    most = tl.where(lost == 0, most_looks, 1)
    total, arrived = awaited_sum(here, place, inside, room, most, empty, share.dtype, RANKS)
    end_turn(turns_ptr, alarm_ptr, turn, arrived)
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


@triton.jit
def _encoded(values, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Return `values` [TILE] fp32 as they travel: (codes, 48 bits of them or 16 in a number; bits of scales [groups]).

    A code is a multiple of its group's scale, from -(2^(BITS-1) - 1), counted from there: the code of all ones does not
    occur. What is not finite makes its whole group so. In 16 bits numbers travel as DTYPE, without scales.
    """
    if BITS == 16:
        words = values.to(DTYPE).to(tl.int16, bitcast=True)
        words = tl.where(words == _EMPTY_16, tl.zeros_like(words), words)
        scales = words
    else:
        MOST: tl.constexpr = (1 << (BITS - 1)) - 1
        PIECES: tl.constexpr = 8 if BITS == 6 else 16 // BITS
        groups = tl.reshape(values, [_TILE // _GROUP, _GROUP])
        sizes = tl.where(groups == groups, tl.abs(groups), float("inf"))
        rounded = (tl.max(sizes, axis=1) * (1.0 / MOST)).to(tl.bfloat16)
        scale = rounded.to(tl.float32)
        factor = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.maximum(scale, _SMALLEST))
        codes = tl.floor(groups * factor[:, None] + (MOST + 0.5)).to(tl.int32)
        codes = tl.minimum(tl.maximum(codes, 0), 2 * MOST)
        codes = tl.reshape(codes, [_TILE // PIECES, PIECES]).to(tl.int64 if BITS == 6 else tl.int32)
        words = tl.sum(codes << (BITS * tl.arange(0, PIECES))[None, :], axis=1)
        scales = rounded.to(tl.int16, bitcast=True)
    return words, scales


@triton.jit
def _decoded(words, scales, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Return what `_encoded` was given, rounded # [TILE] fp32"""
    if BITS == 16:
        values = words.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        PIECES: tl.constexpr = 8 if BITS == 6 else 16 // BITS
        codes = (words[:, None] >> (BITS * tl.arange(0, PIECES))[None, :]) & ((1 << BITS) - 1)
        codes = tl.reshape(codes, [_TILE // _GROUP, _GROUP]).to(tl.float32) - ((1 << (BITS - 1)) - 1)
        values = tl.reshape(codes * scales.to(tl.bfloat16, bitcast=True).to(tl.float32)[:, None], [_TILE])
    return values


@triton.jit
def _write(to_ptr, words, scales, BITS: tl.constexpr):
    """Write what `_encoded` returns into a buffer, as words of 16 bits none of which is EMPTY: each holds a whole code
    where EMPTY has zeros, and holds it flipped."""
    place = tl.arange(0, words.shape[0])
    if BITS == 16:
        tl.store(to_ptr + place, words)
    else:
        WORDS: tl.constexpr = _TILE // (8 if BITS == 6 else 16 // BITS)
        for plane in tl.static_range(3 if BITS == 6 else 1):
            word = (words >> (16 * plane)) ^ (((1 << BITS) - 1) << ((96 - 16 * plane) % BITS))
            tl.store(to_ptr + plane * WORDS + place, word.to(tl.int16))
        tl.store(to_ptr + BITS * (_TILE // 16) + tl.arange(0, _TILE // _GROUP), scales)


@triton.jit
def _arrived(from_ptr, most, COUNT: tl.constexpr, COPIES: tl.constexpr = 1):
    """Wait for COUNT words of 16 bits in the own buffer and empty their places. Return them, each COPIES times, and how
    often to look for the next: `most` times, or never once words did not come."""
    # Of fewer numbers than threads each warp would have all, and leave the loop, and empty them, before another looked.
    tl.static_assert(COUNT * COPIES >= _THREADS)
    place = from_ptr + tl.arange(0, COUNT * COPIES) // COPIES
    words = tl.zeros([COUNT * COPIES], tl.int16)
    looks, missing = tl.zeros([], tl.int32), tl.full([], 1, tl.int32)
    while (missing == 1) & (looks < most):
        words = tl.load(place, volatile=True)
        missing = tl.max((words == _EMPTY_16).to(tl.int32), axis=0)
        looks += 1
    tl.store(place, tl.zeros_like(words) + _EMPTY_16)
    return words, tl.where(missing == 1, 0, most)


@triton.jit
def _received(from_ptr, most, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Wait for what another rank has written, and return its values [TILE] fp32 and how often to look for the next."""
    if BITS == 16:
        words, most = _arrived(from_ptr, most, _TILE)
        values = _decoded(words, words, DTYPE, BITS)
    else:
        WORDS: tl.constexpr = _TILE // (8 if BITS == 6 else 16 // BITS)
        words = tl.zeros([WORDS], tl.int64 if BITS == 6 else tl.int32)
        for plane in tl.static_range(3 if BITS == 6 else 1):
            word, most = _arrived(from_ptr + plane * WORDS, most, WORDS)
            word = (word.to(words.dtype) ^ (((1 << BITS) - 1) << ((96 - 16 * plane) % BITS))) & 0xFFFF
            words |= word << (16 * plane)
        COPIES: tl.constexpr = _THREADS * _GROUP // _TILE
        scales, most = _arrived(from_ptr + BITS * (_TILE // 16), most, _TILE // _GROUP, COPIES)
        scales = tl.max(tl.reshape(scales, [_TILE // _GROUP, COPIES]), axis=1).to(tl.int16)
        values = _decoded(words, scales, DTYPE, BITS)
    return values, most


@triton.jit(do_not_specialize=["rank", "most_looks", "tiles"])
def _two_shot_kernel(
    x_ptr,
    size,
    tiles,
    addresses_ptr,
    turns_ptr,
    alarm_ptr,
    rank,
    room,
    most_looks,
    BITS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SENT: tl.constexpr = BITS * (_TILE // 16) + (0 if BITS == 16 else _TILE // _GROUP)  # words of a tile
    program, programs, lane = tl.program_id(0), tl.num_programs(0), tl.arange(0, _TILE)
    turn = tl.load(turns_ptr + program)
    most = tl.where(tl.load(turns_ptr + _MOST_PROGRAMS) == 0, most_looks, 0)
    first = (turn & 1) * RANKS * room
    own = first + rank * room
    here = tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int16)), 16) + first
    for tile in range(program, tiles, programs):
        for step in range(1, RANKS):
            other = (rank + step) % RANKS
            place = (other * tiles + tile) * _TILE + lane
            share = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
            words, scales = _encoded(share, DTYPE, BITS)
            there = tl.multiple_of(tl.load(addresses_ptr + other).to(tl.pointer_type(tl.int16)), 16)
            _write(there + own + tile * SENT, words, scales, BITS)
    for tile in range(program, tiles, programs):
        place = (rank * tiles + tile) * _TILE + lane
        share = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
        total = tl.zeros_like(share)
        for other in range(RANKS):
            values = share
            if other != rank:
                values, most = _received(here + other * room + tile * SENT, most, DTYPE, BITS)
            total += values
        words, scales = _encoded(total, DTYPE, BITS)
        for step in range(1, RANKS):
            there = tl.load(addresses_ptr + (rank + step) % RANKS).to(tl.pointer_type(tl.int16))
            _write(tl.multiple_of(there, 16) + own + room // 2 + tile * SENT, words, scales, BITS)
        tl.store(x_ptr + place, _decoded(words, scales, DTYPE, BITS).to(DTYPE), mask=place < size)
    for tile in range(program, tiles, programs):
        for step in range(1, RANKS):
            other = (rank + step) % RANKS
            values, most = _received(here + other * room + room // 2 + tile * SENT, most, DTYPE, BITS)
            place = (other * tiles + tile) * _TILE + lane
            tl.store(x_ptr + place, values.to(DTYPE), mask=place < size)
    end_turn(turns_ptr, alarm_ptr, turn, most)


def all_reduce_in_two(x: Tensor, peers: Peers, bits: int) -> Tensor:
    """Sum x, contiguous and of a 16-bit type, over two or more ranks in place, and return it. Its numbers travel twice
    in `bits` bits, 16, 8, 6 or 4, and all ranks get the same; what does not fit the room is summed after the rest."""
    sent = TILE * bits // 8 + (0 if bits == 16 else TILE // GROUP * 2)
    for chunk in x.view(-1).split(peers.room // 2 // sent * TILE * peers.ranks):
        tiles = -(-len(chunk) // (TILE * peers.ranks))
        _two_shot_kernel[(min(tiles, TILE_PROGRAMS),)](
            chunk, len(chunk), tiles, *peers.arguments(x.dtype), BITS=bits, RANKS=peers.ranks, num_warps=4,
            **overlap(),
        )  # fmt: skip
    return x


def all_reduce_reference(x: Tensor, peers: Peers) -> Tensor:
    return peers.library(x)
