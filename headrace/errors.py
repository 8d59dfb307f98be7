"""Defines the errors that headrace raises. Each has the HTTP status that it becomes, and a command's exit code.

A `UserError` is wrong input at start-up. The command prints it as one line, without a traceback, and ends with code 2.
A `RequestError` is wrong input of one request. It becomes an OpenAI error object, and no other request notices.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

MAX_QUOTED = 200
"""Most characters that a message to a client quotes of what it sent."""


def clip(text: str) -> str:
    """Return at most MAX_QUOTED characters of a text, with a mark where some are missing."""
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def quoted(value: object, levels: int = 4) -> str:
    """Return `repr(value)`, clipped, for a message. Of a huge value, no more is read than is shown."""
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
    """Represents any error that headrace raises on purpose."""

    http_status: int = 500
    error_type: str = "internal_server_error"
    code: str | None = None
    """The `code` of OpenAI's error object."""
    exit_code: int = 1


class UserError(HeadraceError):
    """Says that input at start-up is wrong (a flag, a file, a port). Its message is one line with field, value and
    remedy."""

    exit_code = 2


class ConfigError(UserError):
    """A setting has a value that cannot work."""


class ModelNotFoundError(UserError):
    """MODEL is neither `demo`, nor a local folder, nor a hub id that can be downloaded."""


class UnsupportedModelError(UserError):
    """config.json names an architecture, or a feature of one, that no registered family covers. `field`: the one whose
    value is refused, if it is one."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


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
    """Return the name under which an error crosses a process boundary, for `rebuild`. An error of another library with
    the name of one of ours, such as torch's OutOfMemoryError, gets its module's name in front."""
    kind = type(error)
    taken = kind.__name__ in globals() and not isinstance(error, HeadraceError)
    return f"{kind.__module__}.{kind.__name__}" if taken else kind.__name__


def rebuild(error_class: str, message: str, otherwise: HeadraceError) -> HeadraceError:
    """Return the error that crossed a process boundary: a UserError as its own class, anything else as `otherwise`."""
    known = globals().get(error_class)
    if isinstance(known, type) and issubclass(known, UserError):
        return known(message)
    return otherwise


class SomeRequestsError(HeadraceError):
    """Some of several requests made together have failed. `outputs` holds the outputs of the others in the order of the
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
    """A request has no valid API key."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """A request names an unknown route."""

    http_status = 404
    error_type = "not_found_error"
    code = "not_found"


class ModelNotServedError(NotFoundError):
    """A request names a model that this server does not serve."""

    code = "model_not_found"


class MethodNotAllowedError(RequestError):
    """A route is called with a method that it does not have."""

    http_status = 405
    code = "method_not_allowed"


class RequestTimeoutError(RequestError):
    """A client takes too long to send its request."""

    http_status = 408
    code = "request_timeout"


class PayloadTooLargeError(RequestError):
    """A request's body is longer than --max-request-bytes."""

    http_status = 413
    code = "request_too_large"


class UnsupportedMediaTypeError(RequestError):
    """A request's body is not plain JSON."""

    http_status = 415
    code = "unsupported_media_type"


class QueueFullError(HeadraceError):
    """More waits than is allowed to, or a request has waited for longer than that."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        """`retry_after`: whole seconds after which to try again."""
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(HeadraceError):
    """Says why the server cannot take a request now; subclasses give the reason."""

    http_status = 503
    error_type = "service_unavailable_error"


class EngineDeadError(UnavailableError):
    """The engine core is gone or no longer steps."""

    code = "engine_dead"


class TooManyConnectionsError(UnavailableError):
    """All connections that may be open are taken."""

    code = "too_many_connections"


class StepsFailError(UnavailableError):
    """The engine steps, but its steps fail one after the other."""

    code = "steps_fail"


class ServerStoppingError(UnavailableError):
    """The server was told to stop, and a request was open or came later."""

    code = "server_stopping"
    retry_after = 1
    """seconds after which another server, or the next one here, may answer"""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
