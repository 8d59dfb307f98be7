"""How much cache the running requests will hold at once before they end, one more among them or not.

Requests admitted into whatever is free grow into each other, and what is preempted is computed twice. So the future is
looked at first, as in "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025): who has
less to go ends first and leaves its blocks to the rest. A guess, which preemption makes good where it is wrong. Knows
lengths alone, no pool and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from headrace.cache_groups import CacheLayout
from headrace.request import Request

WINDOW = 256
"""Answers after which the mean of lengths follows new ones as fast as it ever will"""


class LengthForecast:
    """How long answers are: as long as asked for where no token can end them earlier, else as those before them on
    average, which is nothing as long as there are none."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def learn(self, num_output_tokens: int) -> None:
        """Of an answer that came to its own end."""
        self._count = min(self._count + 1, WINDOW)
        self._mean += (num_output_tokens - self._mean) / self._count

    def remaining(self, request: Request) -> int:
        """Tokens to come; 0 for one that is longer than expected already."""
        last = request.max_total_tokens
        if request.stop_set:
            last = min(last, request.num_prompt_tokens + round(self._mean))
        return max(0, last - len(request.token_ids))


class Holder(NamedTuple):
    """What a request holds, and how it will grow. All take their tokens at the same pace, and give everything back when
    they end."""

    remaining: int
    """tokens to come"""
    held: int
    """bytes"""
    bounds: tuple[int, ...] = ()
    """of each group that keeps a window: tokens to come until it stops growing"""


class Occupancy:
    """Bytes held by requests, now and until they end."""

    def __init__(self, layout: CacheLayout, holders: Iterable[Holder]) -> None:
        self._block_size = layout.block_size
        self._growing = sum(group.block_stride for group in layout.groups if group.grows_on)
        """bytes of a block of all groups that never stop growing"""
        self._bounded = [group.block_stride for group in layout.groups if group.window is not None]
        self._holders = list(holders)
        self._final = sum(map(self._at_end, self._holders))
        """if nobody ended before the others"""

    def add(self, holder: Holder) -> None:
        self._holders.append(holder)
        self._final += self._at_end(holder)

    def fits(self, newcomer: Holder, capacity: int) -> bool:
        """Whether `capacity` bytes are enough for them and one more at every moment."""
        if self._final + self._at_end(newcomer) <= capacity:
            return True
        held = 0
        windows = [_Window(number, size) for number, size in enumerate(self._bounded)]
        # The most is held just before somebody ends: by that one and all who have longer to go.
        for count, holder in enumerate(sorted([*self._holders, newcomer], reverse=True), 1):
            held += holder.held
            grown = self._blocks(holder.remaining * count) * self._growing
            for window in windows:
                grown += self._blocks(window.tokens(holder)) * window.block_bytes
            if held + grown > capacity:
                return False
        return True

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _at_end(self, holder: Holder) -> int:
        final = holder.held + self._blocks(holder.remaining) * self._growing
        for bound, size in zip(holder.bounds, self._bounded, strict=True):
            final += self._blocks(min(bound, holder.remaining)) * size
        return final


class _Window:
    """How many tokens a group that keeps a window has grown by, in all of the holders that were given, in the order in
    which they end, the last first."""

    def __init__(self, number: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._number = number
        self._growing = 0
        self._full: list[int] = []
        """a heap of -tokens after which those stopped growing that have by now"""
        self._full_tokens = 0

    def tokens(self, holder: Holder) -> int:
        """One more; so far, when it ends."""
        bound = holder.bounds[self._number]
        heappush(self._full, -bound)
        self._full_tokens += bound
        while self._full and -self._full[0] >= holder.remaining:  # those before end later: now it still grows
            self._full_tokens += heappop(self._full)
            self._growing += 1
        return self._full_tokens + self._growing * holder.remaining
