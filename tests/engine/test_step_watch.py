"""Step times against what is predicted: what counts as a step's time, what /metrics shows, and when the log says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.messages import CoreFacts
from headrace.engine.metrics import EngineMetrics
from headrace.engine.step_watch import QUIET_SECONDS, WINDOW_SECONDS, StepWatch
from headrace.errors import HeadraceError
from headrace.planner.cost import StepModel, StepWork
from headrace.planner.served import StepPrediction
from headrace.request import EngineCoreOutputs, SchedulerStats, StepTimes
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import RunnerOutput, SchedulerOutput
from tests.engine.fakes import make_echo, model_folder
from tests.engine.test_core import drain, request

FAIL = 77


def step(*work: tuple[int, int], number: int = 0) -> SchedulerOutput:
    """(tokens computed before, tokens) of each request."""
    computed, counts = [entry[0] for entry in work], [entry[1] for entry in work]
    return SchedulerOutput(number, [], [], [], list(range(len(work))), computed, counts, [True] * len(work))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Model:
    """1 ms a step and 1 ms a prompt token; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[StepWork] = []

    def seconds(self, work: StepWork) -> float:
        self.asked.append(work)
        return 0.001 * (1 + work.prefill_tokens)


def watch_of(clock: Clock, **more: Any) -> tuple[StepWatch, Model]:
    model = Model()
    return StepWatch(StepPrediction(cast(StepModel, model), "a chip", **more), clock), model


def test_what_a_step_computes() -> None:
    assert StepWork.of(step((10, 1), (20, 1))) == StepWork(2, 16.0)
    mixed = StepWork.of(step((10, 1), (0, 4), (100, 2)))
    assert (mixed.decodes, mixed.decode_context, mixed.prefill_tokens, mixed.prompts) == (1, 11.0, 6, 2)
    assert mixed.prefill_context == pytest.approx((1 + 2 + 3 + 4 + 101 + 102) / 6)
    assert StepWork.of(step((0, 3))).prefill_context == 2.0
    assert StepWork.of(step()) == StepWork(0, 0.0)


@dataclass
class Handle:
    executor: Device
    output: RunnerOutput | Exception
    ends: float

    def done(self) -> bool:
        return self.executor.clock.now >= self.ends

    def result(self) -> RunnerOutput:
        self.executor.clock.now = max(self.executor.clock.now, self.ends)
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


@dataclass
class Device:
    """Runs one step after the other, each for so many seconds of the clock; a prompt that begins with FAIL fails."""

    clock: Clock
    seconds: float = 0.005
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    _free_at: float = 0.0

    def execute(self, plan: SchedulerOutput) -> Handle:
        self.steps += 1
        self._free_at = max(self._free_at, self.clock.now) + self.seconds
        output = RunnerOutput(plan.step, [9] * sum(plan.samples), notes=self.notes)
        failing = any(row.prompt_token_ids[0] == FAIL for row in plan.new_rows)
        return Handle(self, HeadraceError("as asked") if failing else output, self._free_at)

    def check(self) -> None: ...


def core_of(device: Device, watch: StepWatch | None) -> EngineCore:
    limits = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128, layout=same_layout(4), num_pages=64
    )
    facts = CoreFacts(EngineConfig(), [], [], 64)
    return EngineCore(facts, Scheduler(limits), cast(Any, device), watch)


def totals(watch: StepWatch, kind: str) -> tuple[int, float, float]:
    found = watch.totals[kind]
    return found.steps, found.observed, found.predicted


def test_a_step_lasts_from_result_to_result_however_long_it_was_queued() -> None:
    clock = Clock()
    watch, _ = watch_of(clock)
    core = core_of(Device(clock), watch)
    core.add_request(request("a", [10, 11, 12], max_tokens=6))
    clock.now += 100.0  # nobody was served meanwhile
    drain(core)
    assert totals(watch, "mixed") == (1, pytest.approx(0.005), pytest.approx(0.004))
    steps, observed, predicted = totals(watch, "decode")
    assert steps == 5
    assert observed == pytest.approx(5 * 0.005)
    assert predicted == pytest.approx(5 * 0.001)
    clock.now += 50.0
    core.add_request(request("b", [10, 11], max_tokens=1))
    drain(core)
    assert totals(watch, "mixed")[1] == pytest.approx(0.010)


