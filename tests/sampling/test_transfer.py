"""Writes to permanent tables: what lands where, and what happens to the memory that it passes through."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.batch import scatter_words_reference
from headrace.sampling import transfer
from headrace.sampling.transfer import TableWriter

CPU = torch.device("cpu")


def test_words_land_where_the_index_says() -> None:
    """of two tables in one write"""
    writes: list[int] = []

    def scatter(memory: Tensor, index: Tensor, values: Tensor) -> None:
        writes.append(len(index))
        scatter_words_reference(memory, index, values)

    writer = TableWriter(CPU, {"one": (3, 5), "other": (2, 2)}, scatter)
    writer.write("one", np.array([14, 0, 6]), np.array([7, 8, -(2**31)]))
    writer.write("other", np.array([3, 0]), np.array([9, 1]))
    assert not any(table.any() for table in writer.tables.values())
    writer.flush()
    assert writer.tables["one"].tolist() == [[8, 0, 0, 0, 0], [0, -(2**31), 0, 0, 0], [0, 0, 0, 0, 7]]
    assert writer.tables["other"].tolist() == [[1, 0], [0, 9]]
    writer.flush()
    assert writes == [5]


def test_every_table_begins_where_kernels_expect_it() -> None:
    tables = TableWriter(CPU, {"one": (3, 5), "other": (1, 1), "third": (2, 3)}).tables
    assert [tuple(table.shape) for table in tables.values()] == [(3, 5), (1, 1), (2, 3)]
    assert all(table.is_contiguous() and table.data_ptr() % 16 == 0 for table in tables.values())


def test_nothing_to_write() -> None:
    def scatter(*_: Tensor) -> None:
        raise AssertionError("a launch")

    writer = TableWriter(CPU, {"one": (2, 2)}, scatter)
    writer.write("one", np.array([], dtype=np.int64), np.array([], dtype=np.int32))
    writer.flush()


def test_what_a_kernel_may_still_read_is_left_alone_for_a_turn_of_all_stages() -> None:
    """And values stand at a multiple of 16 bytes, for which kernels are compiled."""
    held: list[tuple[Tensor, Tensor, list[int]]] = []

    def read_later(table: Tensor, index: Tensor, values: Tensor) -> None:
        assert index.data_ptr() % 16 == values.data_ptr() % 16 == 0
        held.append((index, values, values.tolist()))

    size = 3 * transfer.SMALLEST_STAGE
    writer = TableWriter(CPU, {"one": (1, size)}, read_later, stages=3)
    for first in range(7):
        count = 2 * transfer.SMALLEST_STAGE if first == 4 else 3 + first  # a stage grows
        writer.write("one", np.arange(count), np.arange(first, first + count))
        writer.flush()
    assert all(values.tolist() == expected for _, values, expected in held[-3:])
    assert held[0][1].tolist() != held[0][2]


def test_a_stage_is_used_again_only_when_it_was_read() -> None:
    told: list[tuple[str, int]] = []

    class Told:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self)

        def record(self) -> None:
            told.append(("written", self.number))

        def synchronize(self) -> None:
            told.append(("waits for", self.number))

    made: list[Told] = []
    writer = TableWriter(CPU, {"one": (1, 4)}, stages=2, new_event=Told)
    for _ in range(3):
        writer.write("one", np.array([1]), np.array([5]))
        writer.flush()
    first, second = told[0][1], told[2][1]
    assert {first, second} == {0, 1}
    again = [("waits for", first), ("written", first)]
    assert told == [*again, ("waits for", second), ("written", second), *again]
