"""Steps of made-up prompts are timed on the real runner: sizes, limits, and what is left behind."""

from __future__ import annotations

import pytest
import torch

from headrace.config import EngineConfig
from headrace.distributed.mesh import Group
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.runner import profile
from headrace.runner.model_runner import ModelRunner
from headrace.runner.profile import measure_step_times
from headrace.runner.worker import Worker
from headrace.step import SchedulerOutput


class Clock:
    """An event; a millisecond passes between any two."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Clock.now += 1.0
        self.at = Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Clock) -> float:
        return end.at - self.at


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(profile, "SIZES", (64, 48, 16, 8))
    folder = resolve_model_folder("demo")
    model_config = ModelConfig.from_folder(folder)
    config, _ = decide_before_load(
        EngineConfig(max_num_batched_tokens=50, max_model_len=20, max_num_seqs=3, cpu_threads=1), model_config, "cpu"
    )
    worker = Worker(config, folder, model_config)
    worker.load()
    assert worker.runner is not None
    return worker.runner


def test_every_size_within_the_limits_is_timed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[SchedulerOutput] = []
    execute = runner.execute

    def spy(step: SchedulerOutput) -> object:
        steps.append(step)
        return execute(step)

    monkeypatch.setattr(runner, "execute", spy)
    assert measure_step_times(runner, Group()) == [(8, 1.0), (16, 1.0), (48, 1.0)]
    *timed, last = steps
    assert [step.num_scheduled_tokens for step in timed] == [[20, 20, 8]] * 2 + [[16]] * 2 + [[8]] * 2
    assert [bool(step.new_rows) for step in timed] == [True, False] * 3
    assert len({tuple(new.prompt_token_ids[:8]) for step in timed for new in step.new_rows}) == 1
    assert len(set(timed[0].new_rows[0].prompt_token_ids)) > 10
    assert (last.rows, sorted(last.freed_rows)) == ([], [0, 1, 2])


def test_launching_is_left_out_where_graphs_will_do_it(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    measure_step_times(runner, Group())
    assert slept == []
    monkeypatch.setattr(runner, "graph_settings", object())
    monkeypatch.setattr(profile, "AHEAD_SECONDS", 60.0)
    measure_step_times(runner, Group())
    assert slept == [60 * profile.CYCLES_PER_SECOND] * 3


def test_a_launch_that_outlasts_its_lead_is_timed_again_with_a_longer_one(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(runner, "graph_settings", object())
    monkeypatch.setattr(profile, "AHEAD_SECONDS", 1e-6)
    assert measure_step_times(runner, Group()) == [(8, 1.0), (16, 1.0), (48, 1.0)]
    short = int(1e-6 * profile.CYCLES_PER_SECOND)
    assert slept[::2] == [short] * 3
    assert all(longer > 10 * short for longer in slept[1::2])


@pytest.mark.parametrize(("lead", "theirs", "longer"), [(60.0, 80.0, 120.0), (60.0, 1e-6, None), (1e-6, 0.0, 0.0)])
def test_all_ranks_time_a_step_again_or_none(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, lead: float, theirs: float, longer: float | None
) -> None:
    """A rank that ran one step more would wait for the others' collectives for ever. `theirs`: the seconds that the
    other rank took to launch a step; `longer`: the lead of a third run (0: what this rank took decides it)."""
    asked: list[float] = []

    def gather(mine: torch.Tensor) -> torch.Tensor:
        asked.append(mine.item())
        return torch.cat((mine, torch.tensor([[theirs]])), dim=-1)

    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(runner, "graph_settings", object())
    monkeypatch.setattr(profile, "AHEAD_SECONDS", lead)
    measure_step_times(runner, Group(0, 2, all_gather=gather))
    assert len(asked) == 3  # each rank asks once for each size, whatever it has measured
    first = int(lead * profile.CYCLES_PER_SECOND)
    if longer is None:
        assert slept == [first] * 3
    else:
        own = [longer or 1.5 * seconds for seconds in asked]
        assert slept[::2] == [first] * 3
        assert slept[1::2] == pytest.approx([seconds * profile.CYCLES_PER_SECOND for seconds in own], rel=1e-3)
