"""Decides which adapter lies in which of the ranks' slots. A step's requests have at most as many different ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.step import AdapterLoad


class AdapterSlots:
    """Holds the adapters in slots, by when they were last used. One that no running request has may give its slot to
    another. The number 0 stands for no adapter."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        """adapter -> its slot, the least recently used first"""
        self._users: Counter[int] = Counter()
        """adapter -> running requests that have it"""
        self._loads: list[AdapterLoad] = []
        """those that no step has made yet"""

    def has_room(self, adapter: int) -> bool:
        """Tell whether `take` would find a slot."""
        return not adapter or adapter in self._slots or bool(self._free) or len(self._users) < len(self._slots)

    def take(self, adapter: int) -> int:
        """Return the slot of an adapter for a request that begins to run, the adapter being loaded into it before the
        next step; -1 for no adapter. There must be room."""
        if not adapter:
            return -1
        slot = self._slots.pop(adapter, None)
        if slot is None:
            if not self._free:
                unused = next(one for one in self._slots if one not in self._users)
                self._free.append(self._slots.pop(unused))
            slot = self._free.pop()
            self._loads = [load for load in self._loads if load.slot != slot] + [AdapterLoad(slot, adapter)]
        self._slots[adapter] = slot
        self._users[adapter] += 1
        return slot

    def release(self, adapter: int) -> None:
        """Count a request no longer, which has ended or waits again."""
        if adapter:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def take_loads(self) -> list[AdapterLoad]:
        """Return what the next step is to load."""
        loads, self._loads = self._loads, []
        return loads

    def load_again(self, loads: Sequence[AdapterLoad]) -> None:
        """Note that a step has failed, whose requests have ended, and that it may not have made its loads: the next
        one makes those that other requests need."""
        for load in loads:
            if self._slots.get(load.adapter) != load.slot:
                continue
            if load.adapter in self._users:
                self._loads.append(load)
            else:
                self._free.append(self._slots.pop(load.adapter))
