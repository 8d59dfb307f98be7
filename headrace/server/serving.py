"""Holds what all routes share: the engine, the names it answers to, and the requests in flight."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from headrace.config import ServerConfig
from headrace.errors import ModelNotServedError, ServerStoppingError, quoted
from headrace.lora import LoRARequest
from headrace.server.adapters import AdapterBook
from headrace.server.auth import CLIENT
from headrace.server.output_formats import OutputFormats
from headrace.server.response_store import ResponseStore
from headrace.server.workers import Workers

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

T = TypeVar("T")
INLINE_BYTES = 2**16
"""Bodies up to this are decoded and checked in the event loop, which takes a millisecond at most."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclass
class Serving:
    """Holds the engine and the open requests of one server."""

    engine: AsyncEngine
    config: ServerConfig
    model_names: list[str]
    """Names that requests may use; answers carry the first one."""
    adapters: AdapterBook
    """Names of adapters, which requests may use too."""
    formats: OutputFormats
    """How the model writes tool calls and reasoning."""
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    """Open requests may finish, and new ones are refused."""
    stopping: bool = False
    """Open requests end now."""
    first: str = ""
    """Where the first HTTP process answers for this one; empty: this is the first."""
    further: list[str] = field(default_factory=list)
    """Where the others, of which this is the first, say what they have counted."""
    logged: set[str] = field(default_factory=set)
    """Ignored fields of requests that the log has named."""
    responses: ResponseStore = field(init=False)
    """Answers of /v1/responses that later requests may ask for."""
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _ending: set[asyncio.Task[Any]] = field(default_factory=set)
    """What ends by itself once the server stops."""
    _workers: Workers = field(default_factory=Workers)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.response_store_bytes, self.config.response_store_seconds)

    def resolve_model(self, name: str | None) -> str:
        """Return the model name to answer with: the requested one, or without one the first. Raises
        ModelNotServedError."""
        return self.check_name(name) if name else self.model_names[0]

    def check_name(self, name: str) -> str:
        """Return a model name that is served here. Raises ModelNotServedError for any other."""
        self.adapter_of(name)
        return name

    def adapter_of(self, name: str) -> LoRARequest | None:
        """Return the adapter that a name stands for; None: the model as it is. Raises ModelNotServedError."""
        adapter = self.adapters.by_name.get(name)
        if adapter is None and name not in self.model_names:
            served = ", ".join((*self.model_names, *self.adapters.by_name))
            raise ModelNotServedError(f"the model {quoted(name)} does not exist; served here: {served}", "model")
        return adapter

    async def work(
        self, http: Request, size: int, function: Callable[[], T], most: int = INLINE_BYTES, makes_grammar: bool = False
    ) -> T:
        """Return `function()`, called here if it handles at most `most` bytes of a body, else in a thread when it is
        the turn of the request's client. Raises QueueFullError if that does not come."""
        if size <= most and not makes_grammar:
            return function()
        if self.stopping:
            raise ServerStoppingError
        return await self._workers.run(function, http.scope.get(CLIENT, ""), makes_grammar)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait until those that are open have ended, at most so many seconds."""
        self.draining, until = True, time.monotonic() + seconds
        while (tasks := self._running | self._ending) and (left := until - time.monotonic()) > 0:
            await asyncio.wait(tasks, timeout=left)

    def stop(self) -> None:
        """End every open request: with status 503 if nothing was sent, else with an error event."""
        self.stopping = True
        self._workers.stop()
        for task in self._running:
            task.cancel()

    async def until_stopped(self, work: Coroutine[None, None, T]) -> T:
        """Run what comes before an answer, such as reading a body. Raises ServerStoppingError if the server stops."""
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

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin work that no client waits for; it is cancelled when the server stops."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def until_disconnect(
        self, receive: Receive, work: Coroutine[None, None, None], ends_itself: bool = False
    ) -> None:
        """Run `work`, and cancel it at once if the client disconnects. The body must have been read before.
        `ends_itself`: it is not cancelled when the server stops."""
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_disconnected(receive))
        tasks = self._ending if ends_itself else self._running
        tasks.add(task)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            tasks.discard(task)
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def new_id(prefix: str) -> str:
    """Return a new unique id. Ids that clients send are never used inside the engine."""
    return f"{prefix}-{uuid.uuid4().hex}"


def request_id_headers(request: Request, config: ServerConfig, given: str | None, response_id: str) -> dict[str, str]:
    """Return the answer's `X-Request-Id` header: the client's id if it is short and plain, else the response's."""
    if not config.enable_request_id_headers:
        return {}
    wanted = request.headers.get("x-request-id", given) or ""
    return {"x-request-id": wanted if _PLAIN_ID.fullmatch(wanted) else response_id}
