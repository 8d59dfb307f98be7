"""Reads calls that are written as a name, a separator and arguments in JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.json_calls import JsonCalls
from headrace.parsers.json_text import pass_arguments
from headrace.parsers.reader import MAX_NAME, Reader, markers

_NAME = re.compile(r"[^\s{}\[\]()<>\"'`|]+")
_NUMBERED = re.compile(r"(?:functions\.)?(.+?):\d+")


@dataclass(frozen=True)
class NamedCalls:
    """Describes calls of the form NAME, separator, {arguments}: each between markup, several in a section or not."""

    separators: tuple[str, ...]
    """What stands between name and arguments; "{" stands for nothing."""
    begin: tuple[str, ...] = ()
    """Markup that begins each call of a section; such an opener begins a call without a section."""
    prefix: tuple[str, ...] = ()
    """Markup before the name, which may be missing."""
    fences: tuple[str, ...] = ()
    """What may stand before and behind the arguments."""
    end: tuple[str, ...] = ()
    """Markup that ends each call."""
    closers: tuple[str, ...] = ()
    """Markup that ends the section."""
    id_separator: str = ""
    """Stands between the name and an id, where the model writes one."""
    numbered: bool = False
    """The name is written functions.NAME:INDEX, which is also the call's id."""
    or_json: JsonCalls | None = None
    """How calls are written where "[" or "{" follows the opener."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read calls until something else comes."""
        if self.or_json:
            yield from reader.space()
            if (yield from reader.peek()) in ("[", "{"):
                return (yield from self.or_json.read(reader, calls, opener))
        made = False
        in_section = bool(self.begin) and opener not in self.begin
        while True:
            if in_section or made:
                if not self.begin:
                    return made
                yield from reader.space()
                mark = yield from reader.accept(markers(*self.begin, *self.closers))
                if mark not in self.begin:
                    return made or mark in self.closers
            if not (yield from self._call(reader, calls)):
                return made
            made = True

    def _call(self, reader: Reader, calls: Calls) -> Steps[bool]:
        """Read one call from its name on."""
        if self.prefix:
            yield from reader.accept(markers(*self.prefix))
        stops = (*self.separators, self.id_separator) if self.id_separator else self.separators
        head, stop = yield from reader.until(markers(*stops), limit=MAX_NAME)
        id: str | None = None
        if stop and stop == self.id_separator:
            id, stop = yield from reader.until(markers(*self.separators), limit=MAX_NAME)
        if stop == "{":
            reader.back(stop)
        name = head.strip()
        if self.numbered:
            name, id = _numbered(name)
        if not stop or not _NAME.fullmatch(name):
            return False
        yield from reader.space()
        if self.fences and (yield from reader.accept(markers(*self.fences))):
            yield from reader.space()
        if self.end and (yield from reader.accept(markers(*self.end))):  # no arguments at all
            yield calls.start(name, id)
            yield calls.arguments("{}")
            return True
        if not (yield from pass_arguments(reader, calls, name, id)):
            return False
        yield from reader.space()
        if self.fences and (yield from reader.accept(markers(*self.fences))):
            yield from reader.space()
        if self.end:
            yield from reader.accept(markers(*self.end))
        return True


def _numbered(head: str) -> tuple[str, str | None]:
    """Name and id of functions.NAME:INDEX. A head of any other form is the name, less the prefix, and has no id."""
    found = _NUMBERED.fullmatch(head)
    if found:
        return found.group(1), head if head.startswith("functions.") else None
    return head.removeprefix("functions."), None
