"""Runs what takes longer than an event loop may stand still, on a few threads at which clients take turns.

What makes no grammar goes first: a request without one waits for none that has not begun.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import QueueFullError, RequestError
from headrace.scheduler.fair_queue import FairQueue, Turn

T = TypeVar("T")
THREADS = 2
"""Each busy one may keep Python's lock (GIL) from the event loop for up to 5 ms."""
TURN_SECONDS = 10.0
"""How long work may wait for its turn."""


@dataclass(eq=False)
class _Job:
    """Work that waits for its turn; what a FairQueue needs of it stands first."""

    request_id: str
    order: Turn
    function: Callable[[], Any]
    begun: asyncio.Future[Future[Any]]
    """Its thread's future, once it is its turn."""
    num_prompt_tokens: int = 0
    """Nobody counts them here."""


class Workers:
    """Holds the threads, and who waits for one. To be used from one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "requests")
        self._plain: FairQueue[_Job] = FairQueue()
        self._grammars: FairQueue[_Job] = FairQueue()
        self._num_running = 0
        self._num_ended = 0
        self._seconds = 0.0
        """In which functions ran, of those that came to an end."""
        self._stopped = False

    async def run(self, function: Callable[[], T], client: str, makes_grammar: bool) -> T:
        """Return `function()`, called when it is the client's turn. Raises QueueFullError if that takes too long."""
        queue, loop = self._grammars if makes_grammar else self._plain, asyncio.get_running_loop()
        moment = queue.tick()
        job = _Job(str(moment), (0, moment, ""), function, loop.create_future())
        queue.add(job, client, job.request_id)
        self._begin()
        try:
            await asyncio.wait((job.begun,), timeout=TURN_SECONDS)
        finally:
            if not job.begun.done():
                queue.remove(job)
        if not job.begun.done():
            raise self._late(queue)
        done = await asyncio.wrap_future(job.begun.result())
        if isinstance(done, RequestError):
            raise done
        return done

    def stop(self) -> None:
        """Begin with nothing more. What runs is not waited for."""
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Give the free threads to those whose turn it is."""
        while self._num_running < THREADS and not self._stopped:
            queue = self._plain if len(self._plain) else self._grammars
            job = queue.first
            if job is None:
                break
            queue.take(job)
            self._num_running += 1
            running = self._threads.submit(_error_as_value, job.function)
            job.begun.set_result(running)
            self._follow(queue, job, running)

    def _follow(self, queue: FairQueue[_Job], job: _Job, running: Future[Any]) -> None:
        """See to what comes after a job that has begun, even if nobody waits for its result any more."""
        began, loop = time.monotonic(), job.begun.get_loop()

        def ended() -> None:
            queue.release(job)
            self._num_running -= 1
            self._num_ended += 1
            self._seconds += time.monotonic() - began
            self._begin()

        def call(_: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended)

        running.add_done_callback(call)

    def _late(self, queue: FairQueue[_Job]) -> QueueFullError:
        ahead = (len(queue) + 1) * self._seconds / max(1, self._num_ended) / THREADS
        return QueueFullError(
            f"the server did not come to this request within {TURN_SECONDS:g} seconds: {len(queue) + 1} wait to be "
            "read and checked; please try again later",
            max(1, math.ceil(ahead)),
        )


def _error_as_value(function: Callable[[], T]) -> T | RequestError:
    """Call a function, and return a RequestError instead of raising it. A traceback would keep a large body's objects
    alive until the event loop frees them; so the thread does."""
    try:
        return function()
    except RequestError as error:
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)
