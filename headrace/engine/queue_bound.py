"""How many requests, and prompt tokens, may wait for the core: what is over that is refused, with the time after which
to come back.

Counts what was sent against what the core says it has received, so that the bound holds between its messages too.
Knows nothing of HTTP.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.metrics import EngineMetrics
from headrace.errors import QueueFullError, RequestError

SAMPLE_SECONDS = 1.0
RECENT_SAMPLES = 60
"""The pace of the queue is that of the last minute in which there was one."""


@dataclass
class Place:
    """What one HTTP request was promised and has not sent yet."""

    requests: int
    tokens: int


class QueueBound:
    def __init__(
        self, config: EngineConfig, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_requests = config.max_queued_requests
        self.max_tokens = config.max_queued_tokens
        self._metrics = metrics
        self._clock = clock
        self._claimed = Place(0, 0)
        """promised to those who have not sent it yet, or sent, since start"""
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=RECENT_SAMPLES + 1)
        """(seconds in which something waited, prompt tokens that had left the queue), since start"""
        self._seconds = 0.0
        self._seen = clock()
        self._waited = False
        """when last looked at"""
        self._rejected = metrics.show_queue(
            {
                "max_queued_requests": lambda: self.max_requests,
                "max_queued_tokens": lambda: self.max_tokens,
                "queued_requests": lambda: self.num_requests,
                "queued_tokens": lambda: self.num_tokens,
            }
        )

    @property
    def num_requests(self) -> int:
        """Sent, or about to be, and not running."""
        stats = self._metrics.stats
        return self._claimed.requests - stats.num_received + stats.num_waiting

    @property
    def num_tokens(self) -> int:
        stats = self._metrics.stats
        return self._claimed.tokens - stats.num_received_tokens + stats.num_waiting_tokens

    @contextmanager
    def place(self, requests: int, tokens: int) -> Iterator[Place]:
        """Room for all of an HTTP request: so many choices, and so many prompt tokens of all of them together. Raises
        QueueFullError if there is not as much now, RequestError if there never is."""
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
        place = Place(requests, tokens)
        self._claim(requests, tokens)
        try:
            yield place
        finally:
            self._claim(-place.requests, -place.tokens)

    def sent(self, requests: int, tokens: int, place: Place | None) -> None:
        """To the core. `place`: what they were promised; None: nothing, as of one who does not ask."""
        if place is None:
            self._claim(requests, tokens)
        else:
            place.requests -= requests
            place.tokens -= tokens

    def observe(self) -> None:
        """Look at what the core said last; as often as one likes."""
        now, stats = self._clock(), self._metrics.stats
        if self._waited:
            self._seconds += now - self._seen
        self._seen, self._waited = now, stats.num_waiting > 0
        if self._seconds - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((self._seconds, stats.num_received_tokens - stats.num_waiting_tokens))

    def predicted_wait(self) -> int:
        """Whole seconds until what waits now will have begun, at the recent pace; 1 as long as there is none."""
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        if after <= before:
            return 1
        return max(1, math.ceil(self.num_tokens * (ended - began) / (after - before)))

    def _claim(self, requests: int, tokens: int) -> None:
        self._claimed.requests += requests
        self._claimed.tokens += tokens
