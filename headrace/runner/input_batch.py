"""One step's batch as device tensors at fixed addresses, filled by one copy.

Knows how a SchedulerOutput is laid out; nothing of models or of what a row holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    num_tokens: int
    num_samples: int
    num_decodes: int
    """requests at the front that run one token each"""
    max_query_len: int
    max_seq_len: int
    decode_only: bool
    """Every request runs one token and samples: request i is token i is sample i."""


class InputBatch:
    """Buffers for at most `max_rows` requests. On a GPU, `stages` pinned host copies rotate so that one may be filled
    while the device still reads another."""

    def __init__(self, max_rows: int, device: torch.device, stages: int = 4) -> None:
        self.device = device
        self.max_rows = max_rows
        pinned = device.type != "cpu"
        self._host = [torch.zeros(7, max_rows + 1, dtype=torch.int64, pin_memory=pinned) for _ in range(stages)]
        self._turn = 0
        self._device = torch.zeros(7, max_rows + 1, dtype=torch.int64, device=device) if pinned else None
        self._device32 = torch.zeros(4, max_rows + 1, dtype=torch.int32, device=device)

    def fill(self, step: SchedulerOutput, padded_reqs: int | None = None) -> Batch:
        """Copy the step's integers to the device. Requests beyond the step's own, up to `padded_reqs` (only for steps
        of single tokens), have seq_len 0 and sit in the scratch row."""
        num_reqs = len(step.rows)
        padded = padded_reqs or num_reqs
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % len(self._host)
        table: np.ndarray = host.numpy()
        computed = np.asarray(step.num_computed_tokens, dtype=np.int64)
        scheduled = np.asarray(step.num_scheduled_tokens, dtype=np.int64)
        ends = computed + scheduled
        starts = np.cumsum(scheduled)
        table[0, :num_reqs] = step.rows
        table[1, :num_reqs] = computed
        table[2, :num_reqs] = ends
        table[3, 0] = 0
        table[3, 1 : num_reqs + 1] = starts
        if padded > num_reqs:
            table[0, num_reqs:padded] = self.max_rows  # the scratch row, whose block belongs to nobody
            table[1:3, num_reqs:padded] = 0
            table[3, num_reqs + 1 : padded + 1] = np.arange(num_reqs + 1, padded + 1)
        samples = np.asarray(step.samples, dtype=bool)
        chosen = np.flatnonzero(samples)
        num_samples = len(chosen)
        table[4, :num_samples] = starts[chosen] - 1
        table[5, :num_samples] = table[0, chosen]
        table[6, :num_samples] = ends[chosen]
        if self._device is None:
            device_table = host
        else:
            device_table = self._device
            device_table.copy_(host, non_blocking=True)
        small = self._device32
        small.copy_(device_table[:4])
        max_query_len = int(scheduled.max())
        return Batch(
            rows=small[0, :padded],
            num_computed=small[1, :padded],
            seq_lens=small[2, :padded],
            query_start_loc=small[3, : padded + 1],
            sample_index=device_table[4, :num_samples],
            sample_rows=device_table[5, :num_samples],
            sample_positions=device_table[6, :num_samples],
            num_reqs=padded,
            num_tokens=int(starts[-1]) + padded - num_reqs,
            num_samples=num_samples,
            num_decodes=padded if max_query_len == 1 else int(np.argmax(scheduled > 1)),
            max_query_len=max_query_len,
            max_seq_len=int(ends.max()),
            decode_only=max_query_len == 1 and num_samples == num_reqs,
        )
