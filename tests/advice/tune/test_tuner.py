"""Which trials run in which order, what a budget leaves, what is kept, and who wins; on scripted results."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.advice.tune.knobs import KNOBS, trials_of
from headrace.advice.tune.options import TuneOptions
from headrace.advice.tune.page import page
from headrace.advice.tune.record import Journal, Result, Trial
from headrace.advice.tune.report import Report, as_json, rich_table
from headrace.advice.tune.trial import changed
from headrace.advice.tune.tuner import AGAIN, Outcome, Tuner, gain, parse_seconds
from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.model_config import ModelConfig
from headrace.planner.catalogue import catalogue
from tests.advice.tune.fake_trials import PLAN, Clock, FakeRun, load

MODEL = ModelConfig.from_dict(catalogue()["llama-3.1-8b"].config | {"max_position_embeddings": 8192})
LOAD = TuneOptions(num_prompts=1000)


def of(**changes: Any) -> Trial:
    return Trial(changes)


SMALL, LARGE = of(max_num_batched_tokens=4096), of(max_num_batched_tokens=16384)
FEW, EAGER, ROUNDED = of(max_num_seqs=512), of(cudagraph_mode="NONE"), of(kv_cache_dtype="fp8")
TRIALS = [SMALL, LARGE, FEW, EAGER]


@pytest.fixture(name="bench")
def make_bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "trials.jsonl")


class Bench:
    def __init__(self, path: Path) -> None:
        self.path, self.said = path, list[str]()
        self.clock = Clock()
        self.run = FakeRun(self.clock, {})

    def journal(self, key: str = "a") -> Journal:
        return Journal(self.path, key, self.said.append)

    def tune(self, budget: float = 1000.0, objective: str = "throughput", trials: Sequence[Trial] = TRIALS) -> Outcome:
        tuner = Tuner(self.journal(), self.run, objective, budget, self.clock, lambda *told: None)
        return tuner.tune(lambda plan: list(trials))


def test_the_plan_runs_first_and_the_winners_together_last(bench: Bench) -> None:
    together = of(max_num_batched_tokens=16384, max_num_seqs=512)
    bench.run.script = {SMALL.id: 1100.0, LARGE.id: 1200.0, FEW.id: 1050.0, together.id: 1250.0}
    outcome = bench.tune()
    assert bench.run.ran == [{}, *(trial.changes for trial in TRIALS), together.changes, {}]
    assert outcome.best.trial == together
    assert (outcome.left, outcome.together, outcome.confirmed) == (0, True, True)


def test_winners_that_do_worse_together_leave_the_best_alone(bench: Bench) -> None:
    bench.run.script = {LARGE.id: 1200.0, FEW.id: 1100.0}
    assert bench.tune().best.trial == LARGE


def test_gains_within_the_noise_are_none(bench: Bench) -> None:
    bench.run.script = {LARGE.id: 1019.0, FEW.id: 1015.0}
    outcome = bench.tune()
    assert outcome.best is outcome.plan
    assert len(bench.run.ran) == 5


def test_what_only_chance_made_better_than_the_plan_loses_to_its_second_run(bench: Bench) -> None:
    bench.run.script = {LARGE.id: 1060.0, AGAIN.id: 1050.0}
    outcome = bench.tune()
    assert outcome.best is outcome.plan
    assert outcome.plan.trial == AGAIN
    assert [result.trial for result in outcome.results][-1] == of()
    bench.tune()
    assert len(bench.run.ran) == 6
    report = Report(outcome, "throughput", "a model", "a load")
    assert report.verdict() == "Nothing beats both runs of the plan by more than noise (2%): serve keeps it."
    bench.run.script = {}
    assert len(rich_table(report).rows) == 6


def test_a_second_run_of_the_plan_that_fails_changes_nothing(bench: Bench) -> None:
    bench.run.script = {LARGE.id: 1060.0, AGAIN.id: "CUDA out of memory"}
    outcome = bench.tune()
    assert (outcome.best.trial, outcome.plan.trial, outcome.confirmed) == (LARGE, of(), False)
    report = Report(outcome, "throughput", "a model", "a load")
    assert "may be chance" in report.doubt()
    assert report.doubt() in page(report)
    assert not as_json(report)["weighed_twice"]
    bench.run.script = {LARGE.id: 1060.0}
    assert bench.tune().confirmed
    assert bench.run.ran[-2:] == [{}, {}]


def test_time_is_not_kept_for_what_was_measured_before(bench: Bench) -> None:
    """Else a budget of a few trials would never get to the rest."""
    bench.run.script = {SMALL.id: 1100.0, LARGE.id: 1200.0, FEW.id: 1100.0}
    outcome = bench.tune(budget=60.0)
    assert bench.run.ran[-2:] == [LARGE.changes | FEW.changes, {}], "time is kept for the winners together"
    assert (outcome.left, outcome.together) == (1, True)
    outcome = bench.tune(budget=15.0)
    assert bench.run.ran[-1] == EAGER.changes
    assert (outcome.left, outcome.together, outcome.confirmed) == (0, True, True)


def test_where_there_is_no_time_for_it_that_is_said(bench: Bench) -> None:
    bench.run.script = {of(max_num_seqs=512).id: 1100.0}
    bench.run.before = lambda trial: setattr(bench.clock, "now", bench.clock.now + 15 * (trial == EAGER))
    outcome = bench.tune(budget=66.0)
    assert (outcome.best.trial, outcome.confirmed) == (FEW, False)


def test_what_is_lossy_is_measured_last_and_proposed_and_wins_for_throughput_alone(bench: Bench) -> None:
    bench.run.script = {ROUNDED.id: 2000.0}
    outcome = bench.tune(objective="interactive", trials=[ROUNDED, *TRIALS])
    assert outcome.best is outcome.plan
    assert bench.run.ran[-1] == ROUNDED.changes
    report = Report(outcome, "interactive", "a model", "a load")
    assert report.verdict() == "Nothing beats the plan by more than noise (2%): serve keeps it."
    assert report.proposal() == (
        "Not taken: kv_cache_dtype fp8 (lossy), +100.0% over the plan in output tok/s. It moves answers, so no profile "
        "holds it: --kv-cache-dtype fp8 asks for it."
    )
    assert report.proposal() in page(report)
    assert {entry["trial"]["changes"].get("kv_cache_dtype"): entry["lossy"] for entry in as_json(report)["trials"]} == {
        None: False,
        "fp8": True,
    }
    bench.clock.now, bench.run.ran = 0.0, []
    outcome = bench.tune(trials=[ROUNDED, *TRIALS])
    assert outcome.best.trial == ROUNDED
    assert Report(outcome, "throughput", "a model", "a load").proposal() == ""


def test_a_lossy_gain_within_the_noise_is_not_proposed(bench: Bench) -> None:
    bench.run.script = {ROUNDED.id: 1019.0}
    outcome = bench.tune(objective="interactive", trials=[ROUNDED])
    assert Report(outcome, "interactive", "a model", "a load").proposal() == ""


def test_a_failed_trial_is_a_result_and_not_tried_again(bench: Bench) -> None:
    bench.run.script = {SMALL.id: "CUDA out of memory", LARGE.id: 1200.0}
    outcome = bench.tune()
    assert outcome.best.trial == LARGE
    assert [result.why for result in outcome.results if not result.ok] == ["CUDA out of memory"]
    bench.tune()
    assert bench.run.ran.count(SMALL.changes) == 1


def test_a_plan_that_fails_is_an_error_and_is_tried_again(bench: Bench) -> None:
    bench.run.script = {of().id: "no such GPU"}
    with pytest.raises(HeadraceError, match=r"the plan itself does not run.*no such GPU"):
        bench.tune()
    bench.run.script = {}
    bench.tune()
    assert bench.run.ran[:2] == [{}, {}]


def test_a_budget_that_ends_early_leaves_what_was_measured(bench: Bench) -> None:
    bench.run.script = {SMALL.id: 1100.0}
    outcome = bench.tune(budget=25.0)
    assert bench.run.ran == [{}, SMALL.changes]
    assert outcome.best.trial == SMALL
    assert outcome.left == 3
    assert bench.clock.now <= 1025


def test_what_a_killed_run_has_measured_is_not_measured_again(bench: Bench) -> None:
    def kill(trial: Trial) -> None:
        if trial == FEW:
            raise KeyboardInterrupt

    bench.run.before = kill
    with pytest.raises(KeyboardInterrupt):
        bench.tune()
    assert bench.run.ran == [{}, SMALL.changes, LARGE.changes]
    bench.run.before = lambda trial: None
    outcome = bench.tune()
    assert bench.run.ran == [{}, *(trial.changes for trial in TRIALS)]
    assert [result.trial for result in outcome.results] == TRIALS
    assert not bench.said


def test_a_line_cut_off_in_the_middle_is_dropped_and_said(bench: Bench) -> None:
    bench.tune()
    whole = bench.path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    bench.path.write_bytes(whole[: last + 20])
    assert len(bench.journal().results) == 4
    assert bench.path.read_bytes() == whole[:last]
    assert "cut off in the middle" in bench.said[0]
    bench.tune()
    assert bench.run.ran[-1] == EAGER.changes
    assert len(bench.run.ran) == 6


def test_lines_of_other_tasks_and_unreadable_ones_are_left_alone(bench: Bench) -> None:
    bench.journal("b").add(Result(SMALL, "ok", 1.0, "", load(1.0)))
    with bench.path.open("a") as file:
        file.write("nonsense\n")
    assert bench.journal().results == {}
    assert "line 2 is left out" in bench.said[0]
    bench.tune()
    assert SMALL.changes in bench.run.ran
    assert list(bench.journal("b").results) == [SMALL.id]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"at_once": None}, "`at_once` must say what was measured where `status` is ok"),
        ({"at_once": {**msgspec.to_builtins(load(1.0)), "tok_s": 0}}, "Expected `float` > 0.0"),
        ({"trial": None}, "Expected `object`"),
    ],
)
def test_a_line_that_was_spoilt_by_hand_is_left_out_and_measured_again(
    bench: Bench, changes: dict[str, Any], said: str
) -> None:
    bench.tune()
    lines = [json.loads(line) for line in bench.path.read_text().splitlines()]
    for line in lines[:2]:
        line["result"] |= changes
    bench.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bench.run.ran.clear()
    assert bench.tune().plan.ok
    assert bench.run.ran == [{}, SMALL.changes]
    assert f"{bench.path}: line 1 is left out: {said}" in bench.said[0]
    assert len(bench.said) == 2


def test_a_plan_that_failed_in_the_file_is_measured_again(bench: Bench) -> None:
    bench.journal().add(Result(of(), "failed", 1.0, "spoilt by hand"))
    assert bench.tune().plan.ok


def test_a_full_disk_ends_the_run_and_keeps_what_was_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_before(trial: Trial) -> None:
        if trial == LARGE:
            monkeypatch.setattr("os.fsync", fill_up)

    bench.run.before = fill_before
    with pytest.raises(HeadraceError, match=f"^{bench.path} cannot be written: No space left on device$"):
        bench.tune()
    assert {of().id, SMALL.id} <= {*bench.journal().results}


def test_a_file_that_is_a_folder_or_has_too_long_a_name_is_one_line(bench: Bench) -> None:
    bench.path.mkdir()
    with pytest.raises(ConfigError, match=f"{bench.path} cannot be used: Is a directory; --output names another"):
        bench.journal()
    bench.path = bench.path.parent / ("x" * 300) / "trials.jsonl"
    with pytest.raises(ConfigError, match=r"cannot be used: File name too long; --output names another"):
        bench.journal()


def test_a_fresh_start_that_cannot_keep_the_old_file_is_one_line(bench: Bench) -> None:
    bench.tune()
    journal = bench.journal()
    bench.path.with_suffix(".jsonl.old").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be used: Is a directory"):
        journal.start_anew()


def test_a_fresh_start_keeps_the_old_file_beside(bench: Bench) -> None:
    bench.tune()
    journal = bench.journal()
    journal.start_anew()
    assert journal.results == {}
    assert not bench.path.exists()
    assert len(bench.path.with_suffix(".jsonl.old").read_text().splitlines()) == 5


def test_what_an_objective_counts() -> None:
    plan = Result(of(), "ok", 1.0, "", load(1000), load(50, itl=20.0, ttft=100.0))

    def against(**felt: float) -> float:
        result = Result(SMALL, "ok", 1.0, "", load(1000), load(50, **{"itl": 20.0, "ttft": 100.0} | felt))
        return gain("interactive", result, plan)

    assert against(itl=10.0) == 2.0
    assert against(itl=10.0, ttft=109.0) == 2.0
    assert against(itl=10.0, ttft=111.0) == 0.0
    slow = Result(SMALL, "ok", 1.0, "", load(2000, itl=30.0))
    full = Result(of(), "ok", 1.0, "", load(1000))
    assert gain("throughput", slow, full) == 2.0
    assert gain("interactive", slow, full) == 0.0
    assert gain("latency", slow, full) == pytest.approx(1100 / 3100)
    assert gain("throughput", Result(SMALL, "failed", 1.0, "no"), full) == 0.0


def test_every_knob_has_its_values_and_the_plan_is_none_of_them() -> None:
    trials = trials_of(KNOBS, EngineConfig(), MODEL, PLAN, LOAD)
    values: dict[str, set[Any]] = {}
    guesses = [trial.changes["speculative_config"] for trial in trials if "speculative_config" in trial.changes]
    for trial in trials:
        ((knob, value),) = trial.changes.items()
        if isinstance(value, dict):
            continue
        values.setdefault(knob, set()).add(value)
    assert values["max_num_batched_tokens"] == {2048, 4096, 16384, 32768, 65536}
    assert values["max_num_seqs"] == {128, 256, 512}
    assert values["cudagraph_mode"] == {"FULL_DECODE_ONLY", "PIECEWISE", "NONE"}
    assert values["kv_cache_dtype"] == {"fp8"}
    assert values["attention_backend"] == {"TORCH_SDPA"}
    assert guesses == [{"method": "ngram"}]
    for trial in trials:
        changed(EngineConfig(), trial)


def test_settings_that_the_load_cannot_tell_apart_are_tried_once() -> None:
    few = dataclasses.replace(LOAD, num_prompts=1000, concurrency=10)
    values = [trial.changes for trial in trials_of(KNOBS[:2], EngineConfig(), MODEL, PLAN, few)]
    assert {16384} == {entry.get("max_num_batched_tokens", 0) for entry in values} - {0, 2048, 4096}
    assert {2, 4, 8} == {entry.get("max_num_seqs", 0) for entry in values} - {0}


def test_what_the_user_pins_is_not_varied() -> None:
    guesses = {"method": "ngram"}
    config = EngineConfig(max_num_seqs=64, enforce_eager=True, kv_cache_dtype="bfloat16", speculative_config=guesses)
    knobs = {knob for trial in trials_of(KNOBS, config, MODEL, PLAN, LOAD) for knob in trial.changes}
    assert knobs == {"max_num_batched_tokens", "attention_backend"}


def test_the_most_promising_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.advice.tune.knobs.read_gpus", lambda: [("NVIDIA H200", 150 << 30)])
    trials = trials_of(KNOBS, EngineConfig(objective="throughput"), MODEL, PLAN, LOAD)
    order = [trial.changes for trial in trials]
    assert order[0] == {"kv_cache_dtype": "fp8"}
    assert order.index({"max_num_seqs": 512}) < order.index({"max_num_seqs": 128})
    assert order.index({"max_num_batched_tokens": 16384}) < order.index({"max_num_batched_tokens": 2048})


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90s", 90), ("1.5h", 5400), ("30", 30)])
def test_budgets(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "ten", "inf", "nan"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 90s, 10m or 1h"):
        parse_seconds(text)
