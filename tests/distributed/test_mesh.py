"""Groups: of one rank, which do nothing, and of two threads' worth of ranks over gloo."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from headrace.distributed.mesh import Mesh, init_mesh
from headrace.distributed.ranks import Place, Ranks
from headrace.errors import ConfigError

CPU = torch.device("cpu")


def test_a_group_of_one_does_nothing() -> None:
    group = init_mesh(0, Ranks()).tp
    x = torch.arange(4.0)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.largest(0.5, CPU) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_of_two(dtype: torch.dtype, tmp_path: Path) -> None:
    rendezvous = str(tmp_path / "meet")

    def rank_main(rank: int) -> list[torch.Tensor]:
        mesh = init_mesh(rank, Ranks(tp=2), rendezvous, timeout=timedelta(seconds=60))
        mine = torch.tensor([[1, 2], [3, 4]], dtype=dtype) + 10 * rank
        results = [mesh.tp.all_gather(mine), mesh.tp.gather_rows(mine), mesh.tp.scatter_rows(mine)]
        results.append(mesh.tp.all_reduce(mine))
        mesh.close()
        return results

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(rank_main, (0, 1)))
    for rank, (gathered, rows, own, reduced) in enumerate(both):
        assert gathered.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]]
        assert rows.tolist() == [[1, 2], [3, 4], [11, 12], [13, 14]]
        assert own.tolist() == [[[12, 14]], [[16, 18]]][rank]
        assert reduced.tolist() == [[12, 14], [16, 18]]


def test_two_agree_on_the_largest(tmp_path: Path) -> None:
    given = [(0.25, 0.5), (-2.0, -3.0), (math.inf, 1.0), (1.0, math.nan)]

    def rank_main(rank: int) -> list[float]:
        mesh = init_mesh(rank, Ranks(tp=2), str(tmp_path / "meet"), timeout=timedelta(seconds=60))
        found = [mesh.tp.largest(values[rank], CPU) for values in given]
        mesh.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_main, (0, 1))) == [[0.5, -2.0, math.inf, math.inf]] * 2


def test_ranks_are_numbered_shares_first_then_stages_then_engines() -> None:
    ranks = Ranks(tp=2, pp=3, dp=2)
    assert [ranks.place(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 1), (1, 0, 0), (1, 2, 1)
    ]  # fmt: skip
    assert [ranks.rank(ranks.place(rank)) for rank in range(12)] == [*range(12)]
    assert ranks.place(9) == Place(dp=1, pp=1, tp=1)
    groups = {kind: ranks.members(kind, 9) for kind in ("tp", "pp", "dp", "all", "experts")}
    everyone = [*range(12)]
    assert groups == {"tp": [8, 9], "pp": [7, 9, 11], "dp": [3, 9], "all": everyone, "experts": [2, 3, 8, 9]}


def test_groups_of_eight_ranks(tmp_path: Path) -> None:
    """Each group sums over its own members alone, and a tensor goes to the member that it is sent to; what goes back
    does not wait for it."""
    ranks = Ranks(tp=2, pp=2, dp=2)

    def rank_main(rank: int) -> tuple[list[float], list[float]]:
        mesh = init_mesh(rank, ranks, str(tmp_path / "meet"), timeout=timedelta(seconds=60))
        groups = (mesh.tp, mesh.pp, mesh.back, mesh.dp, mesh.all, mesh.experts)
        sums = [float(group.all_reduce(torch.tensor([2.0**rank]))) for group in groups]
        other, mine = 1 - mesh.pp.rank, torch.tensor([float(rank), 7.0])
        left = [mesh.pp.send(mine, other), mesh.back.send(-mine, other)]
        got = [*mesh.back.receive(torch.empty(2), other).tolist(), *mesh.pp.receive(torch.empty(2), other).tolist()]
        for wait in left:
            wait()
        mesh.close()
        return sums, got

    with ThreadPoolExecutor(8) as pool:
        for rank, (sums, got) in enumerate(pool.map(rank_main, range(8))):
            kinds = ("tp", "pp", "pp", "dp", "all", "experts")
            assert sums == [sum(2.0**member for member in ranks.members(kind, rank)) for kind in kinds]
            other = ranks.rank(ranks.place(rank)._replace(pp=1 - ranks.place(rank).pp))
            assert got == [-other, -7, other, 7]


@pytest.mark.parametrize(
    ("rank", "size", "rendezvous", "message"),
    [
        (2, 2, "/tmp/x", r"rank must be in \[0, 2\), got 2"),
        (0, 2, None, "2 ranks need a rendezvous"),
        (0, 2, "/no/such/folder/x", "does not exist"),
    ],
)
def test_impossible_meshes_are_refused(rank: int, size: int, rendezvous: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init_mesh(rank, Ranks(tp=size), rendezvous)


def test_a_mesh_is_null_by_default() -> None:
    assert Mesh().tp.size == Mesh().pp.size == 1
    with pytest.raises(ConfigError, match="a group of one rank has no member 1"):
        Mesh().pp.send(torch.zeros(1), 1)
