"""A rank process. The second rank has no memory for steps of more than 20 tokens, while the first waits for it inside
a collective, as it would in a real step; nor has it room for more than 20 blocks."""

from __future__ import annotations

import sys

import torch

from headrace.executor import rank
from headrace.runner.worker import Worker
from headrace.step import WorkerFacts

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


class ShortWorker(Worker):
    def _measure(self) -> WorkerFacts:
        if (self.config.max_num_batched_tokens or 0) > 20:
            if self.mesh.tp.rank == 0:
                self.mesh.tp.all_reduce(torch.zeros(1))
            raise torch.OutOfMemoryError(SAID)
        return super()._measure()

    def initialize_cache(self, num_pages: int) -> WorkerFacts:
        if num_pages > 20 and self.mesh.tp.rank == 1:
            return self._facts(left=10**9, shortfall=SAID)
        return super().initialize_cache(num_pages)


if __name__ == "__main__":
    rank.Worker = ShortWorker  # type: ignore[misc]
    sys.exit(rank.main(sys.argv))
