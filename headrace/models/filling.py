"""Fills slots, which say where tensors of a checkpoint go, from its files or with random numbers."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import accumulate, groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from headrace.errors import CheckpointError, ConfigError
from headrace.models.checkpoint import StoredTensor, checkpoint_files, stored_tensors, total_bytes
from headrace.models.finite import FiniteCheck
from headrace.models.reading import Wanted, read_slices
from headrace.quantization.scheme import Slot

DUMMY_RANGE = 1e-3
"""Largest absolute value of a dummy weight"""
PROGRESS_FROM_BYTES = 1e9
NOT_NEEDED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.(self_)?attn\.bias)$")
"""Tensors that old checkpoints hold though they follow from config.json"""


@contextmanager
def named(path: str) -> Iterator[None]:
    """Put the name of a layer or tensor in front of what its weight format refuses."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{path}: {error}") from None


def fill_from_checkpoint(
    slots: dict[str, Slot],
    folder: Path,
    not_needed: re.Pattern[str] = NOT_NEEDED,
    tensors_of: Callable[[Path], list[StoredTensor]] = stored_tensors,
) -> None:
    """Copy every tensor's slice into its slot. Names may have the prefix `model.` or not. What the files' headers tell
    is checked before anything else is read; `tensors_of` reads them."""
    found = match_checkpoint(slots, folder, not_needed, tensors_of)
    files = checkpoint_files(folder)
    wanted = (one for one in found.values() if one.slot.destination is not None)
    with _one_thread(), _progress(files) as reached, closing(read_slices(wanted)) as reading:
        for _, tensors in groupby(reading, lambda read: read[0].stored.file):
            check = FiniteCheck()
            for one, values in tensors:
                _take(one, values, check)
                del values  # before the next one's memory is made
                reached(one.stored)
            check.finish()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch on a CPU to the calling thread: readers use the other cores, and threads that share the work on
    thousands of small tensors mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _take(one: Wanted, values: Tensor, check: FiniteCheck) -> None:
    """Put what was read where it belongs, if it is not there, and check it."""
    slot = one.slot
    if one.into is None:
        with named(f"tensor {one.stored.shown} in {one.stored.file.name}"):
            slot.put(values)
    if not slot.optional:  # scales, whose readers report more about them
        values = values.view(torch.float8_e8m0fnu) if slot.e8m0 else values
        # what `put` made may hide it: an fp8 weight cannot be Inf
        check.add(one.stored, one.source, values, slot.is_scale)


def match_checkpoint(
    slots: dict[str, Slot],
    folder: Path,
    not_needed: re.Pattern[str],
    tensors_of: Callable[[Path], list[StoredTensor]],
) -> dict[str, Wanted]:
    """Return for each slot's name the tensor that goes into it, in the files' order. Raises CheckpointError naming the
    tensor that is missing, has no slot, or is of another shape or type than its slot takes."""
    files = checkpoint_files(folder)
    total_bytes(files)  # which names a file that is missing
    found = _match(slots, ((file, tensors_of(file)) for file in files), not_needed)
    waiting = [name for name, slot in slots.items() if not slot.optional and name not in found]
    if waiting:
        some = ", ".join(sorted(waiting)[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
        raise CheckpointError(f"{folder} lacks {some} (read {', '.join(file.name for file in files[:3])})")
    return found


def _match(
    slots: dict[str, Slot], files: Iterable[tuple[Path, list[StoredTensor]]], not_needed: re.Pattern[str]
) -> dict[str, Wanted]:
    found: dict[str, Wanted] = {}
    for file, tensors in files:
        for stored in tensors:
            name = stored.name if stored.name in slots else f"model.{stored.name}"
            if name in slots:
                _check(stored, slots[name])
                found.pop(name, None)  # of two the later counts
                found[name] = Wanted(stored, slots[name])
            elif not not_needed.search(stored.name):
                raise CheckpointError(f"{file.name} holds tensor {stored.name!r}, which this model does not have")
    return found


def _check(stored: StoredTensor, slot: Slot) -> None:
    scalar = slot.optional and slot.shape == (1,) and stored.shape == ()
    if stored.shape != slot.shape and stored.shape not in slot.shapes and not scalar:
        raise CheckpointError(
            f"tensor {stored.shown} in {stored.file.name} has shape {list(stored.shape)}, "
            f"config.json asks for {' or '.join(str(list(shape)) for shape in (slot.shape, *slot.shapes))}"
        )
    if stored.dtype not in slot.stored:
        raise CheckpointError(
            f"tensor {stored.shown} in {stored.file.name} is of type {stored.dtype}; accepted: {', '.join(slot.stored)}"
        )


def fill_with_dummies(slots: dict[str, Slot], seed: int) -> None:
    """Fill slots with uniform numbers in +-DUMMY_RANGE, which follow from `seed` and the tensor's name alone, so that
    ranks slice the same whole tensor."""
    for name, slot in slots.items():
        if slot.destination is None or slot.optional:
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(slot.destination.device).manual_seed(int.from_bytes(digest[:7], "little"))
        if tuple(slot.destination.shape) == slot.shape and slot.store is None and slot.dummy is None:
            _uniform(slot.destination, generator, slot.e8m0)
        else:
            whole = torch.empty(slot.shape, dtype=slot.dtype or slot.destination.dtype, device=slot.destination.device)
            whole = _uniform(whole, generator, slot.e8m0) if slot.dummy is None else whole.fill_(slot.dummy)
            slot.put(whole[slot.source])


def _uniform(tensor: Tensor, generator: torch.Generator, e8m0: bool) -> Tensor:
    if e8m0:  # e2m1 goes up to 6
        return tensor.fill_(127 + math.floor(math.log2(DUMMY_RANGE / 6)))
    if not tensor.is_floating_point():  # packed
        return tensor.random_(generator=generator)
    if tensor.itemsize == 1:  # fp8, whose scales say what a dummy weight is
        return tensor.copy_(torch.rand(tensor.shape, generator=generator, device=tensor.device).sub_(0.5))
    return tensor.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)


@contextmanager
def _progress(files: list[Path]) -> Iterator[Callable[[StoredTensor], None]]:
    """Show a progress bar on stderr if that is a terminal and loading takes long enough. What it yields is told each
    tensor that is loaded, in the files' order: all before it counts, also what this rank does not read."""
    total = total_bytes(files)
    if total < PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        yield lambda stored: None
        return
    before = dict(zip(files, accumulate((file.stat().st_size for file in files), initial=0), strict=False))
    columns = (
        TextColumn("Loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda stored: progress.update(task, completed=before[stored.file] + stored.offset + stored.num_bytes)
