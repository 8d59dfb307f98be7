"""The tree of errors. Each knows the HTTP status it becomes and the exit code a command ends with.

A `UserError` is bad input at start-up: one clear line on stderr, exit code 2, no traceback.
A `RequestError` is bad input of one request: an OpenAI error object, harming that request alone.
This file knows nothing of HTTP libraries or of the command line.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

MAX_QUOTED = 200
"""Most characters that a message to a client quotes of what it sent."""


def clip(text: str) -> str:
    """At most MAX_QUOTED characters of `text`, with a mark where some are missing."""
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def quoted(value: object, levels: int = 4) -> str:
    """`repr(value)` for a message, clipped. Values may be huge: no more of one is looked at than is shown."""
    if isinstance(value, str | bytes):
        return clip(repr(value[:MAX_QUOTED]))
    if isinstance(value, int) and not -(10**MAX_QUOTED) < value < 10**MAX_QUOTED:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write the longest
    if isinstance(value, list | tuple | dict):
        if not levels:
            return "..."
        if isinstance(value, dict):
            items = value.items()
            shown = [f"{quoted(key)}: {quoted(item, levels - 1)}" for key, item in islice(items, MAX_QUOTED // 8)]
        else:
            shown = [quoted(item, levels - 1) for item in islice(value, MAX_QUOTED // 4)]
        opening, closing = "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "()"
        return clip(opening + ", ".join(shown) + (", ..." if len(shown) < len(value) else "") + closing)
    return clip(repr(value))


class HeadraceError(Exception):
    """Any error that headrace raises on purpose."""

    http_status: int = 500
    error_type: str = "internal_server_error"
    code: str | None = None
    """What OpenAI's error object carries as `code`."""
    exit_code: int = 1


class UserError(HeadraceError):
    """Bad input at start-up (a flag, a file, a port): its message is one line naming field, value and remedy."""

    exit_code = 2


class ConfigError(UserError):
    """A knob has a value that cannot work."""


class ModelNotFoundError(UserError):
    """MODEL is neither `demo`, nor a local folder, nor a hub id that can be had."""


class UnsupportedModelError(UserError):
    """config.json names an architecture, or a feature of one, that no registered family covers."""


class CheckpointError(UserError):
    """A weights file is missing, truncated or holds a tensor of the wrong shape (the message names the tensor)."""


class TokenizerError(UserError):
    """The model's folder has no usable tokenizer."""


class PortInUseError(UserError):
    """The address to listen on is taken."""


class OutOfMemoryError(UserError):
    """Not even the smallest plan fits the device."""


class OutputError(HeadraceError):
    """Standard output, which is what the command is for, cannot be written."""


def crossing_name(error: Exception) -> str:
    """Of an error that is about to cross a process boundary, for `rebuild`. Another's that has the name of one of ours,
    as torch's OutOfMemoryError, is told apart."""
    kind = type(error)
    taken = kind.__name__ in globals() and not isinstance(error, HeadraceError)
    return f"{kind.__module__}.{kind.__name__}" if taken else kind.__name__


def rebuild(error_class: str, message: str, otherwise: HeadraceError) -> HeadraceError:
    """An error that crossed a process boundary as data: bad start-up input as its own class, anything else as
    `otherwise`."""
    known = globals().get(error_class)
    if isinstance(known, type) and issubclass(known, UserError):
        return known(message)
    return otherwise


class SomeRequestsError(HeadraceError):
    """Of several requests made together some failed. What the others brought is in `outputs`, in the order of the
    prompts, with the error in place of each that failed."""

    def __init__(self, outputs: list[Any]) -> None:
        failed = [(index, entry) for index, entry in enumerate(outputs) if isinstance(entry, HeadraceError)]
        index, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outputs)} requests failed, the first of them number {index}: {first} "
            "(this error's `outputs` holds what the others brought)"
        )
        self.outputs = outputs


class RequestError(HeadraceError):
    """One request is invalid. `param` is the name of the offending field, as the OpenAI error object carries it."""

    http_status = 400
    error_type = "invalid_request_error"
    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AuthenticationError(RequestError):
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """An unknown route."""

    http_status = 404
    error_type = "not_found_error"
    code = "not_found"


class ModelNotServedError(NotFoundError):
    """A request names a model that this server does not serve."""

    code = "model_not_found"


class MethodNotAllowedError(RequestError):
    http_status = 405
    code = "method_not_allowed"


class RequestTimeoutError(RequestError):
    """A client takes too long to send its request."""

    http_status = 408
    code = "request_timeout"


class PayloadTooLargeError(RequestError):
    http_status = 413
    code = "request_too_large"


class UnsupportedMediaTypeError(RequestError):
    http_status = 415
    code = "unsupported_media_type"


class QueueFullError(HeadraceError):
    """More requests or prompt tokens wait than may."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        """`retry_after`: whole seconds."""
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(HeadraceError):
    """The engine core is gone or no longer steps."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "engine_dead"


class TooManyConnectionsError(HeadraceError):
    """All connections that may be open are taken."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "too_many_connections"


class StepsFailError(HeadraceError):
    """The engine steps, but its steps fail one after the other."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "steps_fail"


class ServerStoppingError(HeadraceError):
    """The server was told to stop while a request was open."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = "server_stopping"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
