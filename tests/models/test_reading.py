"""What lies in a file arrives in its slot, whatever its shape, type and slice, and no more than that is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.models import reading
from headrace.models.checkpoint import stored_tensors
from headrace.models.reading import Wanted, read_slices
from headrace.quantization.scheme import Slot

POISON = 96.0
"""exact in all of TYPES"""
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.uint8]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read, as they happen."""
    seen: list[int] = []
    preadv = os.preadv

    def spy(number: int, targets: Sequence[Any], offset: int) -> int:
        count = preadv(number, targets, offset)
        seen.append(count)
        return count

    monkeypatch.setattr(os, "preadv", spy)
    return seen


def write(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors of any type with numbers that all of TYPES hold."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(0, 16, tuple(shape)).to(dtype)


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def wanted(file: Path, slots: dict[str, Slot]) -> list[Wanted]:
    return [Wanted(stored, slots[stored.name]) for stored in stored_tensors(file) if stored.name in slots]


def read(slots: list[Wanted]) -> list[str]:
    """Fill the slots as the loader does; return the names in the order in which they came."""
    names = []
    for one, values in read_slices(slots):
        names.append(one.stored.name)
        if one.into is None:
            one.slot.put(values)
    return names


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], tuple[slice, ...], torch.dtype, torch.dtype, str]:
    """(shape in the file, slice of it, type there, type wanted, how the destination lies in memory)."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    source = []
    for size in shape:
        start = draw(st.integers(0, size))
        source.append(slice(start, draw(st.integers(start, size)), draw(st.sampled_from([1, 1, 1, 2, 3]))))
    if draw(st.booleans()):
        source = [slice(0, size) for size in shape]
    kinds = st.sampled_from(["apart", "part of more", "transposed", "stored"])
    return shape, tuple(source), draw(st.sampled_from(TYPES)), draw(st.sampled_from(TYPES)), draw(kinds)


@settings(max_examples=60, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=12), st.sampled_from([64, 200, 1 << 20]), st.sampled_from([8, 1 << 18]))
def test_any_slice_of_any_tensor(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[tuple[list[int], tuple[slice, ...], torch.dtype, torch.dtype, str]],
    range_bytes: int,
    worth_alone: int,
) -> None:
    """With ranges so short that each tensor is cut, and so long that many are read at once."""
    file = tmp_path_factory.mktemp("read") / "x.safetensors"
    tensors = {f"t{number:02}": numbers(case[0], case[2]) for number, case in enumerate(made)}
    write(file, tensors)
    slots: dict[str, Slot] = {}
    stored: dict[str, Tensor] = {}
    around: dict[str, Tensor] = {}
    for (name, tensor), (shape, source, _, dtype, kind) in zip(tensors.items(), made, strict=True):
        size = tensor[source].shape
        memory = torch.full(size, POISON).to(dtype)
        if kind == "part of more" and size:
            around[name] = torch.full((size[0] + 2, *size[1:]), POISON).to(dtype)
            memory = around[name][1:-1]
        elif kind == "transposed" and len(size) > 1:
            memory = torch.full(size[::-1], POISON).to(dtype).permute(*reversed(range(len(size))))
        store = partial(stored.__setitem__, name) if kind == "stored" else None
        slots[name] = Slot(tuple(shape), source, memory, store=store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "RANGE_BYTES", range_bytes)
        patch.setattr(reading, "WORTH_ALONE", worth_alone)
        names = read(wanted(file, slots))
    expected = [one.name for one in stored_tensors(file) if tensors[one.name][slots[one.name].source].numel()]
    assert names == expected
    for name in names:
        slot = slots[name]
        assert slot.destination is not None
        got = stored.get(name, slot.destination)
        assert got.dtype == slot.destination.dtype
        assert torch.equal(got.double(), tensors[name][slot.source].double()), name
        if name in around:
            assert (around[name][[0, -1]].double() == POISON).all()


def test_values_with_another_shape_than_their_memory_are_put(tmp_path: Path) -> None:
    """A scale of one number, or a scalar, for two heads."""
    write(tmp_path / "x", {"one": torch.tensor([3.0]), "scalar": torch.tensor(5.0)})
    one, scalar = torch.zeros(2), torch.zeros(2)
    slots = {"one": Slot((1,), (), one, optional=True), "scalar": Slot((1,), (), scalar, optional=True)}
    read(wanted(tmp_path / "x", slots))
    assert (one.tolist(), scalar.tolist()) == ([3.0, 3.0], [5.0, 5.0])


def test_a_rank_reads_only_its_rows(tmp_path: Path, reads: list[int]) -> None:
    write(tmp_path / "x", {"a": numbers((64, 8)), "b": numbers((3, 64, 8)), "c": numbers((64, 8))})
    half = (slice(16, 48), slice(0, 8))
    slots = {"a": Slot((64, 8), half, torch.empty(32, 8)), "c": Slot((64, 8), half, torch.empty(32, 8))}
    read(wanted(tmp_path / "x", slots))
    assert sorted(reads) == [1024, 1024]


def test_long_pieces_of_rows_are_read_alone(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of experts in one tensor: half of each expert's rows. Short pieces come with the whole row."""
    write(tmp_path / "x", {"a": numbers((3, 64, 8))})
    slots = {"a": Slot((3, 64, 8), (slice(0, 3), slice(32, 64), slice(0, 8)), torch.empty(3, 32, 8))}
    read(wanted(tmp_path / "x", slots))
    assert reads == [3 * 2048]
    reads.clear()
    monkeypatch.setattr(reading, "WORTH_ALONE", 1024)
    read(wanted(tmp_path / "x", slots))
    assert reads == [1024] * 3


