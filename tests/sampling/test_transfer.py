"""Writes to permanent tables: what lands where, and what happens to the memory that it passes through."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.sampling import transfer
from headrace.sampling.transfer import TableWriter

CPU = torch.device("cpu")


def test_words_land_where_the_index_says() -> None:
    table = torch.zeros(3, 5, dtype=torch.int32)
    TableWriter(CPU).write(table, np.array([14, 0, 6]), np.array([7, 8, -(2**31)]))
    assert table.tolist() == [[8, 0, 0, 0, 0], [0, -(2**31), 0, 0, 0], [0, 0, 0, 0, 7]]


def test_nothing_to_write() -> None:
    table = torch.ones(4, dtype=torch.int32)
    TableWriter(CPU).write(table, np.array([], dtype=np.int64), np.array([], dtype=np.int32))
    assert table.tolist() == [1, 1, 1, 1]


def test_what_a_kernel_may_still_read_is_left_alone_for_a_turn_of_all_stages() -> None:
    """And values stand at a multiple of 16 bytes, for which kernels are compiled."""
    held: list[tuple[Tensor, Tensor, list[int]]] = []

    def read_later(table: Tensor, index: Tensor, values: Tensor) -> None:
        assert index.data_ptr() % 16 == values.data_ptr() % 16 == 0
        held.append((index, values, values.tolist()))

    writer = TableWriter(CPU, read_later, stages=3)
    for first in range(7):
        count = 2 * transfer.SMALLEST_STAGE if first == 4 else 3 + first  # a stage grows
        writer.write(torch.zeros(1, dtype=torch.int32), np.arange(count), np.arange(first, first + count))
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
    writer, table = TableWriter(CPU, stages=2, new_event=Told), torch.zeros(4, dtype=torch.int32)
    for _ in range(3):
        writer.write(table, np.array([1]), np.array([5]))
    first, second = told[0][1], told[2][1]
    assert {first, second} == {0, 1}
    again = [("waits for", first), ("written", first)]
    assert told == [*again, ("waits for", second), ("written", second), *again]
