"""Sums over ranks, of which one runs its kernels while a stand-in writes what the others send: they equal the
reference, call after call, places are emptied again, and a rank that does not come is not awaited for ever."""

import pytest
import torch
import triton
import triton.language as tl

from headrace.distributed.mesh import Group, Mesh
from headrace.kernels import peers
from headrace.kernels.cases import Inputs, relative_error, rows_of_ranks, share_of_sum, sums_over_ranks
from headrace.kernels.peers import EMPTY, Peers, send_to_ranks
from headrace.runner.peer_checks import peer_checks

CPU = torch.device("cpu")
ROOM = 4096


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


@pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (2, 4), (7, 8)])
def test_sums_equal_the_reference_call_after_call(rank, ranks):
    group, dtypes = Ranks(rank, ranks), (torch.bfloat16, torch.float16, torch.float32)
    for place, (rows, hidden) in enumerate(((1, 48), (5, 33), (3, 100), (1, 1024))):
        group.check(rows, hidden, dtypes[place % 3])
        group.exchange(rows, hidden, dtypes[place % 3])
    assert not group.own.gave_up


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
    ranks, given = Ranks(0, 1), (12, torch.float32, CPU)
    own = ranks.own
    (check, exchanged) = peer_checks(Mesh(tp=Group(0, 1, peers=own), dp=Group(0, 1, peers=own)), *given)
    assert exchanged.error() <= exchanged.bound
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
    own.on = False
    assert not own.take(share)