def test_small_tensors_share_a_read_and_large_ones_take_several(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "RANGE_BYTES", 4096)
    tensors = {f"t{number:03}": numbers((4, 4)) for number in range(128)} | {"u": numbers((100, 32))}
    write(tmp_path / "x", tensors)
    slots = {name: Slot(tuple(one.shape), whole(one.shape), torch.empty_like(one)) for name, one in tensors.items()}
    read(wanted(tmp_path / "x", slots))
    assert sum(reads) == 128 * 64 + 12800
    assert len(reads) == 2 + 4
    assert max(reads) <= 4096


def test_a_read_that_returns_less_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system may, at any byte: in the middle of an element and of several tensors."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda number, targets, offset: preadv(number, [targets[0][:7]], offset))
    tensors = {"a": numbers((5, 5)), "b": numbers((3,), torch.bfloat16), "c": numbers((2, 3), torch.uint8)}
    write(tmp_path / "x", tensors)
    slots = {name: Slot(tuple(one.shape), whole(one.shape), torch.empty_like(one)) for name, one in tensors.items()}
    read(wanted(tmp_path / "x", slots))
    for name, one in tensors.items():
        assert torch.equal(slots[name].destination, one), name  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["truncated", "gone"])
def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path, change: str) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": numbers((64, 64))})
    slots = wanted(file, {"a": Slot((64, 64), whole((64, 64)), torch.empty(64, 64))})
    if change == "gone":
        file.unlink()
    else:
        os.truncate(file, 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read.*(No such file|ends at byte 1000$)"):
        read(slots)


def test_who_closes_early_ends_the_readers(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error or Ctrl-C does. Until then no more is read ahead than `AHEAD` says, in as many buffers."""
    monkeypatch.setattr(reading, "RANGE_BYTES", 1024)
    write(tmp_path / "x", {"a": numbers((16, 16)), "b": numbers((200, 256))})
    buffers: list[reading._Buffer] = []
    make = reading._Buffer
    monkeypatch.setattr(reading, "_Buffer", lambda device: buffers.append(make(device)) or buffers[-1])
    slots = {
        name: Slot(shape, whole(shape), torch.empty(shape, dtype=torch.bfloat16))
        for name, shape in (("a", (16, 16)), ("b", (200, 256)))
    }
    before = threading.active_count()
    with closing(read_slices(wanted(tmp_path / "x", slots))) as reader:
        next(reader)
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert len(reads) <= reading.AHEAD
    assert len(buffers) <= reading.AHEAD + reading.BEHIND
