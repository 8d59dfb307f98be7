"""Measures for how long a process computes while its event loop stands still, and with it everybody's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

GAP = 0.05
"""Seconds for which the event loop may stand still on a machine that is fast enough."""
TRIES = 4
"""Other threads compute too, and what is done once at first: of several tries one must be short."""
TICK = 0.001


class LoopWatch:
    """`gap`: the longest that this process computed between two turns of the loop since `begin`, in any thread, as one
    may hold up the others; `busy`: the longest that the loop's own thread did."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.gap, self._last = 0.0, time.process_time()
        self.busy, self._computed = 0.0, time.thread_time()

    async def end(self) -> float:
        """Return the gap, with what is left of the last turn."""
        await asyncio.sleep(2 * TICK)
        return self.gap

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = time.process_time()
            self.gap, self._last = max(self.gap, now - self._last), now
            computed = time.thread_time()
            self.busy, self._computed = max(self.busy, computed - self._computed), computed


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[LoopWatch]:
    """Watch the running loop."""
    watch = LoopWatch()
    ticking = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        ticking.cancel()
