"""Sums over ranks, of which one runs its kernels while a stand-in writes what the others send: they equal the
reference, call after call, places are emptied again, and a rank that does not come is not awaited for ever."""

import multiprocessing
import os
import random
import time
from multiprocessing import connection

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder as Builder

from headrace.distributed.mesh import Group, Mesh
from headrace.kernels import peers
from headrace.kernels.cases import (
    Inputs,
    relative_error,
    rows_of_ranks,
    share_in_bits,
    share_of_sum,
    sums_over_ranks,
)
from headrace.kernels.peers import EMPTY, GROUP, QUICK_BITS, TILE, Peers, TwoShots, send_to_ranks
from headrace.runner.peer_checks import peer_checks

CPU = torch.device("cpu")
ROOM, LARGE_ROOM = 4096, 16384


@triton.jit
def _send_kernel(
    x_ptr, size, addresses_ptr, first, rank, room, BLOCK: tl.constexpr, RANKS: tl.constexpr, EMPTY: tl.constexpr
):
    place = tl.arange(0, BLOCK)
    words = tl.load(x_ptr + place, mask=place < size, other=0)
    words = tl.where(words == EMPTY, 0, words).to(words.dtype)
    send_to_ranks(words, place, place < size, addresses_ptr, first, rank, room, RANKS)


class Ranks:
    """The buffers of all ranks, in one process, as `rank` sees them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.buffers = [torch.full((2, ranks, ROOM // 2), EMPTY, dtype=torch.int16) for _ in range(ranks)]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.own = Peers(rank, addresses, ROOM, lambda x: x, most_looks=2)
        self.calls = 0

    def send(self, other: int, share: torch.Tensor) -> None:
        """Write what another rank sends in the next call of `rank`."""
        words = share.view({2: torch.int16, 4: torch.int32}[share.itemsize])
        room, ranks = ROOM // share.itemsize, self.own.ranks
        empty = EMPTY if share.itemsize == 2 else torch.tensor([EMPTY] * 2, dtype=torch.int16).view(torch.int32).item()
        first = self.calls % 2 * ranks * room
        _send_kernel[(1,)](words, words.numel(), self.own.addresses, first, other, room, 2048, ranks, empty)

    def check(self, rows, hidden, dtype) -> None:
        """Hold all ways to sum to their reference, while the others send their shares of the same sum."""
        seed, own = torch.seed(), self.own
        for run, expected, bound in sums_over_ranks(Inputs(dtype, CPU, seed), own, rows, hidden):
            for other in {*range(own.ranks)} - {own.rank}:
                self.send(other, share_of_sum(Inputs(dtype, CPU, seed), other, own.ranks, rows, hidden)[0])
            assert relative_error(run(), expected) <= bound, (rows, hidden, dtype)
            assert self.is_empty
            self.calls += 1

    def exchange(self, rows, hidden, dtype) -> None:
        """Hold exchanges to what must arrive, while the others send their rows, and their shares of this one's."""
        seed, own = torch.seed(), self.own
        sent = [[], []]
        for other in range(own.ranks):
            make = Inputs(dtype, CPU, seed)
            everybody = make.random(own.ranks, rows, hidden)
            everybody[make.uniform(*everybody.shape) < 0.1] = -0.0
            sent[0].append(everybody[other].clone())
            share, _ = share_of_sum(make, other, own.ranks, own.ranks * rows, hidden)
            sent[1].append(share.chunk(own.ranks)[own.rank].clone())
        for (run, expected, bound), messages in zip(
            rows_of_ranks(Inputs(dtype, CPU, seed), own, rows, hidden), sent, strict=True
        ):
            for other in {*range(own.ranks)} - {own.rank}:
                self.send(other, messages[other])
            assert relative_error(run(), expected) <= bound, (rows, hidden, dtype)
            assert self.is_empty
            self.calls += 1

    @property
    def is_empty(self) -> bool:
        return bool((self.buffers[self.own.rank] == EMPTY).all())


def codes_and_scales(values, bits):
    """The codes of numbers in fp32, from 0, and the scale of each group # [groups, GROUP], [groups, 1]"""
    most, groups = 2 ** (bits - 1) - 1, values.view(-1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) * (1 / most)).bfloat16().float()
    codes = (groups * (1 / scales.clamp(min=1e-37)) + (most + 0.5)).floor().clamp(0, 2 * most).long()
    return codes, scales


def rounded(values, dtype, bits):
    if bits == 16:
        return values.to(dtype).float()
    codes, scales = codes_and_scales(values, bits)
    return ((codes - (2 ** (bits - 1) - 1)) * scales).view(-1)


