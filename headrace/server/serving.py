"""What every route shares: the engine, the names it answers to, and the requests in flight."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from headrace.config import ServerConfig
from headrace.errors import ModelNotServedError, RequestError, ServerStoppingError, quoted

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

T = TypeVar("T")
INLINE_BYTES = 2**16
"""Bodies up to this are decoded and checked in the event loop, in a millisecond at most."""
THREADS = 2
"""For longer ones. Each that is busy keeps Python's lock for up to 5 ms before the event loop has it."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclass
class Serving:
    engine: AsyncEngine
    config: ServerConfig
    model_names: list[str]
    """The first is the one that answers carry."""
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: bool = False
    told: set[str] = field(default_factory=set)
    """ignored fields of requests that the log has named"""
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(THREADS, "requests"))

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with; no name means the one served."""
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ModelNotServedError(f"the model {quoted(name)} does not exist; served here: {served}", "model")
        return name

    async def work(self, size: int, function: Callable[[], T], most: int = INLINE_BYTES) -> T:
        """`function()`, which handles `size` bytes of a body: here if it is short, else in a thread."""
        if size <= most:
            return function()
        if self.stopping:
            raise ServerStoppingError
        done = await asyncio.get_running_loop().run_in_executor(self._threads, _error_as_value, function)
        if isinstance(done, RequestError):
            raise done
        return done

    def stop(self) -> None:
        """End every open request: 503 where nothing was sent, else an error event."""
        self.stopping = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._running:
            task.cancel()

    async def until_stopped(self, work: Coroutine[None, None, T]) -> T:
        """What comes before an answer: reading a body, rendering a template. Raises ServerStoppingError when that has
        to end."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            task.uncancel()
            raise ServerStoppingError from None
        finally:
            self._running.discard(task)

    async def until_disconnect(self, receive: Receive, work: Coroutine[None, None, None]) -> None:
        """Run `work`; a client that leaves cancels it at once. The body must have been read."""
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_disconnected(receive))
        self._running.add(task)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            self._running.discard(task)
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)


def _error_as_value(function: Callable[[], T]) -> T | RequestError:
    """What a large body became is freed in the thread: a traceback would keep it until the event loop has to."""
    try:
        return function()
    except RequestError as error:
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def new_id(prefix: str) -> str:
    """Unique and ours: what a client sends is never a key of the engine."""
    return f"{prefix}-{uuid.uuid4().hex}"


def request_id_headers(request: Request, config: ServerConfig, given: str | None, response_id: str) -> dict[str, str]:
    """`X-Request-Id` of the answer: the client's own if it is short and plain, else the response's id."""
    if not config.enable_request_id_headers:
        return {}
    wanted = request.headers.get("x-request-id", given) or ""
    return {"x-request-id": wanted if _PLAIN_ID.fullmatch(wanted) else response_id}
