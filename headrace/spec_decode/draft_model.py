"""Lets a smaller model of the same vocabulary write on, token by token (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.table import KernelTable
from headrace.spec_decode.drafter import Tables, rows_of


class ModelDrafter:
    """Draws each guess as the model draws tokens: with the temperature and the random numbers of the request, which are
    a function of seed, position and token. So both choose the same token as often as their distributions allow.

    The smaller model has computed all known tokens of a row but the last two. The one before the last was a guess,
    which it has written and not read, if all guesses were right.
    """

    def __init__(
        self, model: Any, specs: tuple[AttentionSpec | None, ...], num_drafts: int, longest: int, kernels: KernelTable
    ) -> None:
        """`model`: a CausalModel of the runner, whose layers have the attention `specs`. `longest`: the positions that
        it knows."""
        self.model, self.num_drafts, self.longest, self.kernels = model, num_drafts, longest, kernels
        self.num_layers = len(specs)
        self._groups = sorted({spec.group for spec in specs if spec is not None})

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
        """Compute the last `count` of the `known` tokens of each row, and write and return the next # [R] int64.

        A row that is too long, or too short to be a request's, is left alone: the last one of the tables takes its
        place.
        """
        scratch, num_rows = tables.token_table.shape[0] - 1, rows.shape[0]
        fits = (known >= count) & (known < min(tables.max_model_len, self.longest))
        rows, known = torch.where(fits, rows, scratch), torch.where(fits, known, count)
        starts = torch.arange(0, (num_rows + 1) * count, count, dtype=torch.int32, device=rows.device)
        slots: list[Any] = [None] * len(tables.block_tables)
        for group in self._groups:
            input_ids, positions, slots[group] = self.kernels.prepare_batch(
                rows, known - count, starts, tables.token_table, tables.block_tables[group],
                tables.block_sizes[group], num_rows * count,
            )  # fmt: skip
        metadata = AttentionMetadata(
            rows=rows,
            query_start_loc=starts,
            seq_lens=known,
            positions=positions,
            slot_mappings=tuple(slots),
            block_tables=tables.block_tables,
            num_reqs=num_rows,
            num_tokens=num_rows * count,
            max_query_len=count,
            max_seq_len=min(tables.max_model_len, longest + self.num_drafts),
            num_decodes=num_rows if count == 1 else 0,
        )
        hidden = self.model(input_ids, positions, metadata, tables.caches)
        logits = self.model.compute_logits(hidden[count - 1 :: count])
        place, params = rows.long(), tables.sampling.gather(rows.long())
        tokens: Tensor = self.kernels.gumbel_argmax(
            logits, params.temperature.contiguous(), params.seed.contiguous(), known.long()
        )
        tables.token_table[place, known.long()] = tokens.int()
        return tokens
