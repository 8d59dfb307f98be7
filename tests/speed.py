"""How slow this machine is, for the few tests that hold a promise about time; and how long others wait.

What is held is the time that a process computes: other processes, which share its cores, lengthen every other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

WORK = "import argparse, asyncio, email.message, http.server, json, unittest.mock, xml.dom.minidom"
PATIENCE = 120
"""Seconds, for whatever is waited for: a slow machine takes some of them, and only what never comes takes all."""
REFERENCE_SECONDS = 0.12
"""What WORK takes, with the start of its Python, on the machine whose limits the tests name"""


@functools.cache
def slowness() -> float:
    """By how much a limit must be multiplied here; 1 on a machine that is fast enough."""

    return max(1.0, min(computed_by([sys.executable, "-c", WORK])[0] for _ in range(3)) / REFERENCE_SECONDS)


def computed_by(command: Sequence[str]) -> tuple[float, str]:
    """Run a command; return the seconds that it computed, and what it has printed."""

    def children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = children()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return children() - before, done.stdout


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is done inside has this process compute for less than so many seconds of a machine that is fast enough."""
    started = time.process_time()
    yield
    assert time.process_time() - started < seconds * slowness()


def wait_until(holds: Callable[[], object], shown: Callable[[], object] = lambda: "it never came to hold") -> None:
    """Look again and again whether a condition holds; raise AssertionError with what is shown if it never does."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, shown()
        time.sleep(0.02)


async def until(holds: Callable[[], object]) -> None:
    """The same while an event loop runs."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)