def test_steps_that_capture_or_fail_are_left_out_and_do_not_lengthen_the_next() -> None:
    clock = Clock()
    watch, _ = watch_of(clock)
    device = Device(clock, notes=["captured a graph"])
    core = core_of(device, watch)
    core.add_request(request("a", [10, 11, 12], max_tokens=2))
    drain(core)
    assert watch.totals["mixed"].steps == watch.totals["decode"].steps == 0
    device.notes = []
    core.add_request(request("b", [FAIL, 21, 22], max_tokens=1))
    drain(core)
    assert watch.totals["mixed"].steps == 0
    core.add_request(request("c", [30, 31, 32], max_tokens=2))
    drain(core)
    assert totals(watch, "mixed")[:2] == (1, pytest.approx(0.005))
    assert totals(watch, "decode")[:2] == (1, pytest.approx(0.005))


def test_decode_steps_that_are_alike_are_predicted_once() -> None:
    watch, model = watch_of(Clock())
    for context in range(64, 96):
        watch.submitted(step((context, 1), (context, 1)), 0.0)
    assert [work.decode_context for work in model.asked] == [80.0, 112.0]  # the token itself counts
    watch.submitted(step((64, 1)), 0.0)
    assert len(model.asked) == 3


def run(watch: StepWatch, clock: Clock, seconds: float, took: float, tokens: int = 1) -> None:
    """Steps one after the other for so many seconds."""
    end = clock.now + seconds
    while clock.now < end:
        watched = watch.submitted(step((50, tokens)), clock.now)
        clock.now += took
        watch.finished(watched)


def test_steps_that_stay_slow_are_told_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch, _ = watch_of(clock, excuse="eager steps")
    run(watch, clock, 2 * WINDOW_SECONDS, 0.0014)  # 1.4 times
    assert not caplog.records
    run(watch, clock, 1.5 * WINDOW_SECONDS, 0.002)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert said.startswith("decode steps take 2.00 ms, 2.0 times the 1.00 ms predicted for a chip (")
    assert "knows nothing of eager steps" in said
    run(watch, clock, QUIET_SECONDS / 2, 0.02)
    assert len(caplog.records) == 1
    run(watch, clock, QUIET_SECONDS / 2 + 2 * WINDOW_SECONDS, 0.02)
    assert len(caplog.records) == 2


def test_the_kind_that_loses_most_is_named(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch, _ = watch_of(clock)
    run(watch, clock, 5.0, 0.002)
    run(watch, clock, WINDOW_SECONDS, 0.3, tokens=99)
    assert "mixed steps take 300.00 ms, 3.0 times the 100.00 ms" in caplog.text


def test_few_steps_and_rough_predictions_are_no_reason_to_complain(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    run(watch_of(clock)[0], clock, 3 * WINDOW_SECONDS, 10.0)
    run(watch_of(clock, warns=False)[0], clock, 3 * WINDOW_SECONDS, 0.02)
    assert not caplog.records


def metrics() -> EngineMetrics:
    return EngineMetrics("m", 128, {})


def test_metrics_show_both_sums_by_kind() -> None:
    shown = metrics()
    stats = SchedulerStats(step_times={"decode": StepTimes(4, 0.5, 0.25), "mixed": StepTimes(1, 2.0, 1.0)})
    shown.begin_iteration(EngineCoreOutputs(outputs=[], stats=stats))
    text = shown.render().decode()
    labels = '{engine="0",kind="decode",model_name="m"}'
    assert f"headrace:step_time_seconds_observed_sum{labels} 0.5" in text
    assert f"headrace:step_time_seconds_predicted_sum{labels} 0.25" in text
    assert f"headrace:step_time_seconds_predicted_count{labels} 4.0" in text


def test_nothing_is_shown_or_counted_where_nothing_is_predicted() -> None:
    clock = Clock()
    core = core_of(Device(clock), None)
    core.add_request(request("a", [10, 11, 12]))
    drain(core)
    assert core.snapshot([]).stats.step_times == {}
    assert "step_time_seconds" not in metrics().render().decode()


def test_a_started_core_watches_and_sends_what_it_sees(tmp_path: Path) -> None:
    config = EngineConfig(model=str(model_folder(tmp_path)))
    core = build_core(config, tmp_path, False, f"{make_echo.__module__}:{make_echo.__name__}")
    core.add_request(request("a", [10, 11, 12]))
    drain(core)
    found = core.snapshot([]).stats.step_times
    assert found["mixed"].steps == 1
    assert found["decode"].steps == 5
    assert found["decode"].predicted > 0
    fields = [entry.field for entry in core.facts.decisions]
    assert len(fields) == len({*fields})
    assert {"attention_backend", "block_size", "num_gpu_blocks", "cudagraph_mode"} <= {*fields}
