"""Reads JSON inside an answer, such as the arguments of a call: hands it on as it comes, or collects it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from headrace.parsers.calls import Calls
from headrace.parsers.events import Content, Event, Steps
from headrace.parsers.reader import Markers, Reader, collected

_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN = re.compile(r"[\s:,0-9a-zA-Z.+-]*")
_SCALAR = re.compile(r"[0-9a-zA-Z.+-]*")
_CLOSING = {"{": "}", "[": "]"}
_BRACE = Markers("{")


class Lexer:
    """Finds the end of one JSON value in text that comes in pieces.

    It knows strings, escapes and nesting, so text inside a string never ends a value; it does not check commas and
    colons. Raw control characters in strings, which models write and JSON forbids, are escaped.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._begun = False
        self.done = False
        """The value ended."""
        self.broken = False
        """What follows cannot be in a JSON value: the reading stopped before it."""
        self._start = 0
        self._controls: list[int] = []

    def end(self, text: str, at: int) -> int:
        """Return how far `text` from `at` belongs to the value; set `done` or `broken` if that is not all."""
        self._start, self._controls = at, []
        while at < len(text) and not (self.done or self.broken):
            at = self._in(text, at) if self._in_string else self._outside(text, at)
        return at

    def _in(self, text: str, at: int) -> int:
        """Go on in a string."""
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _STRING.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return at
        self._escaped = text[at] == "\\"
        if text[at] == '"':
            self._in_string = False
            self.done = not self._open
        elif not self._escaped:
            self._controls.append(at - self._start)
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        """Go on outside of strings."""
        if self._open:
            found = _BETWEEN.match(text, at)
            if found and found.end() > at:
                return found.end()
        elif text[at] not in '"[{':  # a number or a literal, which ends where something else begins
            found = _SCALAR.match(text, at)
            if found and found.end() > at:
                self._begun = True
                return found.end()
            self.done, self.broken = self._begun, not self._begun
            return at
        char = text[at]
        if not self._open and self._begun:
            self.done = True
            return at
        self._begun = True
        if char == '"':
            self._in_string = True
        elif char in "[{":
            self._open.append(_CLOSING[char])
        elif self._open[-1] == char:
            self._open.pop()
            self.done = not self._open
        else:
            self.broken = True
            return at
        return at + 1

    def escaped(self, text: str) -> str:
        """Return the text that `end` just measured, with control characters in its strings escaped."""
        if not self._controls:
            return text
        parts: list[str] = []
        at = 0
        for place in self._controls:
            parts += text[at:place], json.dumps(text[place])[1:-1]
            at = place + 1
        return "".join([*parts, text[at:]])

    @property
    def complete(self) -> bool:
        """Says whether the value is whole if the text ends here."""
        return self.done or (self._begun and not self._open and not self._in_string and not self.broken)


def json_value(reader: Reader, event: Callable[[str], Event], begun: str = "") -> Steps[bool]:
    """Hand on one JSON value as it comes; returns whether it is whole. White space before it must be read already.

    `begun` is a beginning of it that was read before, and is not handed on.
    """
    lexer = Lexer()
    lexer.end(begun, 0)
    while not (lexer.done or lexer.broken):
        text = yield from reader.scan(lexer.end)
        if text:
            yield event(lexer.escaped(text))
        elif reader.ended:
            break
    return lexer.complete


def collect_json(reader: Reader) -> Steps[str | None]:
    """Read one JSON value and return its text; None if it is not whole. White space before it must be read already."""
    text, whole = yield from collected(reader, json_value(reader, Content))
    return text if whole else None


def as_string(text: str | None) -> str | None:
    """Return the string that a JSON text says, or None if it says anything else."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def pass_arguments(reader: Reader, calls: Calls, name: str, id: str | None = None) -> Steps[bool]:
    """Begin a call and hand on its arguments as they come; white space before them must be read already.

    Returns False, with nothing begun, if what follows is no JSON. The call begins when its first key or its end
    is there, so that text which only looks like arguments can still be given back.
    """
    if (yield from reader.accept(_BRACE)):
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
