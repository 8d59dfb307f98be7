"""Two ranks of a tensor-parallel test, each a process of its own: `tp_rank.py RANK RENDEZVOUS FOLDER...` writes its
logits to FOLDER/rank{RANK}, and those with whole experts on each rank, if there are any, to FOLDER/experts{RANK}."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from driver import Driver

from headrace.distributed.mesh import init_mesh
from headrace.distributed.ranks import Ranks
from headrace.layers.moe import SparseMoE

PROMPTS = [[5], [17, 3, 59], list(range(20, 45))]


def run(driver: Driver) -> dict[str, torch.Tensor]:
    """Logits of a ragged prefill and of one decode step."""
    driver.start(len(PROMPTS))
    return {"prefill": driver.step(PROMPTS).contiguous(), "decode": driver.step([[7], [8], [9]]).contiguous()}


def run_two(rendezvous: Path, folders: Iterable[Path]) -> None:
    """Let two ranks compute each folder's model."""
    command = [sys.executable, __file__]
    rest = [str(rendezvous), *map(str, folders)]
    ranks = [subprocess.Popen([*command, str(rank), *rest]) for rank in (0, 1)]
    try:
        assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def check_two(folder: Path, close: float = 1e-5) -> None:
    """Compare what two ranks computed of a model with what one does: both have the same bits. Experts may be sliced or
    spread over them."""
    driver = Driver(folder)
    expected = run(driver)
    for kind in ("rank", "experts") if has_experts(driver) else ("rank",):
        first, second = load_file(folder / f"{kind}0"), load_file(folder / f"{kind}1")
        for step, logits in expected.items():
            assert torch.equal(first[step], second[step])
            assert (first[step] - logits).abs().max() <= close * logits.abs().max()


def has_experts(driver: Driver) -> bool:
    return any(isinstance(module, SparseMoE) for module in driver.model.modules())


def main() -> None:
    torch.set_num_threads(1)
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    mesh = init_mesh(rank, Ranks(tp=2), rendezvous, "cpu")
    for folder in map(Path, sys.argv[3:]):
        driver = Driver(folder, mesh)
        save_file(run(driver), folder / f"rank{rank}")
        if has_experts(driver):
            save_file(run(Driver(folder, mesh, whole_experts=True)), folder / f"experts{rank}")
    mesh.close()


if __name__ == "__main__":
    main()
