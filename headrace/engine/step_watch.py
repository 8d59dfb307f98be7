"""Compares step times with predicted ones: sums both for /metrics, and warns when steps stay slow.

A step is timed from the previous step's result (or from its own submission, if the device was idle) to its result. That
is the device's time as the host sees it. Never changes what runs.
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
"""Kinds of steps: those in which every request computes one token, and those with longer parts of prompts."""
SLOW = 1.5
"""Steps of a window are slow if they take more than SLOW times what is predicted."""
WINDOW_SECONDS = 60.0
FEWEST_STEPS = 32
"""A window with fewer steps is not judged."""
QUIET_SECONDS = 3600.0
"""Least time between two warnings."""
CONTEXT_STEP = 32
"""Decode steps whose mean contexts round to the same multiple of so many tokens share one predicted time."""
MAX_PREDICTIONS = 4096
"""Most predicted times that are kept."""


class Watched(NamedTuple):
    """Holds what is known of a step under way: its kind, when it began, and the predicted seconds."""

    kind: str
    began: float
    predicted: float


class StepWatch:
    """Measures step times. Call `submitted` for each, and `finished` with its result, in the order of the steps."""

    def __init__(self, prediction: StepPrediction, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.totals = _nothing()
        """Kind of step -> sums since start."""
        self._prediction = prediction
        self._seconds = prediction.model.seconds
        self._decode_seconds: dict[tuple[float, float, int, int], float] = {}
        """(requests, tokens of each, rounded context, guesses) -> predicted seconds of a decode step."""
        self._last_end = self._window_start = clock()
        self._window = _nothing()
        self._warned_at = -QUIET_SECONDS

    def submitted(self, step: SchedulerOutput, began: float) -> Watched:
        """Return the prediction for a step. `began`: the clock's time before the executor got it."""
        work = StepWork.of(step)
        if work.prefill_tokens:
            return Watched(MIXED, began, self._seconds(work) + self._guessing(step, work.decode_context))
        near = int(work.decode_context) // CONTEXT_STEP
        key = work.decodes, work.decode_len, near, step.num_guesses
        predicted = self._decode_seconds.get(key)
        if predicted is None:
            if len(self._decode_seconds) >= MAX_PREDICTIONS:
                self._decode_seconds.clear()
            middle = (near + 0.5) * CONTEXT_STEP
            predicted = self._seconds(replace(work, decode_context=middle)) + self._guessing(step, middle)
            self._decode_seconds[key] = predicted
        return Watched(DECODE, began, predicted)

    def _guessing(self, step: SchedulerOutput, context: float) -> float:
        """Seconds in which tokens are guessed behind a step."""
        costs = self._prediction.drafts
        if costs is None or not step.num_guesses:
            return 0.0
        return costs.guessing(sum(step.samples), context, step.num_guesses)

    def finished(self, step: Watched, counts: bool = True) -> float:
        """Take the end of a step; return the seconds that it took. `counts`: False if it failed, or did more than
        compute, such as capture a graph."""
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
        return observed

    def _judge(self, now: float) -> None:
        slow = [
            kind
            for kind, times in self._window.items()
            if times.steps >= FEWEST_STEPS and times.observed > SLOW * times.predicted
        ]
        if not slow or not self._prediction.warns or now - self._warned_at < QUIET_SECONDS:
            return
        self._warned_at = now
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
