"""Turns a SchedulerOutput into device tensors at fixed addresses, with one copy a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.kernels.batch import copy_words_reference
from headrace.step import SchedulerOutput


class AllRows(NamedTuple):
    """Holds all requests that a batch may have, at fixed addresses; those behind the step's own have no tokens."""

    rows: Tensor
    """[max_rows + 1] int32"""
    num_computed: Tensor
    """[max_rows + 1] int32"""
    query_start_loc: Tensor
    """[max_rows + 2] int32"""


@dataclass(frozen=True)
class _Buffers:
    words: Tensor
    """# int32: all buffers, one after the other"""
    small: Tensor
    """# [4, max_rows + 2 or more] int32: rows, num_computed, seq_lens, query_start_loc"""
    large: Tensor
    """# [3 or 4, (max_rows + 2) * decode_len or more] int64: sample_index, sample_rows, sample_positions, and with
    drafts sample_offsets"""

    @staticmethod
    def allocate(width: int, decode_len: int, device: torch.device | str, pinned: bool = False) -> _Buffers:
        kinds = 3 + (decode_len > 1)
        words = torch.zeros((4 + 2 * kinds * decode_len) * width, dtype=torch.int32, device=device, pin_memory=pinned)
        return _Buffers(words, words[: 4 * width].view(4, width), words[4 * width :].view(torch.int64).view(kinds, -1))


class InputBatch:
    """Holds the buffers of a batch of at most `max_rows` requests and one of padding; a decode has up to `decode_len`
    tokens.

    `stages` host copies take turns, so that one is filled while another is still being read. On a CPU they serve as the
    device's buffers too, unless addresses are to be `fixed`.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        stages: int = 4,
        fixed: bool = False,
        copy_words: Callable[[Tensor, Tensor], None] = copy_words_reference,
        decode_len: int = 1,
    ) -> None:
        self._has_drafts = decode_len > 1
        self._copy = copy_words
        self.max_rows = max_rows
        pinned = device.type != "cpu"
        width = -(-(max_rows + 2) // 4) * 4  # so that views begin at multiples of 16 bytes, as kernels are compiled for
        self._stages = [_Buffers.allocate(width, decode_len, "cpu", pinned) for _ in range(stages)]
        self._arrays = [(stage.small.numpy(), stage.large.numpy()) for stage in self._stages]
        self._device = _Buffers.allocate(width, decode_len, device) if pinned or fixed else None
        self._views = [
            (*buffers.small.unbind(), *buffers.large.unbind())
            for buffers in (self._device or stage for stage in self._stages)
        ]
        self._turn = 0

    def all_rows(self) -> AllRows:
        """Return all rows of the batch filled last. With `fixed` addresses they stay valid for every later batch that
        is filled with `all_rows`."""
        rows, num_computed, _, query_start_loc, *_ = self._views[self._turn]
        return AllRows(
            rows[: self.max_rows + 1], num_computed[: self.max_rows + 1], query_start_loc[: self.max_rows + 2]
        )

    def fill(
        self,
        step: SchedulerOutput,
        padded_reqs: int | None = None,
        padded_tokens: int | None = None,
        all_rows: bool = False,
        padded_len: int = 1,
        settled: bool = False,
    ) -> Batch:
        """Copy the step's integers to the device and return them as a batch.

        Requests of padding, up to `padded_reqs`, are in the scratch row and have seq_len 0. Each has `padded_len`
        tokens; with `padded_tokens`, the first has all tokens up to that number and the others none. `all_rows` makes
        the result of `all_rows()` valid for this batch. `settled`: there are no drafts, and none
        of earlier steps that are not accepted or rejected yet.
        """
        num_reqs, num_tokens = len(step.rows), step.num_tokens
        padded = padded_reqs or num_reqs
        tokens = padded_tokens or num_tokens + (padded - num_reqs) * padded_len
        self._turn = (self._turn + 1) % len(self._stages)
        small, large = self._arrays[self._turn]
        facts = np.array((step.rows, step.num_computed_tokens, step.num_scheduled_tokens))
        scheduled = facts[2]
        ends = facts[1] + scheduled
        starts = scheduled.cumsum()
        small[:2, :num_reqs] = facts[:2]
        small[2, :num_reqs] = ends
        small[3, 1 : num_reqs + 1] = starts
        end = self.max_rows + 1 if all_rows else padded
        if end > num_reqs:
            small[0, num_reqs:end] = self.max_rows  # the scratch row, whose block belongs to no request
            small[1:3, num_reqs:end] = 0
            small[3, num_reqs + 1 : end + 1] = tokens
            if padded_tokens is None:
                small[3, num_reqs + 1 : padded + 1] = np.arange(num_tokens, tokens, padded_len) + padded_len
        has_drafts = self._has_drafts and not settled
        if has_drafts:
            num_samples = self._fill_samples(step, large, facts[0], starts, ends)
        else:
            num_samples = sum(step.samples)
            chosen = slice(None) if num_samples == num_reqs else np.array(step.samples)
            large[0, :num_samples] = starts[chosen] - 1
            large[1, :num_samples] = facts[0, chosen]
            large[2, :num_samples] = ends[chosen]
        if self._device is not None:
            self._copy(self._device.words, self._stages[self._turn].words)
        views = self._views[self._turn]
        rows, num_computed, seq_lens, query_start_loc, sample_index, sample_rows, sample_positions, *offsets = views
        longest = max(step.num_scheduled_tokens)
        num_decodes = num_reqs if longest == 1 else int(np.argmax(scheduled > 1))
        return Batch(
            rows=rows[:padded],
            num_computed=num_computed[:padded],
            seq_lens=seq_lens[:padded],
            query_start_loc=query_start_loc[: padded + 1],
            sample_index=sample_index[:num_samples],
            sample_rows=sample_rows[:num_samples],
            sample_positions=sample_positions[:num_samples],
            sample_offsets=offsets[0][:num_samples] if has_drafts else None,
            num_reqs=padded,
            num_tokens=tokens,
            num_samples=num_samples,
            num_decodes=padded if longest == 1 and padded_tokens is None else num_decodes,
            # 1 would mean that every request has a token, which is not so of padding
            max_query_len=longest if padded_tokens is None else max(longest, tokens - num_tokens, 2),
            max_seq_len=int(ends.max()),
            max_prompt_len=int(ends[num_decodes:].max(initial=0)),
            prompt_keys=int(ends[num_decodes:].sum()),
            decode_only=num_samples == num_tokens,
        )

    @staticmethod
    def _fill_samples(
        step: SchedulerOutput, large: np.ndarray, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> int:
        """Write a sample for the last known token of each request that samples, and for each of its drafts; return how
        many there are."""
        counts = np.array(step.samples, dtype=np.int64)
        if step.num_drafts:
            counts *= 1 + np.array(step.num_drafts)
        whose = np.repeat(np.arange(len(counts)), counts)
        num_samples = len(whose)
        offsets = np.arange(num_samples) - (counts.cumsum() - counts)[whose]
        behind = counts[whose] - 1 - offsets  # tokens of the request behind this one
        large[0, :num_samples] = starts[whose] - 1 - behind
        large[1, :num_samples] = rows[whose]
        large[2, :num_samples] = ends[whose] - behind
        large[3, :num_samples] = offsets
        return num_samples
