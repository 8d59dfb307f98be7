"""Makes responses of JSON, and of errors in the shape of OpenAI's error objects."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.errors import EngineDeadError, HeadraceError, QueueFullError

logger = logging.getLogger(__name__)

DEAD = "the engine is dead or no longer steps; the server's log says why"


class ErrorDetail(msgspec.Struct):
    """Holds the content of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(msgspec.Struct):
    """Represents OpenAI's error object."""

    error: ErrorDetail


encoder = msgspec.json.Encoder()


def error_body(error: BaseException) -> tuple[int, bytes]:
    """Return HTTP status and OpenAI error object. An error that is not ours is logged and shown as a bare 500, because
    its message may name internals. So may the last message of a dead engine, which is in the log already, while /health
    is open to everybody."""
    if not isinstance(error, HeadraceError):
        logger.error("unexpected error while answering a request", exc_info=error)
        error = HeadraceError("internal server error")
    elif error.http_status == 500:
        logger.error("a request failed: %s", error)
    param: str | None = getattr(error, "param", None)
    message = DEAD if isinstance(error, EngineDeadError) else str(error)
    message = message.encode("utf-8", "replace").decode()  # half a surrogate pair in a quoted value cannot be encoded
    detail = ErrorDetail(message, error.error_type, param, error.code)
    return error.http_status, encoder.encode(ErrorObject(detail))


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the headers that an error adds: when to try again, if the queue is full."""
    return {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else {}


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    """Return the response for an error."""
    status, body = error_body(error)
    return Response(body, status, {**error_headers(error), **(headers or {})}, "application/json")


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a value that msgspec can encode."""
    return Response(encoder.encode(value), 200, headers, "application/json")
