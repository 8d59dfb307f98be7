"""Request bodies: read within limits, decoded once, refused in words that name field, value and limit.

Knows nothing of what a request means; the shapes are in protocol.py.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headrace.errors import PayloadTooLargeError, RequestError, UnsupportedMediaTypeError

T = TypeVar("T")
MAX_DEPTH = 32
"""Deepest nesting of free-form values (tools, chat_template_kwargs)."""
MAX_QUOTED_FROM = 2**16
"""Bytes of a body that is decoded a second time, to quote from it what is wrong with it."""
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes of it ever held; raises 415 before, and 413 while, reading it."""
    headers = request.headers
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaTypeError(f"Content-Type must be application/json, got {media_type[:100] or 'none'!r}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(f"Content-Encoding must be identity, got {encoding[:100]!r}")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(f"{declared[:20]} bytes", limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: str, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body has {size}; the limit is {limit} (--max-request-bytes)")


def decode(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], prefix: str = "") -> T:
    """Raises RequestError naming the field (below `prefix`), what it holds and what was expected."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body, prefix) from None
    except RecursionError:
        raise RequestError("the JSON is nested too deeply", prefix or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        halves = (
            r" (\ud800 to \udfff are halves of characters and come in pairs)" if _HALF_CHARACTER.search(body) else ""
        )
        raise RequestError(f"the body is not valid JSON: {error}{halves}", prefix or None) from None


def _explain(message: str, body: bytes | msgspec.Raw, prefix: str) -> RequestError:
    match = _WHERE.match(message)
    what, path, is_key = (match["what"], match["path"] or "", match["key"]) if match else (message, "", None)
    missing = _MISSING.match(what)
    if missing:
        name = _join(prefix, f"{path}.{missing['name']}")
        return RequestError(f"{name} is required", name)
    name = _join(prefix, path)
    found = "" if is_key else _value_at(body, path)
    place = f"a key of {name}" if is_key else name or "the body"
    return RequestError(f"{place}: {what[:1].lower()}{what[1:]}{found}", name or None)


def _join(prefix: str, path: str) -> str:
    return f"{prefix}{path}" if prefix else path.removeprefix(".")


def _value_at(body: bytes | msgspec.Raw, path: str) -> str:
    """` (abc)` for what stands at `path` (msgspec's notation), or nothing where that cannot be told."""
    if len(memoryview(body)) > MAX_QUOTED_FROM:
        return ""
    try:
        value = msgspec.json.decode(body)
        for step in _STEP.finditer(path):
            value = value[step["name"]] if step["name"] else value[int(step["index"])]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return ""
    return f" ({reprlib.repr(value)})"


def check_depth(name: str, value: Any) -> None:
    """Free-form JSON nested deeper than MAX_DEPTH is refused: what walks it later recurses."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise RequestError(f"{name} may be nested at most {MAX_DEPTH} levels deep", name)
