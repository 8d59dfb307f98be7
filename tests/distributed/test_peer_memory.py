"""Ranks get memory in each other's GPUs together or not at all, and say why not; sums go where they fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.distributed import peer_memory
from headrace.distributed.mesh import Group, Mesh
from headrace.distributed.peer_memory import BUFFER, MOST_SENT, connect
from headrace.errors import HeadraceError
from headrace.kernels.norm import Unsummed
from headrace.kernels.peers import QUICK_BITS, Peers, TwoShots
from headrace.runner.peer_checks import describe_peers
from headrace.runner.worker import Worker

CPU = torch.device("cpu", 0)


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What two ranks find: `fails`, how many of them have no memory; `apart`, GPUs that do not reach each other."""
    found: dict[str, Any] = {"fails": 0, "apart": False, "own": None}

    def shared(device: torch.device, processes: Any, size: int, ranks: int) -> tuple[Tensor, list[int]]:
        if found["own"] is not None:
            raise found["own"]
        memory = torch.zeros(size // 2, dtype=torch.int16)
        return memory, [memory.data_ptr(), 64]

    monkeypatch.setattr(peer_memory, "_shared", shared)
    monkeypatch.setattr(peer_memory, "DEVICE_FAMILY", "cuda")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: not found["apart"])
    return found


def connected(found: dict[str, Any]) -> tuple[Peers | None, str]:
    """Rank 0's result, where the other GPU is number 1 and the other rank has no problem before the memory."""
    told = iter([torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[found["fails"]]])])
    return connect(CPU, 0, 2, None, lambda mine: torch.cat((mine, next(told)), dim=-1), torch.clone)


def test_two_linked_gpus_share_memory(linked: dict[str, Any]) -> None:
    peers, problem = connected(linked)
    assert problem == ""
    assert peers is not None
    assert (peers.ranks, peers.most, peers.addresses.tolist()[1]) == (2, MOST_SENT, 64)
    assert peers.memory.nbytes == 2 * 2 * peers.room == BUFFER
    sums, exchanges = describe_peers(Mesh(tp=Group(0, 2, peers=peers), dp=Group(0, 2, peers=peers)))
    assert sums.endswith("up to 8 MiB, with residual and norm; NCCL above.")
    assert exchanges == "Exchanges of 2 engines: kernels of headrace's own up to 8 MiB; NCCL above."
    peers.on = False
    assert describe_peers(Mesh(tp=Group(0, 2, peers=peers))) == ["Sums over 2 GPUs: NCCL, see the self-check."]
    assert describe_peers(Mesh()) == []


@pytest.mark.parametrize(
    ("asked", "ranks", "found"),
    [("NONE", 2, 16), ("FP", 2, 16), ("INT4", 2, 4), ("INT6", 2, 16), ("INT4", 4, 0), ("INT8", 8, 8), ("FP", 8, 0)],
)
def test_large_sums_take_two_shots_where_they_were_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, asked: str, ranks: int, found: int
) -> None:
    """In the bits that were asked for, or in 16, and else not; what has no effect is said."""
    monkeypatch.setattr(peer_memory, "FASTER_FROM", {("G", 2): {4: 1000, 16: 9000}, ("G", 8): {8: 4000}})
    two = peer_memory._two_shots("G", ranks, asked, 1 << 24)
    least = {4: 1000, 16: 9000, 8: 4000}
    assert two == (TwoShots(found, least[found], 1 << 24) if found else None)
    own = Peers(0, torch.zeros(ranks, dtype=torch.int64), 4096, torch.clone, two_shots=two)
    said = " ".join(describe_peers(Mesh(tp=Group(0, ranks, peers=own)), asked))
    assert (f"to 16 MiB in two shots of {found} bits; NCCL for all others." in said) == (found > 0)
    assert (f"Quick Reduce {asked}: no effect, it was not measured" in said) == (found != QUICK_BITS.get(asked, found))


def test_where_nothing_is_summed_or_the_library_sums_quick_reduce_has_no_effect() -> None:
    assert describe_peers(Mesh(), "INT4") == ["Quick Reduce INT4: no effect, one GPU has nothing to sum."]
    far = Group(0, 2, no_peers="far")
    assert describe_peers(Mesh(tp=far), "FP")[1:] == ["Quick Reduce FP: no effect, the library sums."]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"apart": True}, "GPU 0 does not reach the memory of GPU 1"),
        ({"own": RuntimeError("no room\nat all")}, "RuntimeError: no room"),
        ({"fails": 1}, "1 of 2 ranks cannot"),
    ],
)
def test_where_one_cannot_all_keep_to_the_library(linked: dict[str, Any], case: dict[str, Any], said: str) -> None:
    linked |= case
    assert connected(linked) == (None, said)
    assert describe_peers(Mesh(tp=Group(0, 2, no_peers=said))) == [f"Sums over 2 GPUs: NCCL, {said}."]


def test_a_group_sums_in_the_kernel_behind_what_fits_and_the_rest_before() -> None:
    peers = Peers(0, torch.zeros(2, dtype=torch.int64), 4096, torch.clone)
    group = Group(0, 2, all_reduce=lambda share: share * 2, peers=peers)
    small, large, residual = torch.ones(2, 64), torch.ones(40, 64), torch.ones(40, 64)
    left = group.added(small, residual[:2], leaves=True)
    assert isinstance(left, Unsummed)
    assert left.peers is peers
    left = group.added(large, residual, leaves=True)
    assert left.peers is None
    assert left.delta.eq(2).all()
    assert group.added(large, residual, leaves=False) is residual
    assert residual.eq(3).all()


def test_a_sum_that_lacks_a_share_is_an_error() -> None:
    peers = Peers(0, torch.zeros(2, dtype=torch.int64), 4096, torch.clone)
    worker: Any = SimpleNamespace(mesh=Mesh(dp=Group(0, 2, peers=peers)))
    Worker.check_sums(worker)
    peers._alarm.fill_(1)
    with pytest.raises(HeadraceError, match="lacks the share"):
        Worker.check_sums(worker)
    peers.on = False  # found at load, and replaced
    Worker.check_sums(worker)
