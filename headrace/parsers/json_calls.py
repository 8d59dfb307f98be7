"""Reads calls that are written as JSON objects with a name and arguments."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.json_text import as_string, collect_arguments, collect_json, pass_arguments
from headrace.parsers.reader import MAX_NAME, Markers, Reader, markers

_OPEN = Markers("{", "[")
_OBJECT = Markers("{")
_NEXT = Markers(",", ";")
_COLON = Markers(":")
_MEMBER = Markers("}", ",")
_LIST = Markers(",", "]")


@dataclass(frozen=True)
class JsonCalls:
    """Describes calls of one object each: a single one, several after one another, or a list of them."""

    name_keys: tuple[str, ...] = ("name",)
    """Keys of the function's name."""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    """Keys of the arguments."""
    before: tuple[str, ...] = ()
    """Markup that may stand between opener and JSON."""
    closers: tuple[str, ...] = ()
    """Markup that ends the call or the list."""
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
        """Read the rest of one call's object; returns whether a call began."""
        call = _Object()
        while call.levels:
            yield from reader.space()
            while (mark := (yield from reader.accept(_MEMBER))) == ",":
                yield from reader.space()
            if mark:
                call.levels -= 1
            elif not (yield from self._member(reader, calls, call, bare)):
                cut_short = bare and call.name in calls.tools and reader.ended and reader.cut
                return call.made or cut_short
        if call.name and not call.made and not bare:
            yield from call.begin(calls, "{}")
        return call.made

    def _member(self, reader: Reader, calls: Calls, call: _Object, bare: bool) -> Steps[bool]:
        """Read one member; returns whether the object may still be a call's, or is one."""
        key = yield from self._key(reader)
        if key is None:
            return False
        follows = yield from reader.peek()
        if self.name_is_key and not call.made:
            call.made = yield from pass_arguments(reader, calls, key)
            return call.made
        if key == "function" and follows == "{" and call.levels == 1:
            yield from reader.accept(_OBJECT)
            call.levels += 1
            return True
        if (key in self.name_keys or (key == "function" and follows == '"')) and not call.name:
            name = as_string((yield from collect_json(reader))) or ""
            if not _is_name(name, calls, bare):
                return False
            call.name = name
            if call.held:
                yield from call.begin(calls, call.held)
            return True
        if key in self.argument_keys and not (call.made or call.held):
            if bare and follows != "{":
                return False
            if call.name:
                call.made = yield from pass_arguments(reader, calls, call.name)
            else:
                call.held = (yield from collect_arguments(reader)) or ""
            return bool(call.made or call.held)
        if bare and key not in ("type", "id"):
            return False
        return (yield from collect_json(reader)) is not None

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


@dataclass
class _Object:
    """One call's object, as far as it was read. The call may lie in a member "function", as in OpenAI's form."""

    name: str = ""
    held: str = ""
    """Arguments that came before the name."""
    made: bool = False
    """The call began."""
    levels: int = 1

    def begin(self, calls: Calls, arguments: str) -> Steps[None]:
        """Begin the call with all of its arguments."""
        self.made = True
        yield calls.start(self.name)
        yield calls.arguments(arguments)


def _is_name(name: str, calls: Calls, bare: bool) -> bool:
    """Whether this can be the name of a function here."""
    known = not bare or not calls.tools or name in calls.tools
    return known and 0 < len(name) <= MAX_NAME and name.isprintable()
