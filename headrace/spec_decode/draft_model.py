"""Lets a smaller model of the same vocabulary write on, token by token (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.table import KernelTable
from headrace.spec_decode.drafter import Tables, rows_of
from headrace.spec_decode.passes import Passes, most_lag, within

CATCH_UP_TOKENS = 1024
"""Most tokens that are computed at once of those that steps without guesses have left out."""


class ModelDrafter:
    """Lets a model guess, which has computed all known tokens of a row but the last two. The one before the last was a
    guess, which it has written and not read, if all guesses were right."""

    taps = False

    def __init__(
        self, model: Any, specs: tuple[AttentionSpec | None, ...], num_drafts: int, longest: int, kernels: KernelTable
    ) -> None:
        """`model`: a CausalModel of the runner, whose layers have the attention `specs`. `longest`: the positions that
        it knows."""
        self.model, self.num_drafts, self.longest = model, num_drafts, longest
        self.num_layers = len(specs)
        self.passes = Passes.of(kernels, specs)
        self.most_lag = most_lag(specs, num_drafts)

    def hidden_states(self, num_tokens: int, device: torch.device) -> None:
        """Return None: it computes its own."""

    def fill(self, input_ids: Tensor, metadata: AttentionMetadata, tables: Tables) -> None:
        positions = metadata.positions
        if self.longest < tables.max_model_len:  # what lies beyond is never guessed behind
            positions = positions.clamp(max=self.longest - 1)
        self.model(input_ids, positions, metadata, tables.caches)

    def propose(self, tables: Tables, batch: Batch, sampled: Tensor | None) -> Tensor:
        rows, longest = rows_of(batch, sampled), batch.max_seq_len + 1
        known = tables.num_known.index_select(0, rows)
        guess = self._next(tables, rows, known, 2, longest)
        for place in range(1, self.num_drafts):
            guess = self._next(tables, rows, known + place, 1, longest)
        return guess

    def _next(self, tables: Tables, rows: Tensor, known: Tensor, count: int, longest: int) -> Tensor:
        """Compute the last `count` of the `known` tokens of each row, and write and return the next # [R] int64."""
        rows, known = within(tables, rows, known, count, min(tables.max_model_len, self.longest))
        input_ids, positions, metadata = self.passes.over_last(tables, rows, known, count, longest + self.num_drafts)
        hidden = self.model(input_ids, positions, metadata, tables.caches)
        return self.passes.draw(tables, rows, known, self.model.compute_logits(hidden[count - 1 :: count]))

    def catch_up(self, tables: Tables, rows: np.ndarray, lags: np.ndarray, hidden: Tensor | None) -> None:
        below = min(tables.max_model_len, self.longest)
        for whose, left, counts in _pieces(rows, np.minimum(lags, self.most_lag), CATCH_UP_TOKENS):
            inputs = self.passes.over_missing(tables, whose, left, counts, below)
            self.model(*inputs, tables.caches)


def _pieces(
    rows: np.ndarray, lags: np.ndarray, most_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield parts of at most `most_tokens` tokens that together are the `lags` tokens of each row, in order: the rows
    of each, how many tokens they lag before it, and how many of these it has."""
    ends = lags.cumsum()
    for begin in range(0, int(ends[-1]), most_tokens):
        done = np.clip(begin - (ends - lags), 0, lags)
        counts = np.clip(begin + most_tokens - (ends - lags), 0, lags) - done
        has = counts > 0
        yield rows[has], (lags - done)[has], counts[has]
