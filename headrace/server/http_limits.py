"""Bounds the size of request heads, and the time that a client may take for each part of a request and its answer.

It extends uvicorn's HTTP protocol, as neither uvicorn nor httptools has such bounds. Times are checked when the server
goes through all connections (http_server.py), so that neither a request nor a token costs a timer. ("Head" is RFC
9112's word for request line and headers.)
"""

from __future__ import annotations

import enum
import fcntl
import re
import sys
import termios
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import HeadraceError, RequestError, RequestTimeoutError
from headrace.server.replies import encoder, error_of

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of request line and headers, and of anything else that the parser takes without a callback."""
MAX_HEADERS = 128
MIN_BODY_RATE = 500
"""Bytes a second that a body must bring on average over --body-timeout."""
HOST = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII)
"""The characters that RFC 9110 allows in a Host header, without those that would end it inside a URL."""


class BadHeadError(Exception):
    """Ends the parsing of a request; httptools then reports it as invalid."""


class Stage(enum.Enum):
    """Says what a connection is doing, for the timeout that applies to it."""

    IDLE = "between two requests, or before the first"
    HEAD = "in a head"
    BODY = "in a body"
    ANSWER = "a request has been received whole and is not answered yet"
    SENDING = "the client has to read before more can be sent"
    CLOSING = "closed on our side, but the client has still to read"


@dataclass(frozen=True)
class Timeouts:
    """Holds the timeouts of a connection, in seconds."""

    header: float
    body: float
    send: float


class Owner(Protocol):
    """Represents the server of a connection, as far as that needs it."""

    def admit(self, connection: BoundedHttpProtocol) -> bool:
        """Return whether a connection whose head has come may use every route; otherwise only /health and /metrics."""

    def forget(self, connection: BoundedHttpProtocol) -> None:
        """Drop a connection that is closed."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Enforces the bounds on one connection. A head over the limits is answered with 400, and the connection closed,
    before the application sees it. `check_time` ends what takes too long: a head, a body that trickles in, an answer
    that the client does not read. Once a request has been received whole, its answer may take any time."""

    def __init__(self, owner: Owner, timeouts: Timeouts, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.owner = owner
        self.timeouts = timeouts
        self.num_heads = 0
        """Heads that have been received whole."""
        self._stage = Stage.IDLE
        """What is being read; writing does not count here."""
        self._head_bytes = 0
        self._uncounted_bytes = 0
        """Bytes since the parser's last callback."""
        self._body_bytes = 0
        self._complaint = ""
        self._checked: tuple[Stage, int] | None = None
        """Stage and `num_heads` when time was last checked."""
        self._since = 0.0
        """When the present stage began, or last made progress."""
        self._mark = 0
        """Bytes of the body, or bytes left to send, at `_since`."""

    @property
    def is_silent(self) -> bool:
        """True if the client has requested nothing yet, or does not read its answer after it was closed."""
        return self.transport is not None and (self.num_heads == 0 or self.transport.is_closing())

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._uncounted_bytes += len(data)
        super().data_received(data)
        # A header value (or chunk extension) without an end causes no callback.
        if self._uncounted_bytes > MAX_HEAD_BYTES + len(data) and not self.transport.is_closing():
            self.send_400_response(f"Request header larger than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(self._complaint or msg))

    def _refuse(self, error: HeadraceError) -> None:
        """Answer with an error object, as everywhere else, and close the connection."""
        status, found = error_of(error)
        body = encoder.encode(found)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._uncounted_bytes = 0
        self._stage = Stage.HEAD
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise BadHeadError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._uncounted_bytes = 0
        self._check_head()
        self.num_heads += 1
        self._stage = Stage.BODY
        admitted = self.owner.admit(self)
        super().on_headers_complete()
        if not admitted:
            self.cycle.keep_alive = False

    def _check_head(self) -> None:
        """Refuse a head that two servers in a row might read differently (RFC 9112, 3.2)."""
        version = self.parser.get_http_version()
        hosts = [value for name, value in self.headers if name == b"host"]
        if version not in ("1.0", "1.1"):
            self._complaint = f"The HTTP version must be 1.0 or 1.1, got {version}."
        elif len(hosts) > 1 or (not hosts and version == "1.1"):
            self._complaint = f"A request needs one Host header, got {len(hosts) or 'none'}."
        elif hosts and not HOST.fullmatch(hosts[0]):
            self._complaint = f"The Host header is not a host: {hosts[0][:100]!r}."
        if self._complaint:
            raise BadHeadError

    def on_body(self, body: bytes) -> None:
        self._uncounted_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._uncounted_bytes = 0
        self._stage = Stage.IDLE
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._uncounted_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise BadHeadError

    def check_time(self, now: float) -> None:
        """End what has taken too long. `now`: seconds of a clock that stops while the event loop is held up. What
        clients send then waits in the kernel, so that time must not count against them."""
        stage = self._stage_of_all()
        if self._checked != (stage, self.num_heads):
            self._checked = (stage, self.num_heads)
            self._since, self._mark = now, self._amount(stage)
        elif stage in (Stage.SENDING, Stage.CLOSING):
            self._check_sending(now)
        elif stage is Stage.BODY:
            self._check_body(now)
        elif stage is Stage.HEAD and now - self._since > self.timeouts.header:
            if self._stage is Stage.HEAD:
                self._refuse(RequestTimeoutError(f"the headers took longer than {self.timeouts.header:g} s"))
            else:
                self.transport.close()  # nothing was sent, so nothing is answered

    def _stage_of_all(self) -> Stage:
        cycle = self.cycle
        if self.transport.is_closing():
            return Stage.CLOSING
        if self.flow.write_paused:
            return Stage.SENDING
        if cycle is not None and (self.pipeline or not (cycle.response_complete or cycle.more_body)):
            return Stage.ANSWER
        if self._stage is Stage.IDLE and self.timeout_keep_alive_task is None:
            return Stage.HEAD  # a new connection, or bytes that begin no request; for idle ones uvicorn has a timer
        return self._stage

    def _amount(self, stage: Stage) -> int:
        if stage in (Stage.SENDING, Stage.CLOSING):
            return self.transport.get_write_buffer_size() + _unread(self.transport.get_extra_info("socket").fileno())
        return self._body_bytes

    def _check_sending(self, now: float) -> None:
        left = self._amount(Stage.SENDING)
        if left != self._mark:  # it may also be more: the client has read, and more was written
            self._since, self._mark = now, left
        elif now - self._since > self.timeouts.send:
            self.transport.abort()

    def _check_body(self, now: float) -> None:
        limit, answered = self.timeouts.body, self.cycle.response_complete
        if self.flow.read_paused:  # the server does not read, so the client cannot go on
            self._since, self._mark = now, self._body_bytes
        elif now - self._since <= limit:
            return
        elif answered:
            self.transport.close()
        elif self._body_bytes - self._mark >= MIN_BODY_RATE * limit:
            self._since, self._mark = now, self._body_bytes
        else:
            self.cycle.disconnected = True  # so that the application sends nothing more
            self._refuse(RequestTimeoutError(f"the body brought less than {MIN_BODY_RATE} bytes/s for {limit:g} s"))


def _unread(descriptor: int) -> int:
    """Return the bytes that the kernel holds until the client acknowledges them; fewer and fewer while it reads."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
