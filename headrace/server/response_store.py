"""Keeps answers of the Responses API for later requests, within a bound of bytes and for a bound of time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.errors import NotFoundError, quoted
from headrace.server.protocol import ChatMessage
from headrace.server.response_shapes import ResponseObject

_encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(list[ChatMessage])
_response = msgspec.msgpack.Decoder(ResponseObject)


@dataclass
class Stored:
    """Holds one answer, encoded: so its size is known, and nothing of its request's objects stays."""

    client: str
    """whose it is: the beginning of its API key's hash"""
    response: bytes
    messages: bytes
    """the conversation up to the answer's end"""
    until: float
    task: asyncio.Task[None] | None = None
    """that makes the answer, where it is made in the background"""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Holds answers by id, the oldest first. Nobody sees another client's."""

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.seconds, self.clock = max_bytes, seconds, clock
        self.size = 0
        self._found: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()  # a thread writes long answers

    def put(
        self, client: str, response: ResponseObject, messages: list[ChatMessage],
        task: asyncio.Task[None] | None = None,
    ) -> None:  # fmt: skip
        """Keep an answer, in place of what was kept under its id; the oldest go where it needs their room."""
        now = self.clock()
        stored = Stored(client, _encode(response), _encode(messages), now + self.seconds, task)
        with self._lock:
            self._drop(response.id)
            self._found[response.id] = stored
            self.size += stored.size
            while self._found:
                oldest, first = next(iter(self._found.items()))
                if self.size <= self.max_bytes and first.until > now:
                    break
                self._drop(oldest)

    def has(self, client: str, response_id: str) -> bool:
        """Return whether an answer is kept."""
        stored = self._found.get(response_id)
        return stored is not None and self._is(stored, client)

    def response(self, client: str, response_id: str) -> ResponseObject:
        """Return an answer. Raises NotFoundError."""
        return _response.decode(self._get(client, response_id).response)

    def messages(self, client: str, response_id: str) -> list[ChatMessage]:
        """Return the conversation up to an answer's end. Raises NotFoundError."""
        return _messages.decode(self._get(client, response_id).messages)

    def task(self, client: str, response_id: str) -> asyncio.Task[None] | None:
        """Return what makes an answer in the background. Raises NotFoundError."""
        return self._get(client, response_id).task

    def delete(self, client: str, response_id: str) -> None:
        """Forget an answer, and stop making it. Raises NotFoundError."""
        task = self._get(client, response_id).task
        with self._lock:
            self._drop(response_id)
        if task is not None:
            task.cancel()

    def _get(self, client: str, response_id: str) -> Stored:
        stored = self._found.get(response_id)
        if stored is None or not self._is(stored, client):
            raise NotFoundError(f"there is no response {quoted(response_id)}: never stored, deleted, or no longer kept")
        return stored

    def _is(self, stored: Stored, client: str) -> bool:
        return stored.client == client and stored.until > self.clock()

    def _drop(self, response_id: str) -> None:
        stored = self._found.pop(response_id, None)
        if stored is not None:
            self.size -= stored.size
