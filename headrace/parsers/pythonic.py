"""Calls written as Python does, as in [get_weather(city='Paris', days=3)]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.json_calls import JsonCalls
from headrace.parsers.literals import collected, literal
from headrace.parsers.reader import Reader, markers
from headrace.parsers.scalars import json_string

LOOK = 256
"""Characters that are looked at ahead, to tell a call from other text and a closing quote from an inner one."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w-]*(?:\.[^\W\d][\w-]*)*")
_HEAD = re.compile(rf"({_NAME.pattern})\s*\(\s*(?:\)|[^\W\d]\w*\s*=(?!=))")
_KEY = re.compile(r"([^\W\d]\w*)\s*=(?!=)")
_JSON = re.compile(r"\[?\s*\{")


@dataclass(frozen=True)
class PythonicCalls:
    """Calls with named arguments, one after another or in a list. Values are literals of Python or of JSON."""

    closers: tuple[str, ...] = ()
    """Markup that ends the section of calls; the first is the one to write."""
    in_list: bool = True
    """Brackets stand around the calls; both forms are read."""
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
            name = yield from reader.ahead(_head)
            if not name or (opener == "[" and not made and calls.tools and name not in calls.tools):
                break
            yield from _skip(reader, len(name))
            yield calls.start(name)
            yield from _arguments(reader, calls)
            made = True
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
        yield from reader.space()
        mark = yield from reader.accept(markers(",", ")", "]", "}"))
        if mark == ",":
            continue
        if mark in ("]", "}"):  # the parenthesis is missing
            reader.back(mark)
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
    if mark or not reader.cut:
        yield calls.arguments("{}" if separator == "{" else "}")


def _skip(reader: Reader, length: int) -> Steps[str]:
    """Read so many characters, which have come."""
    return reader.scan(lambda _, at: at + length)


def _is_json(text: str, at: int, closed: bool) -> bool | None:
    """Whether an object, or a list of objects, follows."""
    if _JSON.match(text, at, at + LOOK):
        return True
    undecided = text[at : at + 1] in ("", "[") and not text[at + 1 : at + LOOK].strip()
    return None if undecided and not closed and len(text) - at < LOOK else False


def _head(text: str, at: int, closed: bool) -> str | None:
    """The name of the function that a call begins with, or "" if no call does."""
    found = _HEAD.match(text, at, at + LOOK)
    if found and (text[found.end() - 1] != "=" or closed or found.end() < len(text)):
        return found.group(1)
    return None if _may_go_on(text, at, closed, "().=") else ""


def _key(text: str, at: int, closed: bool) -> str | None:
    """The name of the argument that begins here, or "" if none does."""
    found = _KEY.match(text, at, at + LOOK)
    if found and (closed or found.end() < len(text)):
        return found.group(1)
    return None if _may_go_on(text, at, closed, "=") else ""


def _may_go_on(text: str, at: int, closed: bool, marks: str) -> bool:
    """Whether all that has come is made of names, white space and these marks, so that more may complete it."""
    if closed or len(text) - at >= LOOK:
        return False
    return all(char.isalnum() or char in "_- \t\r\n" or char in marks for char in text[at:])


def _after_argument(text: str, at: int, closed: bool) -> bool | None:
    """Whether an argument may end here: another one follows, or the call's end and behind it what may follow a call."""
    limit = at + LOOK
    at = _space(text, at)
    undecided = None if not closed and at < limit else closed
    if at >= len(text):
        return undecided
    if text[at] == ",":
        at = _space(text, at + 1)
        if at < len(text) and text[at] == ")":
            return True
        key = _key(text, at, closed)
        return undecided if at >= len(text) else key if key is None else bool(key)
    if text[at] != ")":
        return False
    begin = at + 1
    at = _space(text, begin)
    if at >= len(text):
        return undecided
    if text[at] == ",":
        at = _space(text, at + 1)
        head = _head(text, at, closed)
        return undecided if at >= len(text) else head if head is None else bool(head)
    return text[at] in "];<" or "\n" in text[begin:at]


def _space(text: str, at: int) -> int:
    """Where the white space from here on ends."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
