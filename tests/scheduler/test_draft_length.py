"""How many tokens are guessed: on a simulated device whose steps cost what they do, at acceptance as scripted, guessing
is never slower than not guessing, and near the best where it pays."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from headrace.cache_groups import same_layout
from headrace.planner.catalogue import find_model
from headrace.planner.chips import CHIPS
from headrace.planner.deployment import Deployment
from headrace.planner.draft_costs import DraftCosts
from headrace.planner.parallel import Parallel
from headrace.request import Request
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.draft_length import Costs, DraftLength
from headrace.scheduler.scheduler import Scheduler
from headrace.step import RunnerOutput, SchedulerOutput
from tests.scheduler.support import FILLER, make_request

LENGTHS = (0, 2, 3)


def costs_of_an_8b() -> DraftCosts:
    """An 8B on an H200, for which one more layer of it guesses."""
    model = find_model("llama-3.1-8b")
    head = replace(model, spec=replace(model.spec, layers=model.spec.layers[:1]))
    return DraftCosts(Deployment(model, CHIPS["h200"], Parallel(), "bf16", 2, "headrace", draft=head))


COSTS = costs_of_an_8b()


@dataclass
class Run:
    """What a simulated run gave."""

    seconds: float = 0.0
    always: dict[int, float] = field(default_factory=lambda: dict.fromkeys(LENGTHS, 0.0))
    """length -> seconds for the same tokens if all steps had it"""
    lengths: list[int] = field(default_factory=list)
    """that each step guessed"""
    steps: list[float] = field(default_factory=list)
    """seconds of each over those of one without guesses"""
    chooser: DraftLength | None = None

    def gain(self, length: int) -> float:
        """How much faster than with that length, always."""
        return self.always[length] / self.seconds

    @property
    def best(self) -> float:
        """How much faster than with the best length, always."""
        return min(self.always.values()) / self.seconds

    @property
    def changes(self) -> int:
        return sum(one != other for one, other in zip(self.lengths, self.lengths[1:], strict=False))


def simulate(
    batch: int, num_steps: int, accepts: Callable[[int], float], believed: Costs = COSTS, ends_after: int = 1 << 19,
    slowed: Callable[[int], float] = lambda number: 1.0, stalls: float = 0.0,
) -> Run:  # fmt: skip
    """Run `batch` requests at once for so many steps, two of which are under way at a time. Each guess of a step is
    right with the chance accepts(number of the step), if the one before it was. `believed`: the costs that are
    predicted; what is observed is what COSTS say, times slowed(number of the step). A step with guesses `stalls` for so
    many seconds besides. A request has `ends_after` tokens, and another takes its place."""
    chooser, run = DraftLength(LENGTHS, believed), Run()
    run.chooser = chooser
    limits = SchedulerConfig(
        batch, 8192, 1 << 20, same_layout(1 << 16), 17 * batch, num_drafts=LENGTHS[-1], look_ahead=False
    )
    scheduler, rng = Scheduler(limits, chooser), random.Random(1)
    under_way: deque[SchedulerOutput] = deque()
    added = lag = 0
    for number in range(num_steps):
        while len(scheduler.requests) < batch:
            scheduler.add_request(make_request(f"r{added}", 4, ends_after))
            added += 1
        while len(under_way) < 2 and (planned := scheduler.schedule()) is not None:
            under_way.append(planned)
        step = under_way.popleft()
        count, verified = len(step.rows), max(step.num_drafts, default=0)
        context = sum(step.num_computed_tokens) / count
        seconds = COSTS(count, context, verified) - COSTS.guessing(count, context, verified)
        seconds += COSTS.guessing(count, context, step.num_guesses)
        if step.num_guesses and lag:
            seconds += COSTS(count, context, 1, lag) - COSTS(count, context, 1)
        lag, slow = 0 if step.num_guesses else lag + 1, slowed(number)
        stalled = stalls if verified or step.num_guesses else 0.0
        seconds = slow * seconds + stalled
        counts = []
        for drafts, samples in zip(step.num_drafts or [0] * count, step.samples, strict=True):
            right = 0
            while right < drafts and rng.random() < accepts(number):
                right += 1
            counts.append(samples * (1 + right))
        num_sampled = counts if step.num_drafts else []
        scheduler.update(step, RunnerOutput(step.step, [FILLER] * sum(counts), num_sampled=num_sampled))
        chooser.observe(step, seconds * rng.uniform(0.97, 1.05), counts=not stalled)
        run.seconds += seconds
        run.lengths.append(step.num_guesses)
        run.steps.append(seconds / (slow * COSTS(count, context, 0)))
        for length in LENGTHS:
            each = sum(accepts(number) ** place for place in range(length + 1))
            run.always[length] += sum(counts) / count / each * slow * COSTS(count, context, length)
    return run


@pytest.mark.parametrize(("batch", "steps"), [(1, 3000), (32, 1000), (128, 600), (256, 400)])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8])
def test_throughput_is_near_that_of_the_best_length(batch: int, steps: int, rate: float) -> None:
    """What is lost are trials, of which the first comes early, and some steps until it is known what pays."""
    run = simulate(batch, steps, lambda _: rate)
    assert run.gain(0) > 0.985
    assert run.best > (0.96 if rate == 0.8 else 0.985)
    trials = [length for length in run.lengths if length != max(LENGTHS, key=run.lengths.count)]
    assert run.changes <= 4 + steps / 60
    assert len(trials) < 0.06 * steps or rate == 0.8


@pytest.mark.parametrize("batch", [128, 256])
def test_a_loaded_server_is_as_fast_as_without_and_its_slow_steps_are_few(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What guesses is a head, so that trials are cheap. Those after the first are as far apart as slow steps allow."""
    monkeypatch.setattr(COSTS, "_lags", False)
    run = simulate(batch, 1800, lambda _: 0.2)
    assert run.gain(0) > 0.995
    assert sorted(run.steps)[int(0.99 * len(run.steps))] < 1.05
    slow = [seconds > 1.05 for seconds in run.steps]
    assert max(sum(slow[first : first + 500]) for first in range(len(slow) - 500)) <= 2


