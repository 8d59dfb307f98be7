"""The order of things: the plan, one knob at a time, the winners together, and the plan again where something beats it;
and which of them is best.

Knows trials by what they gave, not how they are run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from headrace.advice.tune.record import Journal, Result, Trial
from headrace.errors import ConfigError, HeadraceError

NOISE = 0.02
"""Gains up to this are none."""
WORSE = 1.1
"""What an objective does not count may get worse by this factor at most."""
FIRST_LIMIT = 1800.0
"""seconds that the plan itself may take, weights loaded and all"""
PATIENCE = 3.0
"""times as long as the plan took: what another trial may take"""
LEAST_LIMIT = 60.0

PLAN, AGAIN = Trial({}), Trial({}, again=True)

RunTrial = Callable[[Trial, float], Result]


def gained(objective: str, rate: bool) -> str:
    """What `gain` counts."""
    if objective == "throughput" or (objective == "interactive" and not rate):
        return "output tok/s"
    return "ITL p99" if objective == "interactive" else "E2E p50"


def gain(objective: str, result: Result, plan: Result) -> float:
    """Above 1: better than the plan in what the objective counts; 0: failed, or too much worse in something else."""
    if not result.ok or result.at_once is None or plan.at_once is None:
        return 0.0
    new, old = result.felt, plan.felt
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
    """What is lossy is measured and shown, and is taken for throughput alone: serve takes it under no other
    objective."""
    return objective == "throughput" or not trial.is_lossy


@dataclass(frozen=True)
class Outcome:
    plan: Result
    """the better run of two, where it ran twice"""
    results: list[Result]
    """all others, in the order of the trials"""
    best: Result
    """the plan, where nothing beats it"""
    left: int
    """trials for which there was no time"""
    together: bool
    """Winners were measured together, or there is one at most."""
    weighed: bool
    """The best is better than two runs of the plan, or is the plan. Else it may be chance."""


class Tuner:
    def __init__(
        self,
        journal: Journal,
        run: RunTrial,
        objective: str,
        budget: float,
        clock: Callable[[], float],
        tell: Callable[[int, int, Trial, Result | None], None],
    ) -> None:
        """`tell` gets (number, of how many, trial, None before it and its result after)."""
        self._journal, self._run, self._objective = journal, run, objective
        self._budget, self._clock, self._tell = budget, clock, tell
        self._end = clock() + budget

    def tune(self, trials_for: Callable[[Result], list[Trial]]) -> Outcome:
        """`trials_for`: given the plan's result, what else to try. What may not win comes last.

        Raises HeadraceError where not even the plan runs.
        """
        plan = self._journal.results.get(PLAN.id)
        if plan is None or not plan.ok:
            plan = self._measure(0, 1, PLAN, FIRST_LIMIT)
        trials = sorted(trials_for(plan), key=self._may_win, reverse=True)
        limit = max(LEAST_LIMIT, PATIENCE * plan.seconds)
        done: list[Result] = []
        left = 0
        for number, trial in enumerate(trials, 1):
            result = self._journal.results.get(trial.id)
            if result is None and self._has_time(plan, done, self._still_wanted(plan, done)):
                result = self._measure(number, len(trials), trial, limit)
            if result is None:
                left += 1
            else:
                done.append(result)
        winners = self._winners(plan, done)
        combined = _combined(list(winners.values()))
        together = combined is None
        if combined is not None:
            result = self._journal.results.get(combined.id)
            if result is None and self._has_time(plan, done, self._measured_again() is None):
                result = self._measure(len(trials) + 1, len(trials) + 1, combined, limit)
            if result is not None:
                together = True
                done.append(result)
                winners["together"] = result
        best = self._best(plan, winners)
        weighed = best is plan
        if not weighed:
            again = self._measured_again()
            if again is None and self._has_time(plan, done):
                again = self._measure(0, 1, AGAIN, limit)
            if again is not None:
                weighed = again.ok
                plan, other = (again, plan) if gain(self._objective, again, plan) > 1 else (plan, again)
                done.append(other)
                best = self._best(plan, winners)
        return Outcome(plan, done, best, left, together, weighed)

    def _best(self, plan: Result, winners: dict[str, Result]) -> Result:
        return max([plan, *winners.values()], key=lambda result: self._worth(result, plan))

    def _worth(self, result: Result, plan: Result) -> float:
        """A gain within the noise is none."""
        found = gain(self._objective, result, plan)
        return found if found > 1 + NOISE or result is plan else 0.0

    def _may_win(self, trial: Trial) -> bool:
        return may_win(self._objective, trial)

    def _winners(self, plan: Result, done: list[Result]) -> dict[str, Result]:
        """Knob -> its best result, where that is better than the plan's; the best first."""
        best: dict[str, Result] = {}
        for result in sorted(done, key=lambda result: -self._worth(result, plan)):
            (knob,) = result.trial.changes
            if self._may_win(result.trial) and self._worth(result, plan) > 0:
                best.setdefault(knob, result)
        return best

    def _measured_again(self) -> Result | None:
        """The plan's second run; one that failed is tried once more."""
        again = self._journal.results.get(AGAIN.id)
        return again if again is not None and again.ok else None

    def _still_wanted(self, plan: Result, done: list[Result]) -> int:
        """Trials to keep time for: the plan again where something beats it, and the winners together."""
        winners = list(self._winners(plan, done).values())
        combined = _combined(winners)
        together = combined is not None and combined.id not in self._journal.results
        return int(bool(winners) and self._measured_again() is None) + int(together)

    def _has_time(self, plan: Result, done: list[Result], after: int = 0) -> bool:
        """For a trial as long as most, and as many `after` it."""
        usual = statistics.median([plan.seconds, *(result.seconds for result in done)])
        return self._end - self._clock() >= usual * (1 + after)

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
    changes: dict[str, object] = {}
    for result in winners:
        both = changes | result.trial.changes
        if both.get("max_num_seqs", 0) <= both.get("max_num_batched_tokens", float("inf")):  # type: ignore[operator]
            changes = both
    return Trial(changes) if len(changes) > 1 else None


def parse_seconds(text: str) -> float:
    """`10m`, `90s`, `1.5h`, `300`."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"budget must be a time such as 90s, 10m or 1h, got {text!r}")
    return seconds
