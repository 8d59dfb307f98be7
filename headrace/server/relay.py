"""Sends requests on to the first HTTP process of a server, which answers for all what it alone knows.

They speak HTTP over sockets in a folder that nobody else can enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import httptools
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.engine.metrics import EngineMetrics, Samples
from headrace.errors import HeadraceError, ServerStoppingError
from headrace.server.body import read_body
from headrace.server.serving import Serving

READ_BYTES = 1 << 16
HOP_HEADERS = (
    b"connection",
    b"date",
    b"expect",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
"""Headers that each connection has of its own."""
ASK_SAMPLES = b"GET / HTTP/1.1\r\nhost: inside\r\nconnection: close\r\n\r\n"
_samples = msgspec.msgpack.Decoder(Samples)


async def relay(serving: Serving, http: Request, has_body: bool) -> Response:
    """Return the response that the first HTTP process will give. Raises RequestError for a body that is none."""
    body = await read_body(http, serving.config.max_request_bytes) if has_body else b""
    return Relayed(serving, bytes(body))


def tell_samples(metrics: EngineMetrics) -> ASGIApp:
    """Return what answers the first HTTP process: with what this one has counted."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(msgspec.msgpack.encode(metrics.samples()))(scope, receive, send)

    return app


async def samples_of(socket: str) -> Samples:
    """Return what the HTTP process has counted that listens on `socket`. Raises OSError if none does."""
    async with aclosing(exchange(socket, ASK_SAMPLES, b"")) as parts:
        return _samples.decode(b"".join([part.get("body", b"") async for part in parts]))


class Relayed(Response):
    """Sends what the first HTTP process answers to a request, as it comes, until the client leaves."""

    def __init__(self, serving: Serving, body: bytes) -> None:
        super().__init__()
        self.serving = serving
        self.asked = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serving.until_disconnect(receive, self._pass_on(scope, send), ends_itself=True)

    async def _pass_on(self, scope: Scope, send: Send) -> None:
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        lines = [f"{scope['method']} ".encode() + target + b" HTTP/1.1", b"connection: close"]
        headers = [each for each in _of_message(scope["headers"]) if each[0] != b"content-length"]
        lines += [name + b": " + value for name, value in (*headers, (b"content-length", b"%d" % len(self.asked)))]
        head, started = b"\r\n".join([*lines, b"", b""]), False
        try:
            async with aclosing(exchange(self.serving.first, head, self.asked, scope["method"] != "HEAD")) as parts:
                async for part in parts:
                    await send(part)
                    started = True
        except (OSError, AnswerEndedError):  # the server stops; an answer that has begun is broken off
            if not started:
                raise ServerStoppingError from None


class AnswerEndedError(HeadraceError):
    """Says that an HTTP process has not finished its answer."""


async def exchange(socket: str, head: bytes, body: bytes, has_body: bool = True) -> AsyncGenerator[Message]:
    """Send a request to an HTTP process, and yield its answer, which `has_body`, as ASGI has it. Raises OSError if the
    process cannot be reached, and AnswerEndedError if it does not finish."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(head + body)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not (answer.ended if has_body else answer.status):
            if not (data := await reader.read(READ_BYTES)):
                raise AnswerEndedError("the first HTTP process has not finished its answer")
            parser.feed_data(data)
            if not answer.status and answer.has_head:
                answer.status = parser.get_status_code()
                yield {"type": "http.response.start", "status": answer.status, "headers": _of_message(answer.headers)}
            if parts := answer.take():
                yield {"type": "http.response.body", "body": parts, "more_body": True}
        yield {"type": "http.response.body", "body": b"", "more_body": False}
    finally:
        writer.transport.abort()


class _Answer:
    """Takes what the parser finds in an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = self.ended = False
        self._body: list[bytes] = []

    def take(self) -> bytes:
        """Return what has come of the body since the last call."""
        parts, self._body = self._body, []
        return b"".join(parts)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.ended = True


def _of_message(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in HOP_HEADERS]
