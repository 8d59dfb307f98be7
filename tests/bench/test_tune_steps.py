"""What wins a bucket of a linear, and which tables are tuned: those that serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from h200_parts.settings import Settings
from tune_linears import Size
from tune_steps import Config, Steps, best_of

from headrace.kernels.gemm_config import GemmConfig

NOW, OTHER, THIRD = GemmConfig(16, 64, 128, 4), GemmConfig(16, 32, 128, 4), GemmConfig(16, 16, 128, 2)


def test_what_is_fastest_in_the_second_timing_wins_where_it_is_worth_it() -> None:
    def timed(once: dict[Config, float], again: dict[Config, float]) -> Config:
        return best_of(
            lambda config, repeats: (once if repeats == 1 else again)[config], NOW, [OTHER, NOW, THIRD, None]
        )

    once = {OTHER: 0.9, THIRD: 0.95, None: 2.0}
    assert timed(once, {NOW: 1.0, OTHER: 0.97, THIRD: 0.96, None: 2.0}) == THIRD
    assert timed(once, {NOW: 1.0, OTHER: 0.999, THIRD: 0.998, None: 2.0}) == NOW, "no more than noise"
    assert timed(once, {NOW: 1.0, OTHER: 0.99, THIRD: 0.98, None: 0.5}) is None
    assert best_of(lambda config, repeats: 1.0, NOW, [NOW]) == NOW


def test_what_serves_now_is_timed_before_and_after_the_others() -> None:
    """A machine that grows faster meanwhile makes no winner."""
    left = {NOW: [1.0, 0.9], OTHER: [0.95, 0.9]}
    assert best_of(lambda config, repeats: left[config].pop(0), NOW, [OTHER]) == NOW


@pytest.fixture(name="steps")
def steps_on_a_cpu(tmp_path: Path) -> Iterator[Steps]:
    steps = Steps(Settings(tmp_path, smoke=True), "bf16")
    yield steps
    steps.bench.close()


def test_a_step_is_what_a_run_takes_beyond_its_first_token(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps.tables == {}, "a CPU has none"
    real, ran, wholes = steps.bench.seconds, [], iter([50.0, 40.0, 5.0, 9.0, 6.0])

    def seconds(prompts: list[list[int]], output: int) -> float:
        assert real(prompts, output) > 0
        ran.append((prompts, output))
        return next(wholes) if output == 2 else 3.0

    monkeypatch.setattr(steps.bench, "seconds", seconds)
    assert steps.milliseconds(2, 3) == 3000.0, "6 of 5, 6 and 9, less 3"
    assert [output for _, output in ran] == [1, 2, 2, 1, 2, 1, 2, 1, 2]
    assert all(prompts is ran[0][0] for prompts, _ in ran)
    assert len(ran[0][0]) == 2


def test_a_linear_is_varied_for_its_bucket_alone(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(2, 6144, 4096)
    table: list[Config] = [None, *[NOW] * 64]
    steps.tables[size] = table
    seen: list[list[Config]] = []

    def milliseconds(batch: int, repeats: int) -> float:
        seen.append(list(table))
        return 0.5 if table[batch] == OTHER else 1.0

    monkeypatch.setattr("tune_steps.runnable", lambda size, bucket: [OTHER, THIRD])
    monkeypatch.setattr(steps, "milliseconds", milliseconds)
    assert steps.tune(8, size) == (16, OTHER)
    assert table == [None, NOW, *[OTHER] * 15, *[NOW] * 48]
    assert any(one[2:17] == [None] * 15 for one in seen), "the library is tried"
    assert all(one[1] == NOW and set(one[17:]) == {NOW} for one in seen)
