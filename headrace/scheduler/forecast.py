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
        longest = request.max_total_tokens - request.num_prompt_tokens
        expected = min(longest, round(self._mean)) if request.stop_set else longest
        return max(0, expected - request.num_output_tokens)


def most_blocks(requests: Iterable[tuple[int, int]], block_size: int) -> int:
    """The most blocks held at once, now or later. `requests`: (tokens to come, blocks held) of each; all take their
    tokens at the same pace, and give everything back when they end."""
    most = held = 0
    for count, (remaining, blocks) in enumerate(sorted(requests, reverse=True), 1):
        held += blocks  # when this one ends, those that have longer to go are the others
        most = max(most, held - (-remaining * count // block_size))
    return most
