"""Reads the arguments that a model writes as JSON."""

from __future__ import annotations

import json

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.json_text import collect_json, is_object, json_value
from headrace.parsers.reader import Markers, Reader

_OBJECT = Markers("{")


def pass_arguments(reader: Reader, calls: Calls, name: str, id: str | None = None) -> Steps[bool]:
    """Begin a call and hand on its arguments as they come; white space before them must be read already.

    Returns False, with nothing begun, if what follows is no JSON. The call begins when its first key or its end
    is there, so that text which only looks like arguments can still be given back.
    """
    if (yield from reader.accept(_OBJECT)):
        begun = "{" + (yield from reader.space())
        follows = yield from reader.peek()
        if follows not in ('"', "}"):
            return False
        yield calls.start(name, id)
        yield calls.arguments(begun)
        yield from json_value(reader, calls.arguments, begun)
        return True
    text = yield from collect_arguments(reader)
    if text is None:
        return False
    yield calls.start(name, id)
    yield calls.arguments(text)
    return True


def collect_arguments(reader: Reader) -> Steps[str | None]:
    """Read arguments and return their text; None if they are no JSON.

    Some models write a string that holds the object, or null for no arguments: both become the object.
    """
    text = yield from collect_json(reader)
    if text is None or text.startswith("{"):
        return text
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()  # half of a surrogate pair is an escape that says no text
    except (ValueError, RecursionError):
        return None
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    return value if isinstance(value, str) and is_object(value) else text
