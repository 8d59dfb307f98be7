"""One rank of a tensor-parallel test: `tp_rank.py RANK RENDEZVOUS FOLDER...` writes its logits to FOLDER/rank{RANK}."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from driver import Driver

from headrace.distributed.mesh import init_mesh

PROMPTS = [[5], [17, 3, 59], list(range(20, 45))]


def run(driver: Driver) -> dict[str, torch.Tensor]:
    """Logits of a ragged prefill and of one decode step."""
    driver.start(len(PROMPTS))
    return {"prefill": driver.step(PROMPTS).contiguous(), "decode": driver.step([[7], [8], [9]]).contiguous()}


def main() -> None:
    torch.set_num_threads(1)
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    mesh = init_mesh(rank, 2, rendezvous, "cpu")
    for folder in map(Path, sys.argv[3:]):
        save_file(run(Driver(folder, mesh)), folder / f"rank{rank}")
    mesh.close()


if __name__ == "__main__":
    main()
