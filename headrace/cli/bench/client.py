"""Sends requests over HTTP/1.1 and records their token streams: tens of thousands of SSE events a second on one core.

Bytes go from the socket through httptools (C) to a StreamRecorder, with one clock reading for each read of the socket.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from headrace.cli.bench.datasets import BenchRequest, PromptMaker
from headrace.cli.bench.metrics import RequestResult, StreamRecorder
from headrace.cli.bench.options import CHAT_BACKEND
from headrace.errors import ConfigError, HeadraceError

ERROR_CHARS = 400


class Target(msgspec.Struct, kw_only=True):
    """Names the server and holds the fields that all requests share."""

    base_url: str
    endpoint: str
    backend: str
    model: str
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 6 * 3600.0

    def body(self, request: BenchRequest, prompt: str | list[int]) -> bytes:
        """Return the JSON body of one streaming request."""
        record: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.backend == CHAT_BACKEND:
            record["messages"] = [{"role": "user", "content": prompt}]
            record["max_completion_tokens"] = request.output_len
        else:
            record["prompt"] = prompt
            record["max_tokens"] = request.output_len
        if self.ignore_eos:
            record["ignore_eos"] = True
        return msgspec.json.encode(record | self.extra_body)


class ClientError(HeadraceError):
    """The server cannot be reached, or its answer is no HTTP."""


class NobodyListensError(ClientError):
    """No connection could be made: nothing listens on the port, or the host is unknown."""


class HttpClient:
    """Holds keep-alive connections to one server, for one event loop."""

    def __init__(self, base_url: str, headers: dict[str, str], timeout: float) -> None:
        """Raises ConfigError for a URL that is not http://host:port."""
        url = urlsplit(base_url)
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"--base-url has a bad port: {base_url!r}") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url must look like http://host:port, got {base_url!r}")
        self._address = (url.hostname, port)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path.rstrip("/")
        lines = {"host": url.netloc, "accept": "*/*", "content-type": "application/json"} | headers
        if any(ord(char) < 32 for pair in lines.items() for text in pair for char in text):
            raise ConfigError("a header holds a control character")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises ClientError."""
        parts: list[bytes] = []
        status = await self._exchange("GET", path, b"", lambda data, now: parts.append(data))
        return status, b"".join(parts)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a JSON body. Raises ClientError."""
        parts: list[bytes] = []
        status = await self._exchange("POST", path, body, lambda data, now: parts.append(data))
        return status, b"".join(parts)

    async def stream(self, path: str, body: bytes, index: int, prompt_len: int) -> RequestResult:
        """Send a POST and record the events of its answer. An error is in the result, not raised."""
        recorder = StreamRecorder(index, time.monotonic(), prompt_len)
        splitter = EventSplitter(recorder.event)
        raw: list[bytes] = []

        def on_body(data: bytes, now: float) -> None:
            if not splitter.feed(data, now) and len(raw) < 16:
                raw.append(data)

        try:
            status = await self._exchange("POST", path, body, on_body)
        except ClientError as error:
            recorder.fail(str(error))
        else:
            if status != 200:
                text = b"".join(raw).decode(errors="replace").strip()
                recorder.fail(f"HTTP {status}: {text:.{ERROR_CHARS}}")
        return recorder.finish()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes, on_body: Callable[[bytes, float], None]) -> int:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        while True:
            connection, reused = await self._connect()
            try:
                async with asyncio.timeout(self._timeout):
                    status = await connection.exchange(data, on_body)
            except _StaleConnection:
                # The server closed an idle connection just as we wrote: nothing was answered, so ask on a new one.
                if reused:
                    continue
                raise ClientError("the server closed the connection without an answer") from None
            except TimeoutError:
                connection.close()
                raise ClientError(f"no answer within {self._timeout:g} s") from None
            except BaseException:
                connection.close()
                raise
            if connection.usable:
                self._idle.append(connection)
            return status

    async def _connect(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection, True
        host, port = self._address
        try:
            async with asyncio.timeout(self._timeout):
                _, fresh = await asyncio.get_running_loop().create_connection(_Connection, host, port, ssl=self._tls)
        except OSError as error:
            why = error.strerror or str(error) or f"no answer within {self._timeout:g} s"
            raise NobodyListensError(f"cannot connect to {host}:{port}: {why}") from None
        return fresh, False


class EventSplitter:
    """Splits a body, which comes in pieces of any size, into the payloads of its `data:` lines."""

    __slots__ = ("_emit", "_rest")

    def __init__(self, emit: Callable[[bytes, float], None]) -> None:
        self._emit = emit
        self._rest = b""

    def feed(self, data: bytes, now: float) -> bool:
        """Tell whether some line of it belongs to an event, or may once the rest has come."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        found = not lines and data[:5] == b"data:"
        for line in lines:
            if line[:5] == b"data:":
                self._emit(line[5:].strip(), now)
                found = True
        return found


class _StaleConnection(Exception):
    """The connection was lost before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_body: Callable[[bytes, float], None] | None = None
        self._now = 0.0
        self._answered = False
        self.usable = False

    def exchange(self, data: bytes, on_body: Callable[[bytes, float], None]) -> asyncio.Future[int]:
        """Send one request; the future holds its status once the body is complete."""
        self._done = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self._done.set_exception(_StaleConnection())
            return self._done
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._answered, self.usable = on_body, False, False
        self._transport.write(data)
        return self._done

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._parser is None or self._done is None or self._done.done():
            self.close()  # bytes without a request
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ClientError(f"the server's answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        # A body without length ends with the connection; httptools has no call for that, the recorder sees [DONE].
        if self._answered:
            self._fail(ClientError("the server closed the connection in the middle of an answer"))
        else:
            self._fail(_StaleConnection())

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            return  # 100 Continue and the like precede the answer
        self.usable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(status)
        if not self.usable:
            self.close()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class TimedRequest(msgspec.Struct):
    """A request is sent `offset` seconds after the start."""

    index: int
    offset: float
    request: BenchRequest


async def drive(
    target: Target,
    requests: list[TimedRequest],
    prompts: PromptMaker,
    start: float,
    max_concurrency: int | None,
    on_result: Callable[[RequestResult], None],
) -> None:
    """Send every request at `start + offset` (monotonic seconds), at most `max_concurrency` at a time."""
    client = HttpClient(target.base_url, target.headers, target.timeout)
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)

    async def one(timed: TimedRequest) -> None:
        async with gate:
            request = timed.request
            prompt = request.text if request.text is not None else prompts.token_ids(request)
            body = target.body(request, prompt)
            on_result(await client.stream(target.endpoint, body, timed.index, request.prompt_len))

    try:
        async with asyncio.TaskGroup() as group:
            for timed in requests:
                wait = start + timed.offset - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(timed))
    finally:
        client.close()
