"""uvicorn's HTTP protocol with bounds: on the size of a head, which httptools itself does not have, and on the time
that a client may take over each part of an exchange.

Time is looked at when the server sweeps all connections (http_server.py): neither a request nor a token costs a timer.
Knows uvicorn's protocol class; knows nothing of what is served.
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
from headrace.server.replies import error_body

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together, and whatever else the parser swallows between two parts of a message."""
MAX_HEADERS = 128
SLOWEST_BODY = 500
"""Bytes a second that a body has to bring, taken over the whole of --body-timeout."""
HOST = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII)
"""What RFC 9110 allows in a Host header, and no character that would end it inside a URL."""


class BadHeadError(Exception):
    """Ends the parse; httptools reports it as an invalid request."""


class Stage(enum.Enum):
    """What a connection is at, as far as its clock is concerned."""

    IDLE = "between two requests, or before the first"
    HEAD = "in a head"
    BODY = "in a body"
    ANSWER = "a request has been received whole and is not answered yet"
    SENDING = "the client has to read before more can be sent"
    CLOSING = "closed on our side, but the client has still to read"


@dataclass(frozen=True)
class Timeouts:
    """In seconds."""

    header: float
    body: float
    send: float


class Owner(Protocol):
    """What a connection needs of its server."""

    def admit(self, connection: BoundedHttpProtocol) -> bool:
        """Whether it may send any request, now that one's head is there; False: only /health and /metrics."""

    def forget(self, connection: BoundedHttpProtocol) -> None:
        """It is closed."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A head over the limits is answered with 400 and the connection closed, before the application hears of it.

    `check_time` ends what takes too long: a head, a body that trickles, an answer that nobody reads. A request that has
    been received whole may take as long as it likes.
    """

    def __init__(self, owner: Owner, timeouts: Timeouts, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.owner = owner
        self.timeouts = timeouts
        self.num_heads = 0
        """heads that came to their end"""
        self._stage = Stage.IDLE
        """of reading alone"""
        self._head_bytes = 0
        self._silent_bytes = 0
        self._body_bytes = 0
        self._complaint = ""
        self._seen: tuple[Stage, int] | None = None
        """stage and `num_heads` when time was last looked at"""
        self._since = 0.0
        self._mark = 0
        """bytes of the body, or bytes to be sent, at `_since`"""

    @property
    def is_silent(self) -> bool:
        """It has not asked for anything yet, or has been answered and does not read."""
        return self.transport is not None and (self.num_heads == 0 or self.transport.is_closing())

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        super().data_received(data)
        # One endless header value (or chunk extension) never comes to a callback.
        if self._silent_bytes > MAX_HEAD_BYTES + len(data) and not self.transport.is_closing():
            self.send_400_response(f"Request header larger than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(self._complaint or msg))

    def _refuse(self, error: HeadraceError) -> None:
        """As an error object, like every other answer; the connection closes."""
        status, body = error_body(error)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._silent_bytes = 0
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
        self._silent_bytes = 0
        self._check_head()
        self.num_heads += 1
        self._stage = Stage.BODY
        admitted = self.owner.admit(self)
        super().on_headers_complete()
        if not admitted:
            self.cycle.keep_alive = False

    def _check_head(self) -> None:
        """What two servers in a row could read differently is refused (RFC 9112, 3.2)."""
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
        self._silent_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        self._stage = Stage.IDLE
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise BadHeadError

    def check_time(self, now: float) -> None:
        """End what has taken too long. `now`: seconds of a clock that stands still while the event loop does, for what
        came meanwhile waits in the kernel."""
        stage = self._stage_of_all()
        if self._seen != (stage, self.num_heads):
            self._seen = (stage, self.num_heads)
            self._since, self._mark = now, self._amount(stage)
        elif stage in (Stage.SENDING, Stage.CLOSING):
            self._check_sending(now)
        elif stage is Stage.BODY:
            self._check_body(now)
        elif stage is Stage.HEAD and now - self._since > self.timeouts.header:
            if self._stage is Stage.HEAD:
                self._refuse(RequestTimeoutError(f"the headers took longer than {self.timeouts.header:g} s"))
            else:
                self.transport.close()  # of who has said nothing

    def _stage_of_all(self) -> Stage:
        cycle = self.cycle
        if self.transport.is_closing():
            return Stage.CLOSING
        if self.flow.write_paused:
            return Stage.SENDING
        if cycle is not None and (self.pipeline or not (cycle.response_complete or cycle.more_body)):
            return Stage.ANSWER
        if self._stage is Stage.IDLE and self.timeout_keep_alive_task is None:
            return Stage.HEAD  # a new connection, or bytes that begin nothing; uvicorn's timer is for the idle
        return self._stage

    def _amount(self, stage: Stage) -> int:
        if stage in (Stage.SENDING, Stage.CLOSING):
            return self.transport.get_write_buffer_size() + _unread(self.transport.get_extra_info("socket").fileno())
        return self._body_bytes

    def _check_sending(self, now: float) -> None:
        left = self._amount(Stage.SENDING)
        if left != self._mark:  # also more: the client had read, and more was written
            self._since, self._mark = now, left
        elif now - self._since > self.timeouts.send:
            self.transport.abort()

    def _check_body(self, now: float) -> None:
        limit, answered = self.timeouts.body, self.cycle.response_complete
        if self.flow.read_paused:  # it is we who do not read
            self._since, self._mark = now, self._body_bytes
        elif now - self._since <= limit:
            return
        elif answered:
            self.transport.close()
        elif self._body_bytes - self._mark >= SLOWEST_BODY * limit:
            self._since, self._mark = now, self._body_bytes
        else:
            self.cycle.disconnected = True  # nothing more is to be sent
            self._refuse(RequestTimeoutError(f"the body brought less than {SLOWEST_BODY} bytes/s for {limit:g} s"))


def _unread(descriptor: int) -> int:
    """Bytes that the kernel holds until the client acknowledges them: they become fewer while a slow one reads."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
