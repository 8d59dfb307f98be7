"""Moves arrays from host to device without waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.batch import scatter_words_reference

SMALLEST_STAGE = 1 << 14
"""Words of pinned memory to begin with: to allocate a larger piece takes milliseconds"""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a host array as a device tensor. On a GPU the copy is queued on the current stream, and the host does not
    wait for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Event(Protocol):
    """Describes the part of torch.cuda.Event that is used here."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class TableWriter:
    """Holds permanent tables of words on the device, and writes all changes of a step to them in one launch.

    (The copy engine and torch's own indexing take the host a tenth of a millisecond, and most steps write something:
    each in which a sequence begins a block.) `stages` pieces of pinned memory take turns, and a piece is used again
    only when the device has read it; with two steps under way while one is prepared, the host never waits for that.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Mapping[str, tuple[int, int]],
        scatter_words: Callable[[Tensor, Tensor, Tensor], None] = scatter_words_reference,
        stages: int = 4,
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        """Allocate tables of `shapes` by name, filled with zeros. `new_event` is torch.cuda.Event on a GPU, by
        default."""
        self._scatter = scatter_words
        self._pinned = device.type != "cpu"
        sizes = [-(-math.prod(shape) // 4) * 4 for shape in shapes.values()]  # kernels are compiled for such alignment
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = self._memory.split(sizes)
        self.tables = {
            name: part[: math.prod(shape)].view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        """int32, zeros at first"""
        self._stages = [torch.empty(0, dtype=torch.int32)] * stages
        if new_event is None and self._pinned:
            new_event = torch.cuda.Event
        self._read = [None if new_event is None else new_event() for _ in self._stages]
        self._turn = 0
        self._index: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def write(self, table: str, index: np.ndarray, values: np.ndarray) -> None:
        """Set tables[table].flatten()[index] = values with the next flush. No word may be written twice before it."""
        self._index.append(index + self.tables[table].storage_offset())
        self._values.append(values)

    def flush(self) -> None:
        """Write what has been collected to the device, on the current stream."""
        index, values, self._index, self._values = self._index, self._values, [], []
        count = sum(map(len, index))
        if not count:
            return
        where = -(-2 * count // 4) * 4  # the same alignment, for values
        words = self._next(where + count)
        staged = words[: 2 * count].view(torch.int64), words[where : where + count]
        np.concatenate(index, out=staged[0].numpy())
        np.concatenate(values, out=staged[1].numpy())
        self._scatter(self._memory, *staged)
        if (read := self._read[self._turn]) is not None:
            read.record()

    def _next(self, num_words: int) -> Tensor:
        self._turn = (self._turn + 1) % len(self._stages)
        if (read := self._read[self._turn]) is not None:
            read.synchronize()  # returns at once if it was never recorded
        stage = self._stages[self._turn]
        if len(stage) < num_words:
            size = max(SMALLEST_STAGE, 1 << (num_words - 1).bit_length())
            stage = self._stages[self._turn] = torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
        return stage
