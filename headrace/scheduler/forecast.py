"""How many blocks the running requests will hold at once before they end, one more among them or not.

Requests admitted into whatever is free grow into each other, and what is preempted is computed twice. So the future is
looked at first, as in "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025): who has
less to go ends first and leaves its blocks to the rest. A guess, which preemption makes good where it is wrong. Knows
lengths alone, no pool and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

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


class Occupancy:
    """Blocks held by requests, now and until they end: (tokens to come, blocks) of each. All take their tokens at the
    same pace, and give everything back when they end."""

    def __init__(self, block_size: int, holders: Iterable[tuple[int, int]]) -> None:
        self._block_size = block_size
        self._holders = list(holders)
        self._final = sum(self._at_end(*holder) for holder in self._holders)
        """blocks, if nobody ended before the others"""

    def add(self, remaining: int, blocks: int) -> None:
        self._holders.append((remaining, blocks))
        self._final += self._at_end(remaining, blocks)

    def fits(self, remaining: int, blocks: int, capacity: int) -> bool:
        """Whether `capacity` blocks are enough for them and one more at every moment."""
        if self._final + self._at_end(remaining, blocks) <= capacity:
            return True
        held = 0
        # The most is held just before somebody ends: by that one and all who have longer to go.
        for count, (left, more) in enumerate(sorted([*self._holders, (remaining, blocks)], reverse=True), 1):
            held += more
            if held - (-left * count // self._block_size) > capacity:
                return False
        return True

    def _at_end(self, remaining: int, blocks: int) -> int:
        return blocks - (-remaining // self._block_size)
