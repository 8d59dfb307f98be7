"""Requests in the policy's order. Knows nothing of what the order means."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from headrace.request import Request

_order = attrgetter("order")


class RequestQueue:
    """A list sorted by `Request.order`: adding at the end and taking from either end, the common cases, are cheap."""

    def __init__(self) -> None:
        self.items: list[Request] = []
        """Lowest order first. To be read, not changed."""
        self.num_prompt_tokens = 0
        """of all the requests together"""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def first(self) -> Request | None:
        return self.items[0] if self.items else None

    def add(self, request: Request) -> None:
        insort(self.items, request, key=_order)
        self.num_prompt_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """`request` must be in the queue."""
        del self.items[bisect_left(self.items, request.order, key=_order)]
        self.num_prompt_tokens -= request.num_prompt_tokens
