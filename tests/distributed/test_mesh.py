"""Groups: of one rank, which do nothing, and of two threads' worth of ranks over gloo."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from headrace.distributed.mesh import Mesh, init_mesh
from headrace.errors import ConfigError

CPU = torch.device("cpu")


def test_a_group_of_one_does_nothing() -> None:
    group = init_mesh(0, 1).tp
    x = torch.arange(4.0)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.largest(0.5, CPU) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_of_two(dtype: torch.dtype, tmp_path: Path) -> None:
    rendezvous = str(tmp_path / "meet")

    def rank_main(rank: int) -> list[torch.Tensor]:
        mesh = init_mesh(rank, 2, rendezvous, timeout=timedelta(seconds=60))
        mine = torch.tensor([[1, 2], [3, 4]], dtype=dtype) + 10 * rank
        results = [mesh.tp.all_gather(mine), mesh.tp.all_reduce(mine)]
        mesh.close()
        return results

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(rank_main, (0, 1)))
    for gathered, reduced in both:
        assert gathered.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]]
        assert reduced.tolist() == [[12, 14], [16, 18]]


def test_two_agree_on_the_largest(tmp_path: Path) -> None:
    given = [(0.25, 0.5), (-2.0, -3.0), (math.inf, 1.0), (1.0, math.nan)]

    def rank_main(rank: int) -> list[float]:
        mesh = init_mesh(rank, 2, str(tmp_path / "meet"), timeout=timedelta(seconds=60))
        found = [mesh.tp.largest(values[rank], CPU) for values in given]
        mesh.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_main, (0, 1))) == [[0.5, -2.0, math.inf, math.inf]] * 2


@pytest.mark.parametrize(
    ("rank", "size", "rendezvous", "message"),
    [
        (2, 2, "/tmp/x", r"rank must be in \[0, 2\), got 2"),
        (0, 2, None, "needs a rendezvous"),
        (0, 2, "/no/such/folder/x", "does not exist"),
    ],
)
def test_impossible_meshes_are_refused(rank: int, size: int, rendezvous: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init_mesh(rank, size, rendezvous)


def test_a_mesh_is_null_by_default() -> None:
    assert Mesh().tp.size == 1
