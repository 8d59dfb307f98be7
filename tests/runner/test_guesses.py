"""What a drafter leaves out where steps ask for no guesses, and when it takes that in: each hidden state once, in the
order of its row's tokens, before guesses are made, and before rows are freed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.runner import guesses
from headrace.runner.guesses import Guesses
from headrace.step import SchedulerOutput

ROWS, GUESSES = 5, 2


class Reader:
    """Keeps, by row, the hidden states that it has taken in; the runner's are 1000 * row + position."""

    num_drafts, num_layers, taps = GUESSES, 1, False

    def __init__(self, most_lag: int) -> None:
        self.most_lag = most_lag
        self.taken: dict[int, list[int]] = {row: [] for row in range(ROWS)}
        self.sizes: list[int] = []

    def take(self, hidden: Tensor) -> None:
        for one in hidden[:, 0].int().tolist():
            self.taken[one // 1000].append(one % 1000)

    def catch_up(self, tables: Any, rows: np.ndarray, lags: np.ndarray, hidden: Tensor) -> None:
        assert [one // 1000 for one in hidden[:, 0].int().tolist()] == np.repeat(rows, lags).tolist()
        assert lags.max() <= self.most_lag
        self.sizes.append(len(hidden))
        self.take(hidden)

    def propose(self, tables: Any, batch: Any, sampled: Tensor | None) -> None:
        self.take(tables.hidden[: batch.num_tokens])


@pytest.mark.parametrize(
    ("kept", "most_lag", "many"), [(11, 1000, ROWS + 1), (200, 3, ROWS + 1), (200, 0, ROWS + 1), (11, 1000, 3)]
)
def test_each_hidden_state_is_taken_in_once_and_in_time(
    kept: int, most_lag: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, of `many` rows, those are dropped which would be taken in before guesses are asked for."""
    monkeypatch.setattr(guesses, "KEPT_TOKENS", kept)
    monkeypatch.setattr(guesses, "MANY", many)
    rng, reader = random.Random(1), Reader(most_lag)
    tables: Any = SimpleNamespace(token_table=torch.zeros(ROWS + 1, 4), hidden=torch.zeros(64, 1))
    drafting, lengths, left_out = Guesses(reader, tables, lambda: None), [0] * ROWS, 0  # type: ignore[arg-type]
    for number in range(400):
        rows = sorted(rng.sample(range(ROWS), rng.randint(1, ROWS)))
        freed = [row for row in range(ROWS) if rng.random() < 0.02]
        whole = rng.random() < 0.1  # prompts, or drafts that are verified
        counts = [rng.randint(1, 4) if whole else 1 for _ in rows]
        asked = GUESSES if number % 40 > 30 else 0
        step = SchedulerOutput(number, [], freed, [], rows, [], counts, [True] * len(rows), num_guesses=asked)
        lagging, taken_in = int((drafting._lags > 0).sum()), len(reader.sizes)
        drafting.catch_up(step)
        assert asked or lagging < many or len(reader.sizes) == taken_in
        for row in range(ROWS):
            if asked or row in freed:
                taken = reader.taken[row]
                assert taken == (list(range(lengths[row])) if many > ROWS else sorted({*taken}))
            if row in freed:
                reader.taken[row], lengths[row] = [], 0
        states = [
            1000 * row + lengths[row] + one for row, count in zip(rows, counts, strict=True) for one in range(count)
        ]
        tables.hidden[: len(states), 0] = torch.tensor(states, dtype=torch.float32)
        for row, count in zip(rows, counts, strict=True):
            lengths[row] += count
        before = sum(map(len, reader.taken.values()))
        size = SimpleNamespace(num_samples=len(rows), num_tokens=len(states), decode_only=True, rows=torch.tensor(rows))
        drafting.make(step, size, None)  # type: ignore[arg-type]
        left_out += sum(map(len, reader.taken.values())) == before
    assert left_out > 200 if most_lag else not left_out
    assert max(reader.sizes, default=0) <= kept


def test_steps_of_no_request_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that an idle server warms up with fill what is kept; steps of requests are left out all the same."""
    monkeypatch.setattr(guesses, "KEPT_TOKENS", 8)
    reader = Reader(1000)
    tables: Any = SimpleNamespace(token_table=torch.zeros(ROWS + 1, 4), hidden=torch.zeros(64, 1))
    drafting = Guesses(reader, tables, lambda: None)  # type: ignore[arg-type]
    for number, rows in enumerate([[ROWS] * 4, [ROWS] * 4, [0, 1], [0, 1]]):
        step = SchedulerOutput(number, [], [], [], rows, [], [1] * len(rows), [True] * len(rows))
        drafting.catch_up(step)
        size = SimpleNamespace(num_samples=len(rows), num_tokens=len(rows), decode_only=True, rows=torch.tensor(rows))
        drafting.make(step, size, None)  # type: ignore[arg-type]
    assert not any(reader.taken.values())
