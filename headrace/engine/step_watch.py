"""Predicted against observed step times: summed for /metrics, and one line in the log where steps stay slow.

A step is observed from the result before it, or from its own submission where the device was idle, to its result: what
the device took, as the host sees it. Knows nothing of requests, and never changes what runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headrace.planner.cost import StepWork
from headrace.planner.served import StepPrediction
from headrace.request import StepTimes
from headrace.step import SchedulerOutput

logger = logging.getLogger(__name__)

DECODE, MIXED = "decode", "mixed"
"""steps in which every request runs one token; steps with longer parts of prompts"""
SLOW = 1.5
"""Steps that take more than so many times what is predicted are told of,"""
WINDOW_SECONDS = 60.0
"""if they do over so long,"""
FEWEST_STEPS = 32
"""are so many,"""
QUIET_SECONDS = 3600.0
"""and no steps were told of for so long."""
NEAR = 32
"""Contexts of decodes that are so near count as one: it does not show in the cost of a step."""
MOST_KNOWN = 4096
"""costs of decode steps that are kept"""


class Watched(NamedTuple):
    """A step under way."""

    kind: str
    began: float
    predicted: float
    """seconds"""


class StepWatch:
    """`submitted` once a step is on its way, `finished` with its result, in the order of the steps."""

    def __init__(self, prediction: StepPrediction, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.totals = _nothing()
        """by kind of step, since start"""
        self._prediction = prediction
        self._seconds = prediction.model.seconds
        self._known: dict[tuple[float, int], float] = {}
        self._last_end = self._window_start = clock()
        self._window = _nothing()
        self._told_at = -QUIET_SECONDS

    def submitted(self, step: SchedulerOutput, began: float) -> Watched:
        """`began`: what the clock said before the executor was told of the step."""
        work = StepWork.of(step)
        if work.prefill_tokens:
            return Watched(MIXED, began, self._seconds(work))
        near = int(work.decode_context) // NEAR
        predicted = self._known.get((work.decodes, near))
        if predicted is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            predicted = self._seconds(replace(work, decode_context=(near + 0.5) * NEAR))
            self._known[work.decodes, near] = predicted
        return Watched(DECODE, began, predicted)

    def finished(self, step: Watched, counts: bool = True) -> None:
        """`counts`: False where it did more than compute (a graph was captured, memory ran out) or failed."""
        end = self.clock()
        observed = end - max(step.began, self._last_end)
        self._last_end = end
        if counts:
            for times in (self.totals[step.kind], self._window[step.kind]):
                times.steps += 1
                times.observed += observed
                times.predicted += step.predicted
        if end - self._window_start >= WINDOW_SECONDS:
            self._judge(end)
            self._window_start, self._window = end, _nothing()

    def _judge(self, now: float) -> None:
        slow = [
            kind
            for kind, times in self._window.items()
            if times.steps >= FEWEST_STEPS and times.observed > SLOW * times.predicted
        ]
        if not slow or not self._prediction.warns or now - self._told_at < QUIET_SECONDS:
            return
        self._told_at = now
        kind = max(slow, key=lambda kind: self._window[kind].observed - self._window[kind].predicted)
        times, excuse = self._window[kind], self._prediction.excuse
        logger.warning(
            "%s steps take %.2f ms, %.1f times the %.2f ms predicted for %s (%d steps of the last %.0f s)%s; "
            "headrace:step_time_seconds_observed and _predicted in /metrics go on with it",
            kind,
            1000 * times.observed / times.steps,
            times.observed / times.predicted,
            1000 * times.predicted / times.steps,
            self._prediction.chip,
            times.steps,
            now - self._window_start,
            f", which knows nothing of {excuse}" if excuse else "",
        )


def _nothing() -> dict[str, StepTimes]:
    return {kind: StepTimes() for kind in (DECODE, MIXED)}
