"""Calls written as Python does, as in [get_weather(city='Paris', days=3)]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.json_calls import JsonCalls
from headrace.parsers.literals import LOOK, close, is_literal, literal, past_commas
from headrace.parsers.reader import Reader, collected, markers
from headrace.parsers.scalars import json_string

_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")
"""A function's name, which may begin with a digit or a dash."""
_HEAD = re.compile(rf"({_NAME.pattern})\s*\(\s*(?:\)|[^\W\d]\w*\s*=(?!=))")
_KEY = re.compile(r"([^\W\d]\w*)\s*=(?!=)")
_JSON = re.compile(r"\[?\s*\{")


@dataclass(frozen=True)
class PythonicCalls:
    """Describes calls with named arguments, alone or in a list. Values are literals of Python or of JSON."""

    closers: tuple[str, ...] = ()
    """Markup that ends the section of calls."""
    or_json: JsonCalls | None = None
    """How calls are written where JSON follows the opener."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read calls up to the end of the list, and the markup that ends them.

        A list without an opener makes calls only of the tools that there are, since "[" begins other text too.
        """
        yield from reader.space()
        if self.or_json and (yield from reader.ahead(_is_json)):
            return (yield from self.or_json.read(reader, calls, opener))
        listed = opener == "[" or bool((yield from reader.accept(markers("["))))
        made = False
        while True:
            yield from reader.space()
            if (made or opener != "[") and (yield from reader.accept(markers("]"))):  # an empty list, or a last comma
                listed, made = False, True
                break
            name = yield from reader.ahead(_head)
            if not name or (opener == "[" and not made and calls.tools and name not in calls.tools):
                if reader.cut:
                    yield from reader.scan(_begun)
                break
            if (yield from reader.ahead(_takes_literals)):
                yield from _skip(reader, len(name))
                yield calls.start(name)
                yield from _arguments(reader, calls)
                made = True
            else:  # no call, but others may stand beside it
                yield from _skip(reader, len(name))
                yield from collected(reader, _arguments(reader, calls))
            yield from reader.space()
            if (yield from reader.accept(markers(",", ";", *("]" if listed else "")))) == "]":
                listed = False
                break
        if made and self.closers:
            yield from reader.space()
            while listed and (yield from reader.accept(markers("]", ")"))):  # one too many somewhere
                yield from reader.space()
            yield from reader.accept(markers(*self.closers))
        return made


def _arguments(reader: Reader, calls: Calls) -> Steps[None]:
    """Hand on the arguments of a call, whose name was just read, up to its closing parenthesis."""
    yield from reader.space()
    yield from reader.accept(markers("("))
    separator = "{"
    while True:
        mark = yield from past_commas(reader, markers(",", ")", "]", "}"))
        if mark or reader.ended:
            break
        key = yield from reader.ahead(_key)
        if key:
            yield from _skip(reader, len(key))
            yield from reader.space()
            yield from reader.accept(markers("="))
            yield calls.arguments(f"{separator}{json_string(key)}: ")
            separator = ", "
            yield from literal(reader, calls.arguments, _after_argument)
        else:  # a value without a name says nothing that could be passed on
            yield from collected(reader, literal(reader, calls.arguments, _after_argument))
    yield from close(reader, calls.arguments, mark, ")", "{}" if separator == "{" else "}")


def _skip(reader: Reader, length: int) -> Steps[str]:
    """Read so many characters, which have come."""
    return reader.scan(lambda _, at: at + length)


def _is_json(text: str, at: int, closed: bool) -> bool | None:
    """Whether an object, or a list of objects, follows."""
    seen = text[at : at + LOOK]
    if _JSON.match(seen):
        return True
    undecided = seen[:1] in ("", "[") and not seen[1:].strip() and len(seen) < LOOK
    return None if undecided and not closed else False


def _head(text: str, at: int, closed: bool) -> str | None:
    """The name of the function that a call begins with, or "" if no call does."""
    return _decided(_HEAD, "().=", text[at : at + LOOK], closed)


def _key(text: str, at: int, closed: bool) -> str | None:
    """The name of the argument that begins here, or "" if none does."""
    return _decided(_KEY, "=", text[at : at + LOOK], closed)


def _decided(pattern: re.Pattern[str], marks: str, seen: str, closed: bool) -> str | None:
    """The name that a pattern finds, or "": None as long as more text may make it fit, or make "=" a comparison."""
    found = pattern.match(seen)
    if found and (found.group()[-1] != "=" or closed or found.end() < len(seen)):
        return found.group(1)
    return None if not closed and _may_go_on(seen, marks) else ""


def _may_go_on(seen: str, marks: str) -> bool:
    """Whether all that has come is made of names, white space and these marks."""
    return len(seen) < LOOK and all(char.isalnum() or char in "_- \t\r\n" or char in marks for char in seen)


def _takes_literals(text: str, at: int, closed: bool) -> bool | None:
    """Whether the call that begins here has no arguments, or a literal as the first of them.

    The peers drop a call whose arguments are not all literals, as vLLM does, or all calls beside it too. Behind a first
    literal a call has begun; whatever is no literal there is handed on as its text.
    """
    found = _HEAD.match(text, at, at + LOOK)
    return found is not None and (found.group()[-1] == ")" or is_literal(text, found.end(), closed))


def _begun(text: str, at: int) -> int:
    """Where a call that had only begun when its text was cut ends: no markup is content."""
    return len(text) if _may_go_on(text[at : at + LOOK], "().=") else at


def _after_argument(text: str, at: int, closed: bool) -> bool | None:
    """Whether an argument may end here: another one follows, or the call's end and behind it what may follow a call."""
    seen = text[at : at + LOOK]
    undecided = False if len(seen) == LOOK else closed or None
    rest = seen.lstrip()
    if rest[:1] == ",":
        rest = rest[1:].lstrip()
        key = ")" if rest[:1] == ")" else _key(rest, 0, False)
        return undecided if key is None else bool(key)
    if rest[:1] not in ("", ")"):
        return False
    behind = rest[1:].lstrip()
    if behind[:1] == ",":
        head = _head(behind[1:].lstrip(), 0, False)
        return undecided if head is None else bool(head)
    return behind[0] in "];<" or "\n" in rest[: -len(behind)] if behind else undecided
