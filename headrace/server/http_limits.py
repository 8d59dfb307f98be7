"""uvicorn's HTTP protocol with a bound on request lines and headers, which httptools itself does not have.

Knows uvicorn's protocol class; knows nothing of what is served.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import RequestError
from headrace.server.replies import error_body

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together, and whatever else the parser swallows between two parts of a message."""
MAX_HEADERS = 128


class HeadTooLargeError(Exception):
    """Ends the parse; httptools reports it as an invalid request."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A head over the limits is answered with 400 and the connection closed, before the application hears of it."""

    _head_bytes = 0
    _silent_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        super().data_received(data)
        # One endless header value (or chunk extension) never comes to a callback.
        if self._silent_bytes > MAX_HEAD_BYTES + len(data) and not self.transport.is_closing():
            self.send_400_response(f"Request header larger than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        """As an error object, like every other answer; the connection closes."""
        _, body = error_body(RequestError(msg))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._silent_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise HeadTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLargeError
