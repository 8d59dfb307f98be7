"""Keeps items sorted by their `order`, whatever that means."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

_order = attrgetter("order")


class _Ordered(Protocol):
    @property
    def order(self) -> Any:
        """A sort key, unique within a queue. It may not change while the item is in one."""


T = TypeVar("T", bound=_Ordered)


class OrderedQueue(Generic[T]):
    """Holds items, lowest order first. Adding at the end and removing at either end, the common cases, are cheap."""

    def __init__(self) -> None:
        self.items: list[T] = []
        """The items in order; not to be changed from outside."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def first(self) -> T | None:
        return self.items[0] if self.items else None

    def add(self, item: T) -> None:
        insort(self.items, item, key=_order)

    def remove(self, item: T) -> None:
        """Remove an item, which must be in the queue."""
        del self.items[bisect_left(self.items, item.order, key=_order)]
