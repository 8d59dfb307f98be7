"""Calls written as JSON objects with a name and arguments."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.parsers.arguments import collect_arguments, pass_arguments
from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.json_text import as_string, collect_json
from headrace.parsers.reader import MAX_NAME, Markers, Reader, markers

_OPEN = Markers("{", "[")
_OBJECT = Markers("{")
_NEXT = Markers(",", ";")
_COLON = Markers(":")
_MEMBER = Markers("}", ",")
_LIST = Markers(",", "]")


@dataclass(frozen=True)
class JsonCalls:
    """One object for each call: a single one, several after one another, or a list of them."""

    name_keys: tuple[str, ...] = ("name",)
    """Keys of the function's name; the first is the one to write."""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    """Keys of the arguments; the first is the one to write."""
    before: tuple[str, ...] = ()
    """Markup that may stand between opener and JSON."""
    closers: tuple[str, ...] = ()
    """Markup that ends the call or the list; the first is the one to write."""
    name_is_key: bool = False
    """An object is {NAME: ARGUMENTS}."""
    bare: tuple[str, ...] = ("{", "[")
    """Openers that other JSON may follow too. A call behind one has a name, which is that of a tool where tools are
    known, and arguments, and its first members are those of a call."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read calls until something else comes."""
        begun = opener[-1:]
        if begun not in _OPEN.all:
            yield from reader.space()
            while self.before and (yield from reader.accept(markers(*self.before))):
                yield from reader.space()
            begun = yield from reader.accept(_OPEN)
        if not begun:
            return False
        bare = opener in self.bare
        made = yield from (self._list(reader, calls, bare) if begun == "[" else self._objects(reader, calls, bare))
        if made and self.closers:
            yield from reader.space()
            yield from reader.accept(markers(*self.closers))
        return made

    def _objects(self, reader: Reader, calls: Calls, bare: bool) -> Steps[bool]:
        """Read objects after one another; "{" of the first was read."""
        made = False
        while (yield from self._object(reader, calls, bare)):
            made = True
            yield from reader.space()
            yield from reader.accept(_NEXT)
            yield from reader.space()
            if not (yield from reader.accept(_OBJECT)):
                break
        return made

    def _list(self, reader: Reader, calls: Calls, bare: bool) -> Steps[bool]:
        """Read the rest of a list."""
        made = False
        while True:
            yield from reader.space()
            if not (yield from reader.accept(_OBJECT)) or not (yield from self._object(reader, calls, bare)):
                return made
            made = True
            yield from reader.space()
            if (yield from reader.accept(_LIST)) != ",":
                return made

    def _object(self, reader: Reader, calls: Calls, bare: bool) -> Steps[bool]:
        """Read the rest of one call's object; returns whether a call began.

        Arguments that come before the name wait for it. The call may lie in a member "function", as in OpenAI's form.
        """
        name, held, levels = "", "", 1
        made = False
        while levels:
            yield from reader.space()
            while (mark := (yield from reader.accept(_MEMBER))) == ",":
                yield from reader.space()
            if mark:
                levels -= 1
                continue
            key = yield from self._key(reader)
            if key is None:
                return made
            follows = yield from reader.peek()
            if self.name_is_key and not made:
                made = yield from pass_arguments(reader, calls, key)
                if not made:
                    return False
            elif key == "function" and follows == "{" and levels == 1:
                yield from reader.accept(_OBJECT)
                levels += 1
            elif (key in self.name_keys or (key == "function" and follows == '"')) and not name:
                name = as_string((yield from collect_json(reader))) or ""
                if not self._is_name(name, calls, bare):
                    return False
                if held:
                    yield calls.start(name)
                    yield calls.arguments(held)
                    made = True
            elif key in self.argument_keys and not (made or held):
                if name:
                    made = yield from pass_arguments(reader, calls, name)
                else:
                    held = (yield from collect_arguments(reader)) or ""
                if not (made or held):
                    return False
            elif (bare and key not in ("type", "id")) or (yield from collect_json(reader)) is None:
                return made
        if name and not made and not bare:
            yield calls.start(name)
            yield calls.arguments("{}")
            made = True
        return made

    def _key(self, reader: Reader) -> Steps[str | None]:
        """Read a member's key, its colon and the white space around; None if there is none."""
        if (yield from reader.peek()) != '"':
            return None
        key = as_string((yield from collect_json(reader)))
        yield from reader.space()
        if not (yield from reader.accept(_COLON)):
            return None
        yield from reader.space()
        return key

    def _is_name(self, name: str, calls: Calls, bare: bool) -> bool:
        """Whether this can be the name of a function here."""
        return bool(name) and len(name) <= MAX_NAME and (not bare or not calls.tools or name in calls.tools)
