"""Decides which trials run, in which order, and which is best.

The plan runs first, then each knob by itself, then the winners together, and the plan once more where something beats
it. How a trial is run is the business of trial.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.advice.tune.record import Journal, Result, Trial
from headrace.errors import ConfigError, HeadraceError

NOISE = 0.02
"""A gain up to this does not count."""
WORSE = 1.1
"""A figure that the objective does not count may get worse by this factor at most."""
FIRST_LIMIT = 1800.0
"""Seconds that the plan's own trial may take, with the loading of weights."""
PATIENCE = 3.0
"""Another trial may take this many times as long as the plan's."""
LEAST_LIMIT = 60.0

PLAN, AGAIN = Trial({}), Trial({}, again=True)

RunTrial = Callable[[Trial, float], Result]


def gained(objective: str, rate: bool) -> str:
    """Return the name of the figure that `gain` compares."""
    if objective == "throughput" or (objective == "interactive" and not rate):
        return "output tok/s"
    return "ITL p99" if objective == "interactive" else "E2E p50"


def gain(objective: str, result: Result, plan: Result) -> float:
    """Return how many times better than the plan a result is in what the objective counts.

    It is 0 where the trial failed, or where another figure got too much worse.
    """
    if not result.ok or result.at_once is None or plan.at_once is None:
        return 0.0
    new, old = result.latencies, plan.latencies
    tok_s = result.at_once.tok_s / plan.at_once.tok_s
    if objective == "throughput":
        return tok_s
    if objective == "latency":
        return old.e2e_p50 / new.e2e_p50
    if result.at_rate is None:
        return tok_s if new.itl_p99 <= WORSE * old.itl_p99 else 0.0
    if new.ttft_p99 > WORSE * old.ttft_p99 or tok_s < 1 / WORSE:
        return 0.0
    return old.itl_p99 / max(new.itl_p99, 1e-9)


def may_win(objective: str, trial: Trial) -> bool:
    """Return whether the trial may be chosen. A lossy one is measured and shown, and chosen for throughput alone."""
    return objective == "throughput" or not trial.is_lossy


@dataclass(frozen=True)
class Outcome:
    """Holds all results of a tuning session, and which of them is best."""

    plan: Result
    """The better run of two, where the plan ran twice."""
    results: list[Result]
    """All others, in the order of the trials."""
    best: Result
    """The plan, where nothing beats it."""
    left: int
    """Trials for which no time was left."""
    together: bool
    """The winners were measured together, or there is at most one."""
    confirmed: bool
    """The best is the plan, or beats two runs of it; else its lead may be chance."""


class Tuner:
    """Runs the trials within a time budget, and takes those that the journal has from there."""

    def __init__(
        self,
        journal: Journal,
        run: RunTrial,
        objective: str,
        budget: float,
        clock: Callable[[], float],
        tell: Callable[[int, int, Trial, Result | None], None],
    ) -> None:
        """`tell` is called with (number, total, trial, None) before a trial and with its result afterwards."""
        self._journal, self._run, self._objective = journal, run, objective
        self._clock, self._tell = clock, tell
        self._end = clock() + budget

    def tune(self, trials_for: Callable[[Result], list[Trial]]) -> Outcome:
        """Run the plan and what `trials_for` its result proposes; lossy trials that cannot win come last.

        Raises HeadraceError where not even the plan runs.
        """
        known = self._journal.results.get(PLAN.id)
        plan = known if known is not None and known.ok else self._measure(0, 1, PLAN, FIRST_LIMIT)
        trials = sorted(trials_for(plan), key=lambda trial: may_win(self._objective, trial), reverse=True)
        limit = max(LEAST_LIMIT, PATIENCE * plan.seconds)
        done: list[Result] = []

        def attempt(number: int, trial: Trial, trials_after: int) -> Result | None:
            """Its result; None where too little time is left for it and for those that must follow."""
            result = self._journal.results.get(trial.id)
            if trial == AGAIN and not self._plan_ran_twice():
                result = None  # one that failed is tried once more
            usual = statistics.median([plan.seconds, *(entry.seconds for entry in done)])
            if result is None and self._end - self._clock() >= usual * (1 + trials_after):
                result = self._measure(number, max(number, len(trials)) if number else 1, trial, limit)
            return result

        for number, trial in enumerate(trials, 1):
            result = attempt(number, trial, self._still_wanted(plan, done))
            done += [result] if result is not None else []
        left = len(trials) - len(done)
        winners = self._winners(plan, done)
        combined = _combined(list(winners.values()))
        together = combined is None
        if combined is not None:
            result = attempt(len(trials) + 1, combined, not self._plan_ran_twice())
            if result is not None:
                together = True
                done.append(result)
                winners["together"] = result
        best = self._best(plan, winners)
        confirmed = best is plan
        again = None if confirmed else attempt(0, AGAIN, 0)
        if again is not None:
            confirmed = again.ok
            plan, other = (again, plan) if gain(self._objective, again, plan) > 1 else (plan, again)
            done.append(other)
            best = self._best(plan, winners)
        return Outcome(plan, done, best, left, together, confirmed)

    def _best(self, plan: Result, winners: dict[str, Result]) -> Result:
        return max([plan, *winners.values()], key=lambda result: self._worth(result, plan))

    def _worth(self, result: Result, plan: Result) -> float:
        """The gain, or 0 where it is within the noise."""
        value = gain(self._objective, result, plan)
        return value if value > 1 + NOISE or result is plan else 0.0

    def _winners(self, plan: Result, done: list[Result]) -> dict[str, Result]:
        """Knob -> its best result, where that is better than the plan's; the best first."""
        best: dict[str, Result] = {}
        for result in sorted(done, key=lambda result: -self._worth(result, plan)):
            (knob,) = result.trial.changes
            if may_win(self._objective, result.trial) and self._worth(result, plan) > 0:
                best.setdefault(knob, result)
        return best

    def _plan_ran_twice(self) -> bool:
        again = self._journal.results.get(AGAIN.id)
        return again is not None and again.ok

    def _still_wanted(self, plan: Result, done: list[Result]) -> int:
        """Trials to keep time for: the plan again where something beats it, and the winners together."""
        winners = list(self._winners(plan, done).values())
        combined = _combined(winners)
        together = combined is not None and combined.id not in self._journal.results
        return int(bool(winners) and not self._plan_ran_twice()) + int(together)

    def _measure(self, number: int, total: int, trial: Trial, limit: float) -> Result:
        self._tell(number, total, trial, None)
        result = self._run(trial, limit)
        if trial == PLAN and not result.ok:
            raise HeadraceError(f"the plan itself does not run, so there is nothing to tune: {result.why}")
        self._journal.add(result)
        self._tell(number, total, trial, result)
        return result


def _combined(winners: list[Result]) -> Trial | None:
    """All winning changes, without those that do not go with better ones; None: fewer than two are left."""
    changes: dict[str, Any] = {}
    for result in winners:
        both = changes | result.trial.changes
        if both.get("max_num_seqs", 0) <= both.get("max_num_batched_tokens", float("inf")):
            changes = both
    return Trial(changes) if len(changes) > 1 else None


def parse_seconds(text: str) -> float:
    """Return the seconds that `10m`, `90s`, `1.5h` or `300` mean. Raises ConfigError for anything else."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"budget must be a time such as 90s, 10m or 1h, got {text!r}")
    return seconds