def as_sent(values, dtype, bits):
    """The words of 16 bits in which tiles of numbers travel, one tile behind the other."""
    if bits == 16:
        return (values.to(dtype) + 0.0).view(torch.int16)
    codes, scales = codes_and_scales(values, bits)
    pieces, planes = {8: (2, 1), 6: (8, 3), 4: (4, 1)}[bits]
    together = (codes.view(-1, TILE // pieces, pieces) << bits * torch.arange(pieces)).sum(-1)
    firsts = [-16 * plane % bits for plane in range(planes)]
    words = [together >> 16 * plane ^ (2**bits - 1) << first for plane, first in enumerate(firsts)]
    return torch.cat(
        (*(word.short() for word in words), scales.bfloat16().view(torch.int16).view(-1, TILE // GROUP)), -1
    ).view(-1)


class TwoShotSum:
    """A sum in two shots of one rank, to which the others have already sent all; and what must come out."""

    def __init__(self, rank, ranks, dtype, bits, size):
        self.bits, self.dtype, self.shares = bits, dtype, torch.randn(ranks, size).mul(3).to(dtype)
        self.shares[torch.rand(ranks, size) < 0.1] = -0.0
        self.buffers = [torch.full((2, ranks, LARGE_ROOM // 2), EMPTY, dtype=torch.int16) for _ in range(ranks)]
        self.own = Peers(
            rank, torch.tensor([buffer.data_ptr() for buffer in self.buffers]), LARGE_ROOM, torch.clone, most_looks=1
        )
        self.sent = [torch.full_like(buffer, EMPTY) for buffer in self.buffers]
        half, results = LARGE_ROOM // 4, []
        chunk = half // (TILE * bits // 16 + (TILE // GROUP if bits < 16 else 0)) * TILE * ranks
        for turn, shares in enumerate(self.shares.split(chunk, dim=1)):
            part = -(-shares.shape[1] // (TILE * ranks)) * TILE
            parts = (
                torch.nn.functional.pad(shares, (0, part * ranks - shares.shape[1])).float().view(ranks, ranks, part)
            )
            for to in range(ranks):
                total = torch.zeros(part)
                for other in range(ranks):
                    total += parts[to, to] if other == to else rounded(parts[other, to], dtype, bits)
                    self.write(to, turn, other, 0, as_sent(parts[other, to], dtype, bits))
                for other in range(ranks):
                    self.write(other, turn, to, half, as_sent(total, dtype, bits))
                results.append(rounded(total, dtype, bits))
            kept = sum(map(len, results)) - (part * ranks - shares.shape[1])
            results = [torch.cat(results)[:kept]]
        self.expected = results[0].to(dtype)

    def write(self, to, turn, other, first, words):
        """Put what `other` sends where it belongs: into the buffer of `rank`, or among what that one must send."""
        rank = self.own.rank
        if to != other and rank in {to, other}:
            (self.buffers if to == rank else self.sent)[to][turn, other, first : first + len(words)] = words

    @property
    def furthest(self):
        """How far a number may be from the sum: half a step of each share but one and of the sum, which in 16 bits is
        2^-9 of a number or less (2^-12 of fp16's), else 1/(2^bits - 2) of the group's largest; a scale may be 2^-8
        larger than that."""
        size = self.shares.shape[1]
        wide = torch.nn.functional.pad(self.shares.float(), (0, -size % GROUP)).view(len(self.shares), -1, GROUP)
        most = wide.abs() if self.bits == 16 else wide.abs().amax(-1, keepdim=True).expand_as(wide)
        step = 2.0**-8 if self.bits == 16 else (1 + 2.0**-8) / (2**self.bits - 2)
        of_shares = step * most.sum(0)
        total = wide.sum(0).abs()
        total = total if self.bits == 16 else total.amax(-1, keepdim=True).expand_as(total)
        of_sum = step * (total + (0 if self.bits == 16 else of_shares.amax(-1, keepdim=True)))
        in_dtype = 2.0**-8 * (wide.sum(0).abs() + of_shares + of_sum)
        return ((0 if self.bits == 16 else of_shares) + of_sum + in_dtype).view(-1)[:size] * 1.001 + 1e-30


@pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")
@pytest.mark.parametrize("bits", QUICK_BITS.values())
@pytest.mark.parametrize(
    ("rank", "ranks", "dtype", "size"),
    [
        (0, 2, torch.bfloat16, 3000), (1, 2, torch.float16, 2 * TILE + 1), (2, 4, torch.bfloat16, 9 * TILE - 7),
        (7, 8, torch.float16, 17 * TILE),
    ],
)  # fmt: skip
def test_sums_in_two_shots_send_and_give_what_the_reference_does(rank, ranks, dtype, size, bits):
    """Some of them in two chunks. What each rank gets is the same, since each is compared with the one reference."""
    case = TwoShotSum(rank, ranks, dtype, bits, size)
    found = peers.all_reduce_in_two(case.shares[rank].clone(), case.own, bits)
    assert not case.own.gave_up
    assert torch.equal(found, case.expected)
    assert all(torch.equal(*pair) for pair in zip(case.buffers, case.sent, strict=True))
    assert ((found.float() - case.shares.float().sum(0)).abs() <= case.furthest).all()


@pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (2, 4), (7, 8)])
def test_sums_equal_the_reference_call_after_call(rank, ranks):
    group, dtypes = Ranks(rank, ranks), (torch.bfloat16, torch.float16, torch.float32)
    for place, (rows, hidden) in enumerate(((1, 48), (5, 33), (3, 100), (1, 1024))):
        group.check(rows, hidden, dtypes[place % 3])
        group.exchange(rows, hidden, dtypes[place % 3])
    assert not group.own.gave_up


def race(rank, ranks, buffers, calls):
    """Be one rank of several processes that sum again and again, each after waits of its own. Whoever looks lets the
    others run first: of more ranks than there are cores one would look in vain until its time is over, every time."""
    look = Builder.create_masked_load
    Builder.create_masked_load = lambda *given: (os.sched_yield(), look(*given))[1]
    own = Peers(rank, torch.tensor([buffer.data_ptr() for buffer in buffers]), LARGE_ROOM, torch.clone)
    draw, delays = random.Random(ranks), random.Random(rank)
    for call in range(calls):
        (rows, hidden), bits = draw.choice(((1, 100), (2, 3000), (5, 33))), draw.choice((0, *QUICK_BITS.values()))
        make = Inputs(torch.float16, CPU, call)
        time.sleep(delays.choice((0, 0, delays.random() * 0.005)))
        if bits:
            share, total = share_in_bits(make, rank, ranks, rows, hidden, bits)
            found = peers.all_reduce_in_two(share, own, bits)
        else:
            share, total = share_of_sum(make, rank, ranks, rows, hidden)
            found = peers.all_reduce(share, own)
        if own.gave_up or not torch.equal(found, total):
            raise ValueError(f"call {call} of {bits} bits is wrong")


@pytest.mark.parametrize(("ranks", "calls"), [(2, 40), (4, 16)])
def test_processes_that_wait_at_random_get_the_sums_of_every_call(ranks, calls):
    """In any order of one shot and two."""
    buffers = [
        torch.full((2 * ranks * LARGE_ROOM // 2,), EMPTY, dtype=torch.int16).share_memory_() for _ in range(ranks)
    ]
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=race, args=(rank, ranks, buffers, calls), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    left = {process.sentinel: process for process in processes}
    while left and not any(process.exitcode for process in processes):
        for sentinel in connection.wait(list(left)):
            left.pop(sentinel).join()
    for process in left.values():  # which would wait for the one that failed, and take a core each
        process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks
    assert all((buffer == EMPTY).all() for buffer in buffers)


def test_what_is_sent_reaches_every_rank_in_the_senders_place():
    group = Ranks(1, 4)
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    peers.all_reduce(x.clone(), group.own)
    for other in {0, 2, 3}:
        sent = group.buffers[other][0, 1, :80].view(torch.bfloat16).view(2, 40)
        assert torch.equal(sent, x)
        assert (group.buffers[other][1:] == EMPTY).all()
        assert (group.buffers[other][0, [0, 2, 3]] == EMPTY).all()


def test_a_rank_that_does_not_come_is_given_up_at_once_the_next_time():
    group = Ranks(0, 2)
    group.check(2, 40, torch.bfloat16)
    peers.all_reduce(torch.ones(1, 40, dtype=torch.bfloat16), group.own)
    assert group.own.gave_up
    assert group.own._turns[-1] == 1
    assert group.is_empty


def test_the_check_at_load_finds_a_rank_whose_sums_are_wrong(monkeypatch):
    buffer, given = torch.full((LARGE_ROOM,), EMPTY, dtype=torch.int16), (12, torch.float16, CPU)
    own = Peers(0, torch.tensor([buffer.data_ptr()]), LARGE_ROOM, torch.clone, two_shots=TwoShots(4, 0, LARGE_ROOM))
    check, exchanged, in_two = peer_checks(Mesh(tp=Group(0, 1, peers=own), dp=Group(0, 1, peers=own)), *given)
    assert exchanged.error() <= exchanged.bound
    assert in_two.error() <= in_two.bound
    monkeypatch.setattr(peers, "all_reduce_in_two", lambda x, own, bits: x.mul_(1 + 2**-9))
    assert in_two.error() == float("inf")
    assert check.error() <= check.bound
    monkeypatch.setattr(peers, "all_reduce", lambda x, own: x.add_(0.01))
    assert check.error() == float("inf")
    assert check.demote() == "NCCL"
    assert not own.on
    monkeypatch.undo()
    own._alarm.fill_(1)
    assert check.error() == float("inf")
    assert list(peer_checks(Mesh(), *given)) == []


@pytest.mark.parametrize(
    ("share", "taken"),
    [
        (torch.ones(16, 128).half(), True), (torch.ones(17, 128).half(), False), (torch.ones(8, 16).int(), False),
        (torch.ones(128, 8).half().T, False), (torch.ones(1025, 1).half(), False),
    ],
)  # fmt: skip
def test_larger_and_other_tensors_are_left_to_the_library(share, taken):
    own = Ranks(0, 2).own
    assert own.take(share) == taken
    own.two_shots = TwoShots(8, 4096, 4352)
    assert own.take(share) == (taken and share.nbytes < 4096)
    assert own.bits_in_two(share) == (8 if share.nbytes in (4096, 4352) else 0)
    own.on = False
    assert not own.take(share)
    assert not own.bits_in_two(share)
