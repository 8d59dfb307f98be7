"""Makes responses of JSON, and of errors and events in the shape of the API that a path belongs to."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.errors import EngineDeadError, HeadraceError, QueueFullError, ServerStoppingError

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


@dataclass(frozen=True)
class Wire:
    """Says how an API writes errors and the events of a stream."""

    error: Callable[[int, ErrorDetail], msgspec.Struct]
    """HTTP status and an error -> the body that says so"""
    event: Callable[[msgspec.Struct], bytes]
    """one event -> a server-sent event"""
    done: bytes
    """what follows the last event"""
    failed: Callable[[msgspec.Struct], bytes]
    """the body of an error -> the event that ends a stream in place of the others"""


def _data(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encoder.encode(data)


def named_event(data: msgspec.Struct) -> bytes:
    """Return a server-sent event whose name is the type that its data is tagged with."""
    return b"event: %b\n" % str(data.__struct_config__.tag).encode() + _data(data)


OPENAI = Wire(lambda status, detail: ErrorObject(detail), _data, b"data: [DONE]\n\n", _data)


class AnthropicErrorDetail(msgspec.Struct):
    """Holds the content of Anthropic's error object."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """Represents Anthropic's error object."""

    error: AnthropicErrorDetail


ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def _anthropic_error(status: int, detail: ErrorDetail) -> AnthropicError:
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return AnthropicError(AnthropicErrorDetail(ANTHROPIC_TYPES.get(status, kind), detail.message))


ANTHROPIC = Wire(_anthropic_error, named_event, b"", named_event)
_ANTHROPIC_PATHS = re.compile(r"/v1/messages(/count_tokens)?\Z")


def wire_of(path: str) -> Wire:
    """Return how the API writes that a path belongs to."""
    return ANTHROPIC if _ANTHROPIC_PATHS.search(path) else OPENAI


def error_of(error: BaseException, wire: Wire = OPENAI) -> tuple[int, msgspec.Struct]:
    """Return HTTP status and error object. An error that is not ours is logged and shown as a bare 500, because its
    message may name internals. So may the last message of a dead engine, which is in the log already, while /health is
    open to everybody."""
    if not isinstance(error, HeadraceError):
        logger.error("unexpected error while answering a request", exc_info=error)
        error = HeadraceError("internal server error")
    elif error.http_status == 500:
        logger.error("a request failed: %s", error)
    param: str | None = getattr(error, "param", None)
    message = DEAD if isinstance(error, EngineDeadError) else str(error)
    message = message.encode("utf-8", "replace").decode()  # half a surrogate pair in a quoted value cannot be encoded
    status = error.http_status
    return status, wire.error(status, ErrorDetail(message, error.error_type, param, error.code))


def error_headers(error: BaseException) -> dict[str, str]:
    """Return the headers that an error adds: when to try again, if the queue is full or the server stops."""
    if isinstance(error, QueueFullError | ServerStoppingError):
        return {"retry-after": str(error.retry_after)}
    return {}


def error_response(error: BaseException, headers: dict[str, str] | None = None, *, wire: Wire = OPENAI) -> Response:
    """Return the response for an error."""
    status, body = error_of(error, wire)
    return Response(encoder.encode(body), status, {**error_headers(error), **(headers or {})}, "application/json")


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a value that msgspec can encode."""
    return Response(encoder.encode(value), 200, headers, "application/json")
