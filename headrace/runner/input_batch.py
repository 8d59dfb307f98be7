"""One step's batch as device tensors at fixed addresses, filled by one copy.

Knows how a SchedulerOutput is laid out; nothing of models or of what a row holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.batch import copy_words_reference
from headrace.step import SchedulerOutput


@dataclass(frozen=True)
class Batch:
    """Views into the buffers of InputBatch, cut to (padded) size, all on the device; R = number of requests."""

    rows: Tensor
    """[R] int32"""
    num_computed: Tensor
    """[R] int32"""
    seq_lens: Tensor
    """[R] int32: num_computed + num_scheduled; 0 where padded"""
    query_start_loc: Tensor
    """[R + 1] int32"""
    sample_index: Tensor
    """[S] int64: index into the step's tokens of each sampling request's last token"""
    sample_rows: Tensor
    """[S] int64"""
    sample_positions: Tensor
    """[S] int64: number of tokens known before the sampled one, which is the position it takes"""
    num_reqs: int
    """R, padding included, as in the numbers below"""
    num_tokens: int
    num_samples: int
    num_decodes: int
    """requests at the front that run one token each"""
    max_query_len: int
    max_seq_len: int
    max_prompt_len: int
    """of the requests behind the decodes; 0: there are none"""
    decode_only: bool
    """Every request runs one token and samples: request i is token i is sample i."""


class Everyone(NamedTuple):
    """All requests that a batch may have, at fixed addresses: those behind the step's own have no tokens."""

    rows: Tensor
    """[max_rows + 1] int32"""
    num_computed: Tensor
    """[max_rows + 1] int32"""
    query_start_loc: Tensor
    """[max_rows + 2] int32"""


@dataclass(frozen=True)
class _Buffers:
    words: Tensor
    """# int32: all of them, one after the other"""
    small: Tensor
    """# [4, max_rows + 2 or more] int32: rows, num_computed, seq_lens, query_start_loc"""
    large: Tensor
    """# [3, max_rows + 2 or more] int64: sample_index, sample_rows, sample_positions"""

    @staticmethod
    def allocate(width: int, device: torch.device | str, pinned: bool = False) -> _Buffers:
        words = torch.zeros((4 + 2 * 3) * width, dtype=torch.int32, device=device, pin_memory=pinned)
        return _Buffers(words, words[: 4 * width].view(4, width), words[4 * width :].view(torch.int64).view(3, width))


class InputBatch:
    """Buffers for at most `max_rows` requests and one of padding. `stages` host copies rotate so that one may be filled
    while another is still read. On a CPU they are the device's too, unless addresses are to be `fixed`."""

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        stages: int = 4,
        fixed: bool = False,
        copy_words: Callable[[Tensor, Tensor], None] = copy_words_reference,
    ) -> None:
        self.device = device
        self._copy = copy_words
        self.max_rows = max_rows
        pinned = device.type != "cpu"
        width = (
            -(-(max_rows + 2) // 4) * 4
        )  # every view begins at a multiple of 16 bytes, which kernels are compiled for
        self._stages = [_Buffers.allocate(width, "cpu", pinned) for _ in range(stages)]
        self._arrays = [(stage.small.numpy(), stage.large.numpy()) for stage in self._stages]
        self._device = _Buffers.allocate(width, device) if pinned or fixed else None
        self._views = [
            (*buffers.small.unbind(), *buffers.large.unbind())
            for buffers in (self._device or stage for stage in self._stages)
        ]
        self._turn = 0

    def everyone(self) -> Everyone:
        """Of the batch filled last, and with `fixed` addresses of all that follow that are filled for it."""
        rows, num_computed, _, query_start_loc, *_ = self._views[self._turn]
        return Everyone(
            rows[: self.max_rows + 1], num_computed[: self.max_rows + 1], query_start_loc[: self.max_rows + 2]
        )

    def fill(
        self,
        step: SchedulerOutput,
        padded_reqs: int | None = None,
        padded_tokens: int | None = None,
        everyone: bool = False,
    ) -> Batch:
        """Copy the step's integers to the device. Requests beyond the step's own, up to `padded_reqs`, have seq_len 0
        and sit in the scratch row: of one token each, or, with `padded_tokens`, the first of all tokens up to there
        and the others of none. `everyone`: make what `everyone()` gives right, too."""
        num_reqs, num_tokens = len(step.rows), step.num_tokens
        padded = padded_reqs or num_reqs
        tokens = padded_tokens or num_tokens + padded - num_reqs
        self._turn = (self._turn + 1) % len(self._stages)
        small, large = self._arrays[self._turn]
        facts = np.array((step.rows, step.num_computed_tokens, step.num_scheduled_tokens))
        scheduled = facts[2]
        ends = facts[1] + scheduled
        starts = scheduled.cumsum()
        small[:2, :num_reqs] = facts[:2]
        small[2, :num_reqs] = ends
        small[3, 1 : num_reqs + 1] = starts
        end = self.max_rows + 1 if everyone else padded
        if end > num_reqs:
            small[0, num_reqs:end] = self.max_rows  # the scratch row, whose block belongs to nobody
            small[1:3, num_reqs:end] = 0
            small[3, num_reqs + 1 : end + 1] = tokens
            if padded_tokens is None:
                small[3, num_reqs + 1 : padded + 1] = np.arange(num_tokens + 1, tokens + 1)
        num_samples = sum(step.samples)
        chosen = slice(None) if num_samples == num_reqs else np.array(step.samples)
        large[0, :num_samples] = starts[chosen] - 1
        large[1, :num_samples] = facts[0, chosen]
        large[2, :num_samples] = ends[chosen]
        if self._device is not None:
            self._copy(self._device.words, self._stages[self._turn].words)
        views = self._views[self._turn]
        rows, num_computed, seq_lens, query_start_loc, sample_index, sample_rows, sample_positions = views
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
            num_reqs=padded,
            num_tokens=tokens,
            num_samples=num_samples,
            num_decodes=padded if longest == 1 and padded_tokens is None else num_decodes,
            # 1 would mean one token each, which requests without tokens have not
            max_query_len=longest if padded_tokens is None else max(longest, tokens - num_tokens, 2),
            max_seq_len=int(ends.max()),
            max_prompt_len=int(ends[num_decodes:].max(initial=0)),
            decode_only=longest == 1 and num_samples == num_reqs,
        )
