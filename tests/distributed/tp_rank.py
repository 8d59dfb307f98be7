"""Two ranks of a tensor-parallel test, each a thread of this process: of each folder's model a rank writes its logits
to FOLDER/rank{RANK}, and those with whole experts on each rank, if there are any, to FOLDER/experts{RANK}."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from driver import Driver
from safetensors.torch import load_file, save_file

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
    ranks, given = [Future[None]() for _ in range(2)], list(folders)
    for rank, done in enumerate(ranks):
        threading.Thread(target=_run_rank, args=(rank, rendezvous, given, done), daemon=True).start()
    for done in ranks:
        done.result(timeout=600)


def _run_rank(rank: int, rendezvous: Path, folders: Sequence[Path], done: Future[None]) -> None:
    try:
        mesh = init_mesh(rank, Ranks(tp=2), str(rendezvous), "cpu")
        for folder in folders:
            driver = Driver(folder, mesh)
            save_file(run(driver), folder / f"rank{rank}")
            if has_experts(driver):
                save_file(run(Driver(folder, mesh, whole_experts=True)), folder / f"experts{rank}")
        mesh.close()
    except BaseException as error:  # whoever waits raises it
        done.set_exception(error)
    else:
        done.set_result(None)


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
