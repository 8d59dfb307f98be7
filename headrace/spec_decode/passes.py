"""Runs what guesses tokens over the last ones of each row, and draws guesses.

Each guess is drawn as the model draws tokens: with the temperature and the random numbers of the request, which are a
function of seed, position and token. So both choose the same token as often as their distributions allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.table import KernelTable
from headrace.sampling.transfer import to_device
from headrace.spec_decode.drafter import Tables

LONGEST = 1 << 40
Inputs = tuple[Tensor, Tensor, AttentionMetadata]
"""input_ids, positions # [num_tokens], and what attention is told"""


@dataclass(frozen=True)
class Passes:
    """Makes the inputs of passes, whose layers are in some of the cache groups."""

    kernels: KernelTable
    groups: tuple[int, ...]
    ahead: int = 0
    """how much further than a token's position the id is that it stands for"""

    @staticmethod
    def of(kernels: KernelTable, specs: Sequence[AttentionSpec | None], ahead: int = 0) -> Passes:
        """Return what makes inputs for layers with these attention `specs`."""
        return Passes(kernels, tuple(sorted({spec.group for spec in specs if spec is not None})), ahead)

    def over_step(self, tables: Tables, batch: Batch) -> Inputs:
        """Return the inputs of all tokens of a step."""
        found = self._prepared(tables, batch.rows, batch.num_computed, batch.query_start_loc, batch.num_tokens)
        input_ids, positions, slots = found
        return input_ids, positions, AttentionMetadata.of(batch, positions, slots, tables.block_tables)

    def over_last(self, tables: Tables, rows: Tensor, lengths: Tensor, count: int, longest: int) -> Inputs:
        """Return the inputs of the last `count` of the first `lengths` tokens of each row [R] int32. `longest`: an
        upper bound of the lengths."""
        num_tokens = rows.shape[0] * count
        starts = torch.arange(0, num_tokens + count, count, dtype=torch.int32, device=rows.device)
        return self.over(tables, rows, lengths - count, lengths, starts, num_tokens, count, longest)

    def over_missing(
        self, tables: Tables, rows: np.ndarray, lags: np.ndarray, counts: np.ndarray, below: int
    ) -> Inputs:
        """Return the inputs of `counts` tokens of each row # [R]: of the `lags` tokens before the last known one, the
        first. Of rows in which they do not end `below` a length it computes something else."""
        device = tables.token_table.device
        index, behind, count = (to_device(one.astype(np.int32), device) for one in (rows, lags - counts, counts))
        index, ends = within(tables, index, tables.num_known.index_select(0, index) - 1 - behind, count, below)
        starts = to_device(np.concatenate(([0], counts.cumsum())).astype(np.int32), device)
        most, num_tokens = int(counts.max()), int(counts.sum())
        return self.over(tables, index, ends - count, ends, starts, num_tokens, most, tables.max_model_len)

    def over(
        self, tables: Tables, rows: Tensor, first: Tensor, ends: Tensor, starts: Tensor, num_tokens: int, most: int,
        longest: int,
    ) -> Inputs:  # fmt: skip
        """Return the inputs of the tokens of each row from position `first` up to `ends` [R] int32. `starts` [R + 1]
        int32: where each row's tokens begin among them; `most`: of a row."""
        input_ids, positions, slots = self._prepared(tables, rows, first, starts, num_tokens)
        metadata = AttentionMetadata(
            rows=rows,
            query_start_loc=starts,
            seq_lens=ends,
            positions=positions,
            slot_mappings=slots,
            block_tables=tables.block_tables,
            num_reqs=len(rows),
            num_tokens=num_tokens,
            max_query_len=most,
            max_seq_len=min(tables.max_model_len, longest),
            num_decodes=len(rows) if most == 1 else 0,
        )
        return input_ids, positions, metadata

    def _prepared(
        self, tables: Tables, rows: Tensor, num_computed: Tensor, starts: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        slots: list[Any] = [None] * len(tables.block_tables)
        for group in self.groups:
            input_ids, positions, slots[group] = self.kernels.prepare_batch(
                rows, num_computed, starts, tables.token_table[:, self.ahead :], tables.block_tables[group],
                tables.block_sizes[group], num_tokens,
            )  # fmt: skip
        return input_ids, positions, tuple(slots)

    def draw(self, tables: Tables, rows: Tensor, known: Tensor, logits: Tensor) -> Tensor:
        """Write the token that follows the `known` ones of each row; return them # [R] int64."""
        place, params = rows.long(), tables.sampling.gather(rows.long())
        tokens: Tensor = self.kernels.gumbel_argmax(
            logits, params.temperature.contiguous(), params.seed.contiguous(), known.long()
        )
        tables.token_table[place, known.long()] = tokens.int()
        return tokens


def most_lag(specs: Sequence[AttentionSpec | None], num_drafts: int) -> int:
    """Return how many tokens layers with these `specs` may be behind: blocks of tokens behind a window, or of the chunk
    before, may be others' by then."""
    windows = [0 if spec.chunked else spec.sliding_window for spec in specs if spec and spec.sliding_window]
    return max(0, min(windows, default=LONGEST) - 4 - 2 * num_drafts)


def within(tables: Tables, rows: Tensor, lengths: Tensor, least: int | Tensor, below: int) -> tuple[Tensor, Tensor]:
    """Return rows and lengths, with the last row of the tables, and the length `least`, in place of each that is
    shorter, hence no request's, or not `below` a length."""
    fits = (lengths >= least) & (lengths < below)
    scratch = tables.token_table.shape[0] - 1
    return torch.where(fits, rows, scratch), torch.where(fits, lengths, least)
