"""Reads slices of a checkpoint's tensors into memory: several ranges of the files at a time, in the files' order.

Threads read ahead of the caller. Where the destination is host memory that takes a file's bytes as they are, they read
into it; else into a ring of buffers (pinned, for a GPU), from which the caller's thread slices and converts on the
destination's device. So the host holds the ring and the destinations, and never a whole file.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.models.checkpoint import StoredTensor
from headrace.quantization.scheme import E8M0, Slot

RANGE_BYTES = 8 << 20
"""Most bytes that are read at once"""
READERS = 8
"""Threads: enough requests under way for a disk behind a network, too"""
AHEAD = 2 * READERS
"""Ranges that are read, or wait for it, before the caller needs them"""
BEHIND = 2
"""Ranges whose copies to a GPU may be under way meanwhile"""
WORTH_ALONE = 1 << 18
"""Bytes of a row's slice that are read without the rest of the row. Of shorter ones the whole rows are read."""
MOST_PARTS = 512
"""Most parts of a range, below the system's limit for one read"""
ALIGNMENT = 64
"""of a part's bytes in a buffer, for any element type"""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Stands for a tensor in a file and the slot that this rank's slice of it goes into."""

    stored: StoredTensor
    slot: Slot

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type as which the file's bytes are taken."""
        if self.slot.e8m0:
            return torch.uint8
        is_scale = self.stored.dtype in E8M0 and {*E8M0} <= {*self.slot.stored}
        return torch.float8_e8m0fnu if is_scale else self.stored.torch_dtype

    @cached_property
    def source(self) -> tuple[slice, ...]:
        """The slice of the stored tensor, with a place for each dimension; a scalar has none."""
        shape = self.stored.shape
        source = self.slot.slices(shape) if self.slot.shapes else self.slot.source
        return (*source[: len(shape)], *(slice(0, size) for size in shape[len(source) :]))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The slice's shape."""
        return tuple(len(range(*part.indices(size))) for part, size in zip(self.source, self.stored.shape, strict=True))

    @cached_property
    def into(self) -> Tensor | None:
        """The model's memory that takes the values one by one; None where the slot must store them (`Slot.put`)."""
        destination = self.slot.destination
        fits = self.slot.store is None and destination is not None and destination.shape == self.shape
        return destination if fits else None

    @property
    def device(self) -> torch.device:
        """The device that the values go to."""
        return torch.device("cpu") if self.slot.destination is None else self.slot.destination.device

    def in_file_order(self, memory: Tensor) -> Tensor:
        """Return memory of the values with its dimensions in the order that they have in the file."""
        return memory.mT if self.stored.transposed else memory

    def new_memory(self) -> Tensor:
        """Return memory for the values, in the type that the slot takes."""
        slot = self.slot
        kept = slot.dtype or (self.dtype if slot.destination is None else slot.destination.dtype)
        return torch.empty(self.shape, dtype=self.dtype if slot.as_stored else kept, device=self.device)


@dataclass(frozen=True)
class _Run:
    """Stands for bytes of a slice that lie side by side in the file."""

    offset: int
    """in the file"""
    shape: tuple[int, ...]
    """of what is read: some rows, whole"""
    index: tuple[int | slice, ...]
    """the part of the slice that it fills"""
    inner: tuple[slice, ...]
    """the part of what is read that goes there"""


@dataclass(frozen=True)
class _Part:
    """Stands for a run as a part of a range: which tensor it is of, and whether it is its last."""

    wanted: Wanted
    run: _Run
    is_last: bool

    @cached_property
    def num_bytes(self) -> int:
        """Its length in the file."""
        return math.prod(self.run.shape) * self.wanted.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """What it takes of a buffer, where the next part begins aligned."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT

    def follows(self, other: _Part) -> bool:
        """Tell whether this part begins in the file where `other` ends."""
        same_file = self.wanted.stored.file == other.wanted.stored.file
        return same_file and self.run.offset == other.run.offset + other.num_bytes


class _Buffer:
    """Holds what was read until it has been copied. Readers' threads make no call to a GPU: it would take memory on the
    first one, whichever is this rank's."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(RANGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def release(self) -> None:
        """Mark that all copies out of it have been queued."""
        if self._copied is not None:
            self._copied.record()

    def acquire(self) -> None:
        """Wait until the copies that `release` marked are done."""
        if self._copied is not None:
            self._copied.synchronize()


@dataclass(frozen=True)
class _Range:
    """Stands for a range of a file that is being read."""

    parts: list[_Part]
    staged: list[Tensor | None]
    """each part in the buffer, of its run's shape; None: it is read into its destination"""
    buffer: _Buffer
    read: Future[None]