def test_what_is_guessed_follows_the_acceptance() -> None:
    """From good guesses to useless ones and back: each is noticed before long."""
    run = simulate(1, 4500, lambda number: 0.8 if number // 1500 != 1 else 0.0)
    first, useless, again = (run.lengths[start : start + 1500] for start in (0, 1500, 3000))
    assert first.count(3) > 1300
    assert useless[100:].count(0) > 1200
    assert again[400:].count(3) > 900


def test_each_request_has_its_own_record() -> None:
    """Every second request's guesses are all wrong: those of the other are not given up for it."""
    chooser = DraftLength(LENGTHS, COSTS)
    good, bad = (Request(make_request(name, 4, 100)) for name in ("good", "bad"))
    for _ in range(30):
        chooser.learn([(good, 3, 3)])
        chooser.learn([(bad, 3, 0)])
    chosen = {}
    for request in (good, bad):
        for _ in range(16):
            chosen[request.request_id] = chooser.choose([request])
    assert chosen == {"good": 3, "bad": 0}


@pytest.mark.parametrize("wrong", [0.3, 3.0])
def test_costs_that_are_predicted_wrong_are_put_right_by_what_is_observed(wrong: float) -> None:
    """Guessing is believed to cost a third or three times of what it does."""

    def believed(count: int, context: float, length: int, lag: int) -> float:
        plain = COSTS(count, context, 0)
        return plain + wrong * (COSTS(count, context, length, lag) - plain)

    for batch, steps in ((1, 3000), (128, 800)):
        run = simulate(batch, steps, lambda _: 0.5, believed)
        assert run.gain(0) > 0.98
        assert run.best > 0.95


def test_a_trial_of_one_step_shows_what_a_length_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step both makes and verifies its guesses. All that guessing adds is believed to cost half as much again."""
    monkeypatch.setattr(COSTS, "_lags", False)

    def believed(count: int, context: float, length: int, lag: int) -> float:
        return 1.5 * COSTS(count, context, length, lag) - 0.5 * COSTS(count, context, 0)

    run = simulate(64, 900, lambda _: 0.2, believed)
    assert not any(one and two for one, two in zip(run.lengths, run.lengths[1:], strict=False))
    assert run.chooser is not None
    assert believed(64, 900, 2, 0) > 1.15 * COSTS(64, 900, 2)
    assert run.chooser.seconds(64, 900, 2) == pytest.approx(COSTS(64, 900, 2), rel=0.08)


def test_trials_are_the_rarer_the_more_they_turn_out_to_cost() -> None:
    """Each of their steps captures a graph: what the first has lost is not made up for in so short a time."""
    assert simulate(1, 1500, lambda _: 0.0).changes > 6
    assert simulate(1, 1500, lambda _: 0.0, stalls=0.03).changes <= 4


def test_a_machine_that_is_slow_for_a_while_is_taken_for_no_cost_of_guessing() -> None:
    """Trials fall into that while, in which no guess is right. When it is over guesses are, and that is seen."""
    run = simulate(
        8, 1000, lambda number: 0.8 * (number >= 400), slowed=lambda number: 3.0 if 100 <= number < 300 else 1.0
    )
    assert run.lengths[:400].count(0) > 380
    assert run.lengths[700:].count(3) > 280


def test_requests_that_come_and_go_change_nothing() -> None:
    run = simulate(8, 1500, lambda _: 0.6, ends_after=90)
    assert run.best > 0.97
    assert run.changes < 40
