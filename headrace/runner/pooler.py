"""Makes of a step's hidden states what a model that pools owes its requests: a row of numbers for each text that the
step completes, or for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np
import torch
from torch import Tensor

from headrace.pooling import Pooling
from headrace.runner.input_batch import Batch
from headrace.runner.pending import to_host
from headrace.sampling.transfer import to_device
from headrace.step import SchedulerOutput


class Pooler:
    """Computes the hidden state that stands for each text. A prompt may take several steps: what earlier ones bring to
    a mean, or a first token's state, is kept in a row of its own for each request."""

    def __init__(self, pooling: Pooling, max_rows: int, device: torch.device) -> None:
        self.kind = pooling.kind
        self._max_rows = max_rows
        self._device = device
        self._kept: Tensor | None = None
        """[max_rows + 1, hidden_size] float32: sums of hidden states, or first ones, of each row's request so far"""

    def pool(
        self, compute: Callable[[Tensor], Tensor], step: SchedulerOutput, batch: Batch, hidden: Tensor,
        pools_tokens: Set[int],
    ) -> dict[int, Tensor]:  # fmt: skip
        """Return by row what the step makes for its requests, copied to the host # [n, width] float32: one row for a
        text that it completes, one for each token where `pools_tokens` has the request's row. `compute`: the head."""
        stands, found = self._standing(step, batch, hidden), {}
        rows = [row for row, samples in zip(step.rows, step.samples, strict=True) if samples]
        if stands is not None and not pools_tokens >= {*rows}:
            made = to_host(compute(stands).float().contiguous())
            found = {row: made[index : index + 1] for index, row in enumerate(rows)}
        first = 0
        for row, count in zip(step.rows, step.num_scheduled_tokens, strict=True):
            if row in pools_tokens:
                found[row] = to_host(compute(hidden[first : first + count]).float().contiguous())
            first += count
        return found

    def _standing(self, step: SchedulerOutput, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Return the state that stands for each text that the step completes # [num_samples, hidden_size]."""
        if self.kind == "last":
            return hidden.index_select(0, batch.sample_index) if batch.num_samples else None
        if self._kept is None:
            self._kept = torch.zeros(self._max_rows + 1, hidden.shape[1], device=self._device)
        counts, rows = np.array(step.num_scheduled_tokens), np.array(step.rows)
        fresh = np.array(step.num_computed_tokens) == 0
        fresh_rows = self._ints(rows[fresh])
        if self.kind == "cls":
            self._kept[fresh_rows] = hidden[self._ints((counts.cumsum() - counts)[fresh])].float()
        else:
            self._kept[fresh_rows] = 0.0
            self._kept.index_add_(0, self._ints(np.repeat(rows, counts)), hidden[: counts.sum()].float())
        done = np.array(step.samples)
        stands = self._kept[self._ints(rows[done])]
        if self.kind == "mean":
            lengths = (np.array(step.num_computed_tokens) + counts)[done]
            stands /= self._ints(lengths)[:, None]
        return stands

    def _ints(self, values: np.ndarray) -> Tensor:
        return to_device(values.astype(np.int64), self._device)
