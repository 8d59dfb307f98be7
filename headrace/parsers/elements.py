"""Reads calls whose arguments are elements named like the parameters, as MiniMax-M3 writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.parsers.calls import Calls
from headrace.parsers.events import Arguments, Steps
from headrace.parsers.reader import MAX_NAME, Markers, Reader, markers
from headrace.parsers.scalars import json_escaped, json_string
from headrace.parsers.tagged import name_attribute
from headrace.parsers.tools import FunctionTool
from headrace.parsers.typed_values import STRING, ValueSchema, json_of, parameters_of

MAX_DEPTH = 64
"""Elements within elements; what is deeper is text."""
_LESS, _TAG_END = Markers("<"), Markers(">", "<")
_ITEM, _TEXT = "item", "$text"


class Tag(NamedTuple):
    """Holds what follows a mark."""

    inside: str
    """What stands between < and >; "" if there is no tag."""
    text: str
    """All that was read, as it was written."""


@dataclass(frozen=True)
class ElementCalls:
    """Describes calls of the form MARK<invoke name="NAME">MARK<KEY>value MARK</KEY>MARK</invoke>, in a section.

    Only what stands behind the mark is a tag. An object is the elements of its members, an array an element for each
    item, and everything else is text as it stands, whose type comes from the tool's schema. What is a string for
    certain is handed on as it comes, any other argument when it is whole.
    """

    mark: str
    section: str = "tool_call"
    call: str = "invoke"

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read the calls of a section, or one without a section, up to its end. An end alone is left out."""
        begun, in_section = calls.count, False
        tag: Tag | None = yield from self._tag(reader)
        while tag and tag.inside != f"/{self.section}":
            name = self._called(tag)
            if name:
                in_section = True
                tag = yield from self._call(reader, calls, name)
                continue
            if tag.inside == self.section:
                in_section = True
            elif not in_section:
                return False
            _, mark = yield from reader.until(markers(self.mark), limit=MAX_NAME)
            tag = (yield from self._tag(reader)) if mark else None
        return tag is not None or calls.count > begun

    def _tag(self, reader: Reader) -> Steps[Tag]:
        """Read the tag behind a mark, that was read."""
        space = yield from reader.space()
        if not (yield from reader.accept(_LESS)):
            return Tag("", space)
        inside, end = yield from reader.until(_TAG_END, limit=MAX_NAME)
        if end != ">":
            reader.back(end)
            return Tag("", f"{space}<{inside}")
        return Tag(inside.strip(), f"{space}<{inside}>")

    def _next(self, reader: Reader) -> Steps[Tag | None]:
        """Read up to the next mark, and the tag behind it; None at the end of the text."""
        _, mark = yield from reader.until(markers(self.mark))
        return (yield from self._tag(reader)) if mark else None

    def _called(self, tag: Tag) -> str:
        """The name of the function that a tag begins a call of, or ""."""
        word, _, rest = tag.inside.partition(" ")
        return name_attribute(rest) if word == self.call else ""

    def _ends_call(self, tag: Tag) -> bool:
        """Whether a call ends at this tag: its own end, the section's, or what begins another."""
        return tag.inside in (f"/{self.call}", f"/{self.section}", self.section) or bool(self._called(tag))

    def _call(self, reader: Reader, calls: Calls, name: str) -> Steps[Tag | None]:
        """Read a call from its name on; returns the tag behind it, None at the end of the text."""
        yield calls.start(name)
        separator = "{"
        tag = yield from self._next(reader)
        while tag and not self._ends_call(tag):
            if tag.inside and not tag.inside.startswith("/"):
                yield calls.arguments(f"{separator}{json_string(tag.inside)}: ")
                separator = ", "
                tag = yield from self._argument(reader, calls, calls.tools.get(name), tag.inside)
            else:
                tag = yield from self._next(reader)
        if tag or not reader.cut:
            yield calls.arguments("{}" if separator == "{" else "}")
        if tag and tag.inside == f"/{self.call}":
            return (yield from self._next(reader))
        return tag

    def _argument(self, reader: Reader, calls: Calls, tool: FunctionTool | None, key: str) -> Steps[Tag | None]:
        """Hand on a value, whose tag was read; returns the tag behind it."""
        schema = parameters_of(tool).member(key)
        if schema.types[0] == STRING:
            tag = yield from self._pass_text(reader, calls, key)
        else:
            tag = yield from self._collect(reader, calls, _Element(key, schema))
        if tag and tag.inside == f"/{key}":
            return (yield from self._next(reader))
        return tag

    def _pass_text(self, reader: Reader, calls: Calls, key: str) -> Steps[Tag | None]:
        """Hand on a string up to its end; returns the tag that is there."""

        def event(text: str) -> Arguments:
            return calls.arguments(json_escaped(text))

        yield calls.arguments('"')
        while True:
            mark = yield from reader.pass_on(markers(self.mark), event, strict=True)
            tag = (yield from self._tag(reader)) if mark else None
            if (not tag or not tag.inside) and reader.cut and reader.ended:
                return None
            if not tag or tag.inside == f"/{key}" or self._ends_call(tag):
                yield calls.arguments('"')
                return tag
            yield event(mark + tag.text)

    def _collect(self, reader: Reader, calls: Calls, outer: _Element) -> Steps[Tag | None]:
        """Read an element up to its end, and hand on its value; returns the tag that is there."""
        path = [outer]
        while True:
            text, mark = yield from reader.until(markers(self.mark))
            path[-1].texts.append(text)
            tag = (yield from self._tag(reader)) if mark else None
            if (not tag or not tag.inside) and reader.cut and reader.ended:
                return None
            if not tag or self._ends_call(tag):
                break
            if tag.inside.startswith("/"):
                ended = [place for place, element in enumerate(path) if element.name == tag.inside[1:]]
                if ended and not ended[-1]:
                    break
                _close(path, ended[-1] if ended else len(path))
            elif tag.inside and len(path) < MAX_DEPTH:
                path.append(_Element(tag.inside, path[-1].schema_of(tag.inside)))
            else:
                path[-1].texts.append(mark + tag.text)
        _close(path, 1)
        yield calls.arguments(outer.json())
        return tag