def read_slices(wanted: Iterable[Wanted]) -> Generator[tuple[Wanted, Tensor]]:
    """Yield each with its values, once they are read, in order; those without elements are left out. The values are
    where they go (`Wanted.into`) or in new memory. On a GPU, what follows on the same stream sees them. To be closed by
    the caller, since threads read ahead.

    Raises CheckpointError if a file is shorter than its header said, or cannot be read.
    """
    ring: list[_Buffer] = []
    ahead: deque[_Range] = deque()
    memory: Tensor | None = None

    def finished(one: _Range) -> Iterator[tuple[Wanted, Tensor]]:
        nonlocal memory
        one.read.result()
        for part, staged in zip(one.parts, one.staged, strict=True):
            if memory is None:
                memory = part.wanted.new_memory() if part.wanted.into is None else part.wanted.into
            if staged is not None:
                filled = part.wanted.in_file_order(memory)[part.run.index]
                filled.copy_(staged.to(memory.device, non_blocking=True)[part.run.inner])
            if part.is_last:
                values, memory = memory, None
                yield part.wanted, values
                del values  # before the next one's memory is made
        one.buffer.release()

    with ExitStack() as stack, ThreadPoolExecutor(READERS, thread_name_prefix="read") as pool:
        files: dict[Path, int] = {}
        try:
            for number, parts in enumerate(_ranges(wanted)):
                stored = parts[0].wanted.stored
                if stored.file not in files:
                    files[stored.file] = _opened(stored.file, stack)
                if len(ahead) == AHEAD:
                    yield from finished(ahead.popleft())
                if number < AHEAD + BEHIND:
                    ring.append(_Buffer(parts[0].wanted.device))
                buffer = ring[number % (AHEAD + BEHIND)]
                buffer.acquire()
                staged, targets = _targets(parts, buffer)
                read = pool.submit(_read, stored.file, files[stored.file], parts[0].run.offset, targets)
                ahead.append(_Range(parts, staged, buffer, read))
            while ahead:
                yield from finished(ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _ranges(wanted: Iterable[Wanted]) -> Iterator[list[_Part]]:
    """Gather parts that lie side by side in a file, as long as they are short."""
    gathered: list[_Part] = []
    size = 0
    for one in wanted:
        order = -1 if one.stored.transposed else 1
        runs = list(_runs(one.stored.shape[::order], one.source[::order], one.dtype.itemsize, one.stored.offset))
        for run in runs:
            part = _Part(one, run, run is runs[-1])
            fits = size + part.buffer_bytes <= RANGE_BYTES and len(gathered) < MOST_PARTS
            if gathered and not (fits and part.follows(gathered[-1])):
                yield gathered
                gathered, size = [], 0
            gathered.append(part)
            size += part.buffer_bytes
    if gathered:
        yield gathered


def _runs(
    shape: tuple[int, ...], source: tuple[slice, ...], item: int, offset: int, index: tuple[int, ...] = ()
) -> Iterator[_Run]:
    """Cut a slice of a tensor of `shape`, with elements of `item` bytes from `offset` in the file, into runs."""
    if not shape:
        yield _Run(offset, (), index, ())
        return
    kept = [range(*part.indices(size)) for part, size in zip(source, shape, strict=True)]
    row, kept_of_row = (math.prod(map(len, sizes)) * item for sizes in ([range(size) for size in shape[1:]], kept[1:]))
    if row > RANGE_BYTES or WORTH_ALONE <= kept_of_row < row:
        for place, number in enumerate(kept[0]):
            yield from _runs(shape[1:], source[1:], item, offset + number * row, (*index, place))
    elif kept_of_row:
        step = kept[0].step
        at_once = max(1, RANGE_BYTES // (row * step))
        for first in range(0, len(kept[0]), at_once):
            rows = kept[0][first : first + at_once]
            read = (rows[-1] + 1 - rows[0], *shape[1:])
            filled = slice(first, first + len(rows))
            yield _Run(offset + rows[0] * row, read, (*index, filled), (slice(None, None, step), *source[1:]))


def _targets(parts: list[_Part], buffer: _Buffer) -> tuple[list[Tensor | None], list[memoryview]]:
    """Return two things, for each part: where it lies in the buffer, or None, and the bytes to read it into."""
    staged: list[Tensor | None] = []
    targets: list[memoryview] = []
    used = 0
    for part in parts:
        into = _direct(part)
        if into is None:
            place = buffer.memory[used : used + part.num_bytes]
            used += part.buffer_bytes
            staged.append(place.view(part.wanted.dtype).view(part.run.shape))
        else:
            place = into.flatten().view(torch.uint8)
            staged.append(None)
        targets.append(place.numpy().data)
    return staged, targets


def _direct(part: _Part) -> Tensor | None:
    """Return the destination's memory for a part that can be read into it."""
    into = part.wanted.into
    if into is None or into.device.type != "cpu" or into.dtype != part.wanted.dtype:
        return None
    into = part.wanted.in_file_order(into)[part.run.index]
    return into if into.shape == part.run.shape and into.is_contiguous() else None


def _opened(file: Path, stack: ExitStack) -> int:
    try:
        number = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    stack.callback(os.close, number)
    return number


def _read(file: Path, number: int, offset: int, targets: list[memoryview]) -> None:
    """Fill `targets`, one after the other, from the open file's `offset`."""
    while targets:
        try:
            count = os.preadv(number, targets, offset)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{file} cannot be read (truncated?): it ends at byte {offset}")
        offset += count
        done = 0
        while done < len(targets) and count >= len(targets[done]):
            count -= len(targets[done])
            done += 1
        targets = targets[done:]
        if count:
            targets[0] = targets[0][count:]
