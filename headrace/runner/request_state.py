"""Keeps what a rank knows of every admitted request, in permanent rows of tables on the device.

A row is filled at admission and lives until the request ends or is preempted; a step reads its rows through an index.
Which row belongs to which request is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.batch import scatter_words_reference
from headrace.sampling.state import SamplingState
from headrace.sampling.transfer import TableWriter
from headrace.step import SchedulerOutput

TOKENS, BLOCKS, KNOWN, SLOTS = "tokens", "blocks of group {}", "known", "adapter slots"


class RequestState:
    """Holds the tables of rows on `device`:

    - `token_table` [max_rows + 1, max_model_len + num_drafts + 1] int32: every known token; sampling writes the next
      one here, and drafts follow
    - `num_known` [max_rows + 1] int32, only with drafts: how many tokens are known, which the host learns late; behind
      steps whose lengths it knew, once `write_lengths` was called
    - `adapter_slots` [max_rows + 1] int32, only with adapters: the slot of each row's adapter, -1 where it has none
    - `block_tables` [max_rows + 1, max_blocks] int32, one for each cache group of layers
    - `sampling`: the sampling parameters of each row

    The last row is scratch: padding of captured graphs is there, and writes to `scratch_blocks`, which no request owns.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        vocab_size: int,
        scratch_blocks: Sequence[int],
        device: torch.device,
        scatter_words: Callable[[Tensor, Tensor, Tensor], None] = scatter_words_reference,
        num_drafts: int = 0,
        has_adapters: bool = False,
    ) -> None:
        self.block_sizes = block_sizes
        shapes = {
            SamplingState.TABLE: SamplingState.table_shape(max_rows),
            TOKENS: (max_rows + 1, max_model_len + num_drafts + 1),
        }
        for group, block_size in enumerate(block_sizes):
            shapes[BLOCKS.format(group)] = (max_rows + 1, -(-(max_model_len + num_drafts) // block_size))
        if num_drafts:
            shapes[KNOWN] = (max_rows + 1, 1)
        if has_adapters:
            shapes[SLOTS] = (max_rows + 1, 1)
        self._writer = TableWriter(device, shapes, scatter_words)
        self.num_known = self._writer.tables[KNOWN].view(-1) if num_drafts else None
        self._unwritten = np.zeros(max_rows + 1, dtype=np.int32)
        """by row, what num_known is to hold; 0: what it holds"""
        self.adapter_slots = self._writer.tables[SLOTS].view(-1).fill_(-1) if has_adapters else None
        self.adapted: dict[int, int] = {}
        """row -> the slot of its adapter"""
        self.token_table = self._writer.tables[TOKENS]
        self.block_tables = tuple(self._writer.tables[BLOCKS.format(group)] for group in range(len(block_sizes)))
        for table, scratch in zip(self.block_tables, scratch_blocks, strict=True):
            table[max_rows] = scratch
        self.sampling = SamplingState(max_rows, vocab_size, device, self._writer)
        self.prompt_logprobs: dict[int, tuple[int, int]] = {}
        """row -> (k, prompt length) of the requests that asked for prompt logprobs"""
        self.pools_tokens: set[int] = set()
        """rows of requests that want something of each token of a model that pools"""
        self.wants_logprobs: dict[int, int] = {}
        """row -> k of the requests that asked for logprobs"""

    def apply(self, step: SchedulerOutput) -> None:
        """Free rows, then fill rows and block tables, as the step says. All of it is one write to the device."""
        if step.freed_rows:
            self.sampling.remove(step.freed_rows)
            self._unwritten[step.freed_rows] = 0
        for row in (*step.freed_rows, *(new.row for new in step.new_rows)):
            self.prompt_logprobs.pop(row, None)
            self.wants_logprobs.pop(row, None)
            self.adapted.pop(row, None)
            self.pools_tokens.discard(row)
        if step.new_rows:
            self.sampling.add(step.new_rows)
            width = self.token_table.shape[1]
            known = [(new.row * width, new.prompt_token_ids + new.output_token_ids) for new in step.new_rows]
            self._write(TOKENS, known)
            if self.num_known is not None:
                self._unwritten[[new.row for new in step.new_rows]] = 0
                lengths = [[len(new.prompt_token_ids) + len(new.output_token_ids)] for new in step.new_rows]
                self._write(KNOWN, [(new.row, length) for new, length in zip(step.new_rows, lengths, strict=True)])
            if self.adapter_slots is not None:
                self._write(SLOTS, [(new.row, [new.adapter_slot]) for new in step.new_rows])
            for new in step.new_rows:
                if new.adapter_slot >= 0:
                    self.adapted[new.row] = new.adapter_slot
                if new.params.prompt_logprobs is not None:
                    self.prompt_logprobs[new.row] = (new.params.prompt_logprobs, len(new.prompt_token_ids))
                if new.pools_tokens:
                    self.pools_tokens.add(new.row)
                if new.params.logprobs is not None:
                    self.wants_logprobs[new.row] = new.params.logprobs
        if step.block_updates:
            for group, table in enumerate(self.block_tables):
                width = table.shape[1]
                runs = [(u.row * width + u.start, u.block_ids) for u in step.block_updates if u.group == group]
                self._write(BLOCKS.format(group), runs)
        self._writer.flush()

    def note_lengths(self, step: SchedulerOutput) -> None:
        """Keep how many tokens are known of the rows that sample in a step without drafts, for num_known to hold."""
        sampled = np.array(step.samples)
        ends = np.array(step.num_computed_tokens) + np.array(step.num_scheduled_tokens)
        self._unwritten[np.array(step.rows)[sampled]] = ends[sampled] + 1

    def write_lengths(self) -> None:
        """Write to num_known what was noted."""
        rows = np.flatnonzero(self._unwritten)
        if len(rows):
            self._writer.write(KNOWN, rows, self._unwritten[rows])
            self._writer.flush()
            self._unwritten[rows] = 0

    def _write(self, table: str, runs: list[tuple[int, list[int]]]) -> None:
        """Set table.flatten()[start : start + len(values)] = values for each (start, values)."""
        counts = np.fromiter((len(values) for _, values in runs), dtype=np.int64, count=len(runs))
        total = int(counts.sum())
        starts = np.fromiter((start for start, _ in runs), dtype=np.int64, count=len(runs))
        begins = np.cumsum(counts) - counts
        index = np.arange(total) + np.repeat(starts - begins, counts)
        values = np.fromiter(chain.from_iterable(values for _, values in runs), dtype=np.int32, count=total)
        self._writer.write(table, index, values)
