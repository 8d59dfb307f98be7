"""CUDA graphs of whole decode steps, one a padded batch size, captured when a size is used for the second time.

The first use of a size runs eagerly, which loads every kernel that the capture will hold; so a start captures nothing
and serving begins at once. Knows nothing of what the forward function computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.runner.input_batch import Batch

logger = logging.getLogger(__name__)

Forward = Callable[[Batch], Tensor]
"""A decode batch -> hidden states [num_tokens, hidden_size]. Logits stay outside: every graph keeps its outputs for
good, and the logits of all sizes together took 2.5 GiB for a vocabulary of 128k."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return sorted({min(size, max_num_seqs) for size in sizes})


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """All graphs share one memory pool; a batch's tensors must be views at fixed addresses (InputBatch)."""

    def __init__(self, max_num_seqs: int) -> None:
        self.sizes = capture_sizes(max_num_seqs)
        self._padded = [0] * (max_num_seqs + 1)
        for size in reversed(self.sizes):
            self._padded[: size + 1] = [size] * (size + 1)
        self._seen: set[int] = set()
        self._refused: set[int] = set()
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def padded_size(self, num_reqs: int) -> int:
        return self._padded[num_reqs]

    def run(self, batch: Batch, forward: Forward) -> Tensor:
        """Hidden states of a decode batch; overwritten by the next run of any size."""
        size = batch.num_reqs
        captured = self._captured.get(size)
        if captured is None:
            if size in self._refused or size not in self._seen:
                self._seen.add(size)
                return forward(batch)
            try:
                captured = self._captured[size] = self._capture(batch, forward)
            except torch.OutOfMemoryError as error:
                logger.warning("no room to capture a graph for batch size %d, which stays eager: %s", size, error)
                self._refused.add(size)
                return forward(batch)
        captured.graph.replay()
        return captured.hidden

    def _capture(self, batch: Batch, forward: Forward) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = forward(batch)
        return _Captured(graph, hidden)
