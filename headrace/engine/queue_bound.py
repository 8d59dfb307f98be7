"""Bounds how many requests and prompt tokens may wait for the core; refuses more, with a time to come back after.

It compares what was sent with what the core says it has received, so that the bound also holds between the core's
messages. Of several front ends each knows what waits in the core, whoever sent it, but not what others are about to
send. Knows nothing of HTTP.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.metrics import EngineMetrics
from headrace.errors import QueueFullError, RequestError
from headrace.request import SchedulerStats

SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 60
"""The queue's pace is measured over its last minute in which anything waited."""


@dataclass
class Reservation:
    """Holds how many requests and prompt tokens one HTTP request may still send."""

    requests: int
    tokens: int


class QueueBound:
    """Admits HTTP requests to the queue in front of the core, or refuses them."""

    def __init__(
        self, config: EngineConfig, metrics: Sequence[EngineMetrics], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`metrics`: those of each engine; the first one's show the queue, which is one for all."""
        self.max_requests = config.max_queued_requests
        self.max_tokens = config.max_queued_tokens
        self._metrics = metrics
        self._clock = clock
        self._claimed = Reservation(0, 0)
        """What was reserved and not sent yet, and all that was sent since start."""
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=MAX_SAMPLES + 1)
        """(seconds in which anything waited, prompt tokens that had left the queue by then), since start."""
        self._seconds = 0.0
        self._observed_at = clock()
        self._waited = False
        """Whether anything waited when `observe` was last called."""
        self._rejected = metrics[0].show_queue(
            {
                "max_queued_requests": lambda: self.max_requests if metrics[0].first else 0,
                "max_queued_tokens": lambda: self.max_tokens if metrics[0].first else 0,
                "queued_requests": lambda: self.num_requests - sum(each.num_waiting for each in self._of_others()),
                "queued_tokens": lambda: self.num_tokens - sum(each.num_waiting_tokens for each in self._of_others()),
            }
        )

    @property
    def num_requests(self) -> int:
        """Requests that were reserved or sent and have not begun to run."""
        sent = self._claimed.requests + sum(each.stats.others.num_received for each in self._metrics)
        return sent - sum(each.stats.num_received - each.stats.num_waiting for each in self._metrics)

    @property
    def num_tokens(self) -> int:
        sent = self._claimed.tokens + sum(each.stats.others.num_received_tokens for each in self._metrics)
        return sent - self._begun_tokens()

    def _of_others(self) -> list[SchedulerStats]:
        """Return the statistics of what another front end shows."""
        return [each.stats for each in self._metrics if not each.first]

    @contextmanager
    def reserve(self, requests: int, tokens: int) -> Iterator[Reservation]:
        """Reserve a place in the queue for all choices of an HTTP request and the prompt tokens of all of them. What
        has not been sent when the context ends is given back. Raises QueueFullError if there is no place now, and
        RequestError if there never will be."""
        bounds = (
            ("requests", requests, self.num_requests, self.max_requests),
            ("tokens", tokens, self.num_tokens, self.max_tokens),
        )
        for name, wanted, _, limit in bounds:
            if limit and wanted > limit:
                unit = "choices (prompts x n)" if name == "requests" else "prompt tokens (of all choices together)"
                raise RequestError(
                    f"this request has {wanted} {unit}, and no more than {limit} may wait at once "
                    f"(--max-queued-{name}): please send it in parts",
                    "prompt",
                )
        for name, wanted, queued, limit in bounds:
            if limit and queued + wanted > limit:
                self._rejected(f"queued_{name}")
                raise QueueFullError(
                    f"the server's queue is full: {queued} {name} wait, this request adds {wanted}, and {limit} may "
                    f"wait (--max-queued-{name}); please try again later",
                    self.predicted_wait(),
                )
        reservation = Reservation(requests, tokens)
        self._claim(requests, tokens)
        try:
            yield reservation
        finally:
            self._claim(-reservation.requests, -reservation.tokens)

    def sent(self, requests: int, tokens: int, reservation: Reservation | None) -> None:
        """Count what was sent to the core, with the reservation it was made under, if there was one."""
        if reservation is None:
            self._claim(requests, tokens)
        else:
            reservation.requests -= requests
            reservation.tokens -= tokens

    def observe(self) -> None:
        """Take note of the core's latest counts. It may be called at any time."""
        now = self._clock()
        if self._waited:
            self._seconds += now - self._observed_at
        self._observed_at, self._waited = now, any(each.stats.num_waiting for each in self._metrics)
        if self._seconds - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((self._seconds, self._begun_tokens()))

    def predicted_wait(self) -> int:
        """Return whole seconds until all that waits now has begun, at the recent pace; 1 if none is known yet."""
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        if after <= before:
            return 1
        return max(1, math.ceil(self.num_tokens * (ended - began) / (after - before)))

    def lost(self, requests: int, tokens: int) -> None:
        """Forget what was sent to an engine that has died, whose metrics count nothing any more."""
        self._claim(-requests, -tokens)
        self._samples.clear()
        self._samples.append((self._seconds, self._begun_tokens()))

    def _begun_tokens(self) -> int:
        """Return how many of the prompt tokens that were sent have left the queue."""
        return sum(each.stats.num_received_tokens - each.stats.num_waiting_tokens for each in self._metrics)

    def _claim(self, requests: int, tokens: int) -> None:
        self._claimed.requests += requests
        self._claimed.tokens += tokens
