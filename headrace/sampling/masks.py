"""Brings the masks of a step's grammars to the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.step import Masks, SchedulerOutput


class StepMasks(NamedTuple):
    """Holds the masks of a step's samples on the device, as the kernel mask_tokens takes them."""

    bits: Tensor
    """[lines, words] int32"""
    lines: Tensor
    """[samples] int64: each sample's line; -1: any token"""


def lines_of(step: SchedulerOutput, first_lines: dict[int, int]) -> list[int]:
    """Return the line of each of a step's samples, in order: those of a request's drafts follow its first."""
    lines: list[int] = []
    num_drafts: Sequence[int] = step.num_drafts or [0] * len(step.rows)
    for row, samples, drafts in zip(step.rows, step.samples, num_drafts, strict=True):
        if samples:
            first = first_lines.get(row)
            lines += [-1] * (1 + drafts) if first is None else range(first, first + 1 + drafts)
    return lines


def step_masks(step: SchedulerOutput, masks: Masks, device: torch.device) -> StepMasks | None:
    """Return the masks of a step, or of a part of one, in one copy that the host does not wait for; None: no sample has
    any."""
    lines = lines_of(step, masks.first_lines)
    if not lines or max(lines) < 0:
        return None
    bits = np.frombuffer(masks.bits, dtype="<i4")
    where = -(-2 * len(lines) // 4) * 4  # kernels are compiled for lines that begin at multiples of 16 bytes
    packed = torch.empty(where + len(bits), dtype=torch.int32, pin_memory=device.type != "cpu")
    staged = packed.numpy()
    staged[: 2 * len(lines)].view(np.int64)[:] = lines
    staged[where:] = bits
    on_device = _copied(packed, device)
    numbers = on_device[: 2 * len(lines)].view(torch.int64)
    return StepMasks(on_device[where:].view(-1, masks.num_words), numbers)


def _copied(packed: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, made while that computes what is queued already."""
    if device.type == "cpu":
        return packed
    stream, copies = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copies):
        on_device = packed.to(device, non_blocking=True)
    stream.wait_stream(copies)
    on_device.record_stream(stream)
    return on_device


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
