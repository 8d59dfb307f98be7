"""Predicts what steps cost in which tokens are guessed, and up to how many requests at once that pays."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from headrace.graph_sizes import capture_sizes
from headrace.planner.cost import StepWork, step_model
from headrace.planner.deployment import Deployment
from headrace.planner.speculation import plan_draft

LOOK_UP_SECONDS = 20e-6
"""Seconds in which the ends of all requests are looked up, where nothing else guesses; one kernel"""
NEAR = 256
"""Steps whose contexts are as near share a prediction."""
MOST_REQUESTS = 1024
SIZES = capture_sizes(MOST_REQUESTS)
"""Numbers of requests that are predicted; others are taken for the next of these, to which graphs are padded."""
USUAL_RATE = 0.6
"""Share of guesses that is taken to be right where nothing was verified: of EAGLE-3 heads and of draft models of a
tenth of the weights, some 0.5 to 0.8 are published, of n-grams anything from 0 to 0.9"""


class DraftCosts:
    """Predicts the seconds of steps of decodes with guesses; what was asked before is remembered."""

    def __init__(self, deployment: Deployment) -> None:
        """`deployment`: that of the model, with `draft` if a model guesses."""
        self._model = step_model(replace(deployment, draft=None))
        draft = deployment.of_draft
        self._draft = None if draft is None else step_model(draft)
        self._lags = draft is not None and draft.shape.spec.head is None  # a head soon takes in what it leaves out
        self._known: dict[tuple[int, int, int], float] = {}

    def __call__(self, requests: int, context: float, length: int, lag: int = 0) -> float:
        """Return the seconds of a step that verifies `length` guesses of each of so many requests and makes as many.
        `lag`: tokens of each that steps without guesses have left for what guesses to compute."""
        place = bisect_left(SIZES, requests)
        key = SIZES[place] if place < len(SIZES) else requests, int(context) // NEAR, length
        if key not in self._known:
            size, around = key[0], (key[1] + 0.5) * NEAR
            verifying = self._model.seconds(StepWork(size, around, decode_len=1 + length))
            self._known[key] = verifying + self.guessing(size, around, length)
        seconds = self._known[key]
        if lag and self._lags and self._draft is not None:
            seconds += self._draft.seconds(StepWork(0, 0.0, requests * lag, context, requests))
        return seconds

    def guessing(self, requests: int, context: float, length: int) -> float:
        """Return the seconds in which `length` tokens of each request are guessed: the first pass of a model has two
        tokens of each, the others one."""
        if not length:
            return 0.0
        if self._draft is None:
            return LOOK_UP_SECONDS
        first = self._draft.seconds(StepWork(requests, context, decode_len=2))
        return first + (length - 1) * self._draft.seconds(StepWork(requests, context))

    def gain(self, requests: int, context: float, length: int, rate: float = USUAL_RATE) -> float:
        """Return tokens a second with `length` guesses over those without, where a share `rate` of guesses whose
        predecessors are right is right."""
        tokens = sum(rate**place for place in range(length + 1))
        return tokens * self(requests, context, 0) / self(requests, context, length)

    def pays_up_to(self, context: float, lengths: tuple[int, ...], rate: float = USUAL_RATE) -> int:
        """Return the most requests at once with which guessing pays, up to MOST_REQUESTS; 0: it never does."""

        def pays(requests: int) -> bool:
            return any(self.gain(requests, context, length, rate) > 1 for length in lengths if length)

        sizes = [1 << power for power in range(MOST_REQUESTS.bit_length())]
        low = max((size for size in sizes if pays(size)), default=0)
        if low in (0, MOST_REQUESTS):
            return low
        high = 2 * low
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) else (low, middle)
        return low

    def describe(self, context: float, lengths: tuple[int, ...], rate: float = USUAL_RATE) -> str:
        """Say what guessing gives one request, and from how many at once it stops to pay."""
        gain = max(self.gain(1, context, length, rate) for length in lengths if length)
        most = self.pays_up_to(context, lengths, rate)
        if not most:
            return f"predicted never to pay where {rate:.0%} of guesses are right"
        end = "however many run" if most == MOST_REQUESTS else f"paying up to {most} at once"
        return f"where {rate:.0%} of guesses are right, {gain:.1f} times the speed of one request is predicted, {end}"


def asked_costs(given: dict[str, Any], deployment: Deployment, dtype: str) -> tuple[DraftCosts, tuple[int, ...]] | None:
    """Return what steps cost with what a `speculative_config` asks for beside a deployment, and the numbers of guesses
    that a step may have; None: it is off, or nothing that is known here."""
    speculation, draft = plan_draft(given, deployment.shape, dtype)
    return None if speculation is None else (DraftCosts(replace(deployment, draft=draft)), speculation.lengths)
