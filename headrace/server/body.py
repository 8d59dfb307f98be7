"""Reads and decodes request bodies within limits; errors name field, value and limit.

A large body is handled in many short steps, so that a thread that does it does not hold up the event loop. The shapes
of requests are in protocol.py.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from headrace.errors import PayloadTooLargeError, RequestError, UnsupportedMediaTypeError, clip, quoted
from headrace.server.json_pieces import PIECE, decode_json

T = TypeVar("T")
MAX_DEPTH = 32
"""Deepest nesting of free-form values (tools, chat_template_kwargs)."""
MAX_PATH = 500
"""Most characters at the end of msgspec's message that say where an error is. A whole wrong value may precede them."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WHERE = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_TOO_LONG = re.compile(r"^Expected `(?:array|object)` of length <= (?P<limit>\d+)$")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


async def read_body(request: Request, limit: int) -> bytearray:
    """Return the body, holding at most `limit` bytes of it. Raises UnsupportedMediaTypeError before reading, and
    PayloadTooLargeError as soon as it is too long."""
    headers = request.headers
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise UnsupportedMediaTypeError(
            f"Content-Type must be application/json, got {quoted(media_type) if media_type else 'none'}"
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(f"Content-Encoding must be identity, got {quoted(encoding)}")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(f"{declared[:20]} bytes", limit)
    body = bytearray()  # grows in place; joining parts at the end would be one long copy
    async for part in request.stream():
        if len(body) + len(part) > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        body += part
    return body


def _too_large(size: str, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body has {size}; the limit is {limit} (--max-request-bytes)")


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the fields of a body. Raises RequestError if it is not a JSON object."""
    try:
        fields = decode_json(body)
    except RecursionError:
        raise RequestError("the JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {clip(str(error))}", _broken_field(body)) from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body must be a JSON object, got {quoted(fields)}")
    return fields


def _broken_field(body: bytes | bytearray) -> str | None:
    """Return the field whose value cannot be decoded, if the rest of a short body can."""
    if len(body) > PIECE:
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name, value in fields.items():
        try:
            decode_json(bytes(value))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return name
    return None


def convert(value: Any, shape: type[T], prefix: str = "") -> T:
    """Convert decoded JSON to `shape`. Raises RequestError naming the field (below `prefix`), its value and what was
    expected."""
    try:
        return msgspec.convert(value, shape, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), value, prefix) from None


def _explain(message: str, value: Any, prefix: str) -> RequestError:
    """Return the error for a message of msgspec's: it names the field by its path, and quotes the wrong value."""
    match = _WHERE.search(message[-MAX_PATH:])
    path, is_key = (match["path"], match["key"]) if match else ("", None)
    what = message[: len(message) - len(match[0])] if match else message
    missing = _MISSING.match(what)
    if missing:
        name = _join(prefix, f"{path}.{missing['name']}")
        return RequestError(f"{name} is required", name)
    name = _join(prefix, path)
    for step in _STEP.finditer(path):
        if step["name"]:
            value = value[step["name"]]
        elif step["index"]:
            value = value[int(step["index"])]
        else:  # some value of an object
            return RequestError(f"{name}: {what[:1].lower()}{clip(what[1:])}", name)
    too_long = _TOO_LONG.match(what)
    if too_long:
        return RequestError(f"{name} may hold at most {too_long['limit']} entries, got {len(value)}", name)
    place = f"a key of {name}" if is_key else name
    found = "" if is_key else f" ({quoted(value)})"
    return RequestError(f"{place}: {what[:1].lower()}{clip(what[1:])}{found}", name or None)


def _join(prefix: str, path: str) -> str:
    return f"{prefix}{path}" if prefix else path.removeprefix(".")


def check_depth(name: str, value: Any) -> None:
    """Raise RequestError for free-form JSON nested deeper than MAX_DEPTH: later code walks it by recursion."""
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
