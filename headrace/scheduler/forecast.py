"""Predicts how much KV cache the running requests will hold at once before they end.

A request that is admitted into whatever is free may have to be preempted later, and is then computed twice. So the
scheduler looks ahead as in "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025): the
request with the fewest tokens left ends first and leaves its blocks to the rest. Where the prediction is wrong,
preemption corrects it. Works on lengths alone, without pools or queues.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from headrace.cache_groups import CacheLayout
from headrace.request import Request

WINDOW = 256
"""Answers over which the mean length is taken; older ones lose weight exponentially."""


class LengthForecast:
    """Predicts how long answers will be. An answer that no token can end early is as long as its request allows. Any
    other one is expected to be as long as earlier answers were on average; before the first has ended, that is 0."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def learn(self, num_output_tokens: int) -> None:
        """Add the length of an answer that came to its own end."""
        self._count = min(self._count + 1, WINDOW)
        self._mean += (num_output_tokens - self._mean) / self._count

    def remaining(self, request: Request) -> int:
        """Return how many tokens are expected to come; 0 for an answer that is longer than expected already."""
        last = request.max_total_tokens
        if request.stop_set:
            last = min(last, request.num_prompt_tokens + round(self._mean))
        return max(0, last - len(request.token_ids))


class Demand(NamedTuple):
    """Holds what one request takes of the cache and how it will grow. All requests are taken to gain tokens at the same
    pace, and to give everything back when they end."""

    remaining: int
    """Tokens to come."""
    held: int
    """Bytes."""
    until_full: tuple[int, ...] = ()
    """For each layer group with a window: tokens to come until it stops growing."""


class MemoryForecast:
    """Predicts the bytes that a set of requests will hold at the worst moment until all have ended."""

    def __init__(self, layout: CacheLayout, demands: Iterable[Demand]) -> None:
        self._block_size = layout.block_size
        self._growing = sum(group.block_stride for group in layout.groups if group.grows_on)
        """Bytes of a block in all groups that never stop growing."""
        self._bounded = [group.block_stride for group in layout.groups if group.window is not None]
        self._demands = list(demands)
        self._final = self._at_end(self._demands)
        """Bytes that all would hold if nobody gave anything back: an upper bound that is cheap to keep."""

    def add(self, demand: Demand) -> None:
        """Count one more request among those that run."""
        self._demands.append(demand)
        self._final += self._at_end([demand])

    def fits(self, added: Demand, capacity: int) -> bool:
        """Return whether `capacity` bytes are enough at every moment for all requests and `added`."""
        if self._final + self._at_end([added]) <= capacity:
            return True
        held = 0
        windows = [_WindowGrowth(number, size) for number, size in enumerate(self._bounded)]
        # The peaks are just before each request ends: it and all that have longer to go hold blocks then.
        for count, demand in enumerate(sorted([*self._demands, added], reverse=True), 1):
            held += demand.held
            grown = self._blocks(demand.remaining * count) * self._growing
            for window in windows:
                grown += self._blocks(window.tokens(demand)) * window.block_bytes
            if held + grown > capacity:
                return False
        return True

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _at_end(self, demands: list[Demand]) -> int:
        size, growing = self._block_size, self._growing
        final = sum([demand.held + -(-demand.remaining // size) * growing for demand in demands])
        for number, block_bytes in enumerate(self._bounded):
            tokens = [min(demand.until_full[number], demand.remaining) for demand in demands]
            final += sum(map(self._blocks, tokens)) * block_bytes
        return final


class _WindowGrowth:
    """Sums how many tokens one layer group with a window grows by, over requests given in the order of their ends. The
    request that ends last is given first."""

    def __init__(self, number: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._number = number
        self._num_growing = 0
        self._full: list[int] = []
        """Heap of -tokens after which requests stopped growing, of those that have by now."""
        self._full_tokens = 0

    def tokens(self, demand: Demand) -> int:
        """Add a request; return the tokens that all so far have grown by when it ends."""
        until_full = demand.until_full[self._number]
        heappush(self._full, -until_full)
        self._full_tokens += until_full
        while self._full and -self._full[0] >= demand.remaining:  # still growing when this one ends
            self._full_tokens += heappop(self._full)
            self._num_growing += 1
        return self._full_tokens + self._num_growing * demand.remaining
