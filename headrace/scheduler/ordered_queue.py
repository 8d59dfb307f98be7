"""A list that is sorted by the `order` of its items. Knows nothing of what the order means."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

_order = attrgetter("order")


class _Ordered(Protocol):
    @property
    def order(self) -> Any:
        """Unique among those that are in a queue together, and unchanged for as long as they are."""


T = TypeVar("T", bound=_Ordered)


class OrderedQueue(Generic[T]):
    """Lowest order first: adding at the end and taking from either end, the common cases, are cheap."""

    def __init__(self) -> None:
        self.items: list[T] = []
        """To be read, not changed."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def first(self) -> T | None:
        return self.items[0] if self.items else None

    def add(self, item: T) -> None:
        insort(self.items, item, key=_order)

    def remove(self, item: T) -> None:
        """`item` must be in the queue."""
        del self.items[bisect_left(self.items, item.order, key=_order)]