@dataclass
class _Element:
    """One element of an argument, as far as it was read."""

    name: str
    schema: ValueSchema
    texts: list[str] = field(default_factory=list)
    members: list[tuple[str, str]] = field(default_factory=list)
    """Name and JSON of the elements within it."""

    def schema_of(self, name: str) -> ValueSchema:
        """Return what is said of an element that comes next within it."""
        member = self.schema.member(name)
        return member if member.schemas else self.schema.item(len(self.members))

    def json(self) -> str:
        """Return its value: of the elements within it, or of its text."""
        types, values = self.schema.types
        text = "".join(self.texts)
        if not self.members:
            empty = "" if text.strip() or "string" in types else "{}" if "object" in types else "[]"
            if empty and types & {"object", "array"}:
                return empty
            return json_of(text, types, values, guess=bool(self.schema.schemas))
        # The schema says if it is an array; else the name that the chat template gives to items does.
        is_array = "array" in types if len(types & {"array", "object"}) == 1 else {_ITEM} == {*dict(self.members)}
        if is_array:
            return _array([value for _, value in self.members])
        found: dict[str, list[str]] = {}
        for name, value in self.members:
            found.setdefault(name, []).append(value)
        if text.strip():
            found.setdefault(_TEXT, []).append(json_string(text))
        pairs = (f"{json_string(name)}: {some[0] if len(some) == 1 else _array(some)}" for name, some in found.items())
        return f"{{{', '.join(pairs)}}}"


def _array(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


def _close(path: list[_Element], place: int) -> None:
    """End the element at this place of a path, and those within it."""
    while len(path) > place:
        closed = path.pop()
        path[-1].members.append((closed.name, closed.json()))
