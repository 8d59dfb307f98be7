"""Errors as OpenAI error objects, and JSON answers. Knows nothing of routes or of the engine."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.errors import EngineDeadError, HeadraceError, QueueFullError

logger = logging.getLogger(__name__)

DEAD = "the engine is dead or no longer steps; the server's log says why"


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(msgspec.Struct):
    error: ErrorDetail


encoder = msgspec.json.Encoder()


def error_body(error: BaseException) -> tuple[int, bytes]:
    """(HTTP status, OpenAI error object). What is not ours is logged and shown as a bare 500: it may name internals. So
    may a dead engine's last words, which the engine has logged (and /health is open to all)."""
    if not isinstance(error, HeadraceError):
        logger.error("unexpected error while answering a request", exc_info=error)
        error = HeadraceError("internal server error")
    elif error.http_status == 500:
        logger.error("a request failed: %s", error)
    param: str | None = getattr(error, "param", None)
    message = DEAD if isinstance(error, EngineDeadError) else str(error)
    message = message.encode("utf-8", "replace").decode()  # a lone surrogate in a quoted value cannot be encoded
    detail = ErrorDetail(message, error.error_type, param, error.code)
    return error.http_status, encoder.encode(ErrorObject(detail))


def error_headers(error: BaseException) -> dict[str, str]:
    return {"retry-after": str(error.retry_after)} if isinstance(error, QueueFullError) else {}


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    status, body = error_body(error)
    return Response(body, status, {**error_headers(error), **(headers or {})}, "application/json")


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """`value`: anything that msgspec encodes."""
    return Response(encoder.encode(value), 200, headers, "application/json")
