"""Brings the tokens of several engines to the experts that they share, and each token's sum back to its engine.

All gather their tokens, each rank computes what its experts add to any of them, and the sums are scattered. Every rank
brings equally many rows: as many as the largest step among the engines has, on which their cores agree before they
launch it (executor/together.py). What an engine has fewer is padding, which no expert computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.distributed.mesh import Group


class Exchange:
    """Holds a rank's way to those in its place in other engines. With one engine nothing travels."""

    def __init__(self, engines: Group | None = None, most_rows: int = 0, device: torch.device | str = "cpu") -> None:
        """`most_rows`: the most that one engine brings."""
        self._engines = engines or Group()
        self._rows = 0
        """that each brings in this step; 0: as many as this one, for all have the same step"""
        self._num_own = 0
        """how many of them are this one's tokens; 0: all"""
        self.is_token: Tensor | None = None
        """Which of the gathered rows are tokens, in the order of engines # [engines * most_rows] bool, always at the
        same address, so that graphs may read it; None: all are."""
        if self._engines.size > 1:
            self.is_token = torch.ones(self._engines.size * most_rows, dtype=torch.bool, device=device)

    def begin(self, counts: Sequence[int], rows: int) -> None:
        """Begin a step to which engine i brings `counts[i]` tokens in `rows` rows. No counts: all have the same."""
        if self.is_token is None:
            return
        if counts:
            is_token = torch.arange(rows) < torch.tensor(counts)[:, None]
            staged = is_token.flatten() if self.is_token.device.type == "cpu" else is_token.flatten().pin_memory()
            self.is_token[: len(staged)].copy_(staged, non_blocking=True)
        elif self._rows:
            self.is_token.fill_(True)
        self._rows, self._num_own = (rows, counts[self._engines.rank]) if counts else (0, 0)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all engines # [engines * rows, hidden_size] for this one's x [num_tokens, hidden_size]."""
        if self._rows > len(x):
            x = F.pad(x, (0, 0, 0, self._rows - len(x)))
        return self._engines.gather_rows(x)

    def own_rows(self, gathered: Tensor) -> Tensor:
        """Return the rows of `gathered` [engines * rows, ...] that are this engine's tokens."""
        if self.is_token is None:
            return gathered
        rows = len(gathered) // self._engines.size
        first = self._engines.rank * rows
        return gathered[first : first + (self._num_own or rows)]

    def scatter(self, sums: Tensor, num_tokens: int) -> Tensor:
        """Return the sums over the ranks of what they computed for this engine's tokens # [num_tokens, hidden_size].
        `sums`: this rank's, in the rows that `gather` gave."""
        return self._engines.scatter_rows(sums)[:num_tokens]
