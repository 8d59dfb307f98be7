"""Reads calls that are written as tags, as in <function=NAME><parameter=KEY>VALUE</parameter></function>."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from headrace.parsers.arguments import pass_arguments
from headrace.parsers.calls import Calls
from headrace.parsers.events import Arguments, Steps
from headrace.parsers.reader import MAX_NAME, Markers, Reader, markers
from headrace.parsers.scalars import json_escaped, json_string
from headrace.parsers.tools import FunctionTool
from headrace.parsers.typed_values import STRING, is_text, json_of, parameters_of

_NAME = re.compile(r"[^\s{}\[\]()<>\"'`|=]+")
_NAME_ATTRIBUTE = re.compile(r"""name\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'/]+))""")
_STRING_ATTRIBUTE = re.compile(r"""string\s*=\s*["']?(true|false)""")
_SPACE = re.compile(r"(?:\s|\\n)*")
_BEGINNING = re.compile(r"[^<\n]{0,5}")
_NEWLINE = markers("\n")
_CDATA = markers("<![CDATA[")


@dataclass(frozen=True)
class TaggedCalls:
    """Describes calls of a tag with the function's name, a tag for each parameter, and values up to closing tags.

    A value is taken as it stands: markup in it and entities are text. Its type comes from the tool's schema. A value
    that is a string for certain is handed on as it comes, any other when it is whole.
    """

    name_open: str
    """Markup before a function's name."""
    close: str
    """Markup that ends a call."""
    key_open: str
    """Markup before a parameter's name."""
    value_close: str
    """Markup that ends a value."""
    name_close: tuple[str, ...] = (">",)
    """Markup after a function's name; what begins or ends something else is not part of the name's own markup."""
    key_close: str = ">"
    """Markup after a parameter's name."""
    value_open: str = ""
    """Markup before a value."""
    section_close: str = ""
    """Markup that ends a section of calls; "" where each call stands alone."""
    in_attribute: bool = False
    """Names stand in an attribute, as in <parameter name="KEY" string="true">; `string` says if the value is one."""
    newlines: bool = False
    """One line break after a value's opening and one before its closing belong to the markup."""
    guess: bool = False
    """A value whose type no schema says is JSON, or a Python literal, if it looks like one; otherwise a string."""
    cdata: bool = False
    """A value may stand in <![CDATA[ and ]]>."""
    only_known: bool = False
    """Where tools are known, only their names are calls; parameters that the tool does not have are dropped."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read one call, or those of a section."""
        made = False
        begun = opener == self.name_open
        while True:
            if not begun:
                marks = markers(self.name_open, self.section_close) if self.section_close else markers(self.name_open)
                _, mark = yield from reader.until(marks, limit=MAX_NAME)
                if mark != self.name_open:
                    return made
            if not (yield from self._call(reader, calls)):
                return made
            if not self.section_close:
                return True
            made, begun = True, False

    def _call(self, reader: Reader, calls: Calls) -> Steps[bool]:
        """Read a call from its name on; returns whether it is one."""
        yield from reader.space()
        head, stop = yield from reader.until(markers(*self.name_close), limit=MAX_NAME)
        name = self._name(head)
        if not stop or not name or (self.only_known and calls.tools and name not in calls.tools):
            return False
        if stop in (self.key_open, self.close):
            reader.back(stop)
        empty = self.in_attribute and head.endswith("/")
        if not empty:
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                made = yield from pass_arguments(reader, calls, name)
                yield from reader.space()
                yield from reader.accept(markers(self.close))
                return made
        yield calls.start(name)
        tool = calls.tools.get(name)
        separator = "{"
        ended = empty
        while not ended:
            _, mark = yield from reader.until(self._parts)
            if mark != self.key_open:
                if mark != self.close:
                    reader.back(mark)
                if not mark and reader.cut:
                    return True
                break
            separator, ended = yield from self._parameter(reader, calls, tool, separator)
            if ended and reader.cut:
                return True
        yield calls.arguments("{}" if separator == "{" else "}")
        return True

    def _parameter(
        self, reader: Reader, calls: Calls, tool: FunctionTool | None, separator: str
    ) -> Steps[tuple[str, bool]]:
        """Read a parameter from its name on. Returns what stands before the next one, and whether the text ended."""
        head, stop = yield from reader.until(markers(self.key_close), limit=MAX_NAME)
        if not stop:
            return separator, reader.ended
        key = self._name(head) if self.in_attribute else head.strip()
        if self.value_open:
            _, mark = yield from reader.until(markers(self.value_open, self.key_open, self.close))
            if mark != self.value_open:
                reader.back(mark)
                return separator, not mark
        if not key or (self.only_known and not parameters_of(tool).declares(key)):
            _, stop = yield from reader.until(markers(self.value_close))
            return separator, not stop
        types, values = parameters_of(tool).member(key).types
        said = _STRING_ATTRIBUTE.search(head) if self.in_attribute else None
        if said and said.group(1) == "true":
            types, values = STRING, ()
        guess = self.guess or bool(said)
        if self.newlines:
            yield from reader.accept(_NEWLINE)
        ends = self._ends
        if self.cdata and (yield from reader.accept(_CDATA)):
            ends = markers("]]>" + self.value_close)
        begun = f"{separator}{json_string(key)}: "
        if types == STRING or (yield from reader.ahead(lambda *place: _decided(types, guess, *place))):
            yield calls.arguments(begun + '"')
            whole = yield from self._pass_text(reader, calls, tool, ends)
            if whole or not reader.cut:
                yield calls.arguments('"')
        else:
            text, whole = yield from self._collect(reader, tool, ends)
            if not whole and reader.cut:
                return separator, True
            yield calls.arguments(begun + json_of(text, types, values, guess=guess))
        return ", ", not whole

    def _pass_text(self, reader: Reader, calls: Calls, tool: FunctionTool | None, ends: Markers) -> Steps[bool]:
        """Hand on a string up to its end; returns whether the end is there."""

        def event(text: str) -> Arguments:
            return calls.arguments(json_escaped(text))

        while True:
            mark = yield from reader.pass_on(ends, event, strict=True)
            if not mark or (yield from self._is_end(reader, tool, mark)):
                return bool(mark)
            yield event(mark)

    def _collect(self, reader: Reader, tool: FunctionTool | None, ends: Markers) -> Steps[tuple[str, bool]]:
        """Read a value up to its end; returns it and whether the end is there."""
        parts = []
        while True:
            text, mark = yield from reader.until(ends)
            parts.append(text)
            if not mark or (yield from self._is_end(reader, tool, mark)):
                return "".join(parts), bool(mark)
            parts.append(mark)

    def _is_end(self, reader: Reader, tool: FunctionTool | None, mark: str) -> Steps[bool]:
        """Whether a marker within a value ends it.

        A closing tag does if the text goes on as it must after a parameter: a value may speak of such tags. Where the
        closing tag is missing, the call's end does, or the next parameter's name; these are then unread.
        """
        if mark.endswith(self.value_close):
            return mark.startswith("]]>") or (yield from reader.ahead(self._ends_parameter))
        reader.back(mark)
        if mark.endswith(self.close):
            ends = yield from reader.ahead(lambda text, at, closed: self._ends_call(text, at + len(mark), closed))
        else:
            ends = yield from reader.ahead(
                lambda text, at, closed: self._begins_parameter(text, at + len(mark), closed, tool)
            )
        if not ends:
            yield from reader.scan(lambda _, at: at + len(mark))
        return ends

    def _ends_parameter(self, text: str, at: int, closed: bool) -> bool | None:
        """Whether the text goes on as it must after a parameter."""
        return _goes_on(text, at, closed, (*self._parts.all, self.value_close))

    def _ends_call(self, text: str, at: int, closed: bool) -> bool | None:
        """Whether the text goes on as it must after a call: with the section's end, another call, or not at all."""
        return _goes_on(text, at, closed, (self.section_close or self.name_open,))

    def _begins_parameter(self, text: str, at: int, closed: bool, tool: FunctionTool | None) -> bool | None:
        """Whether the name of a parameter that the tool has goes on from here, and its tag ends."""
        end = text.find(self.key_close, at, at + MAX_NAME)
        if end < 0:
            return False if closed or len(text) - at >= MAX_NAME else None
        key = self._name(text[at:end]) if self.in_attribute else text[at:end].strip()
        return bool(key) and parameters_of(tool).declares(key)

    def _name(self, head: str) -> str:
        """The name that stands in a tag, "" if there is none."""
        if self.in_attribute:
            return name_attribute(head)
        head = head.strip()
        return head if _NAME.fullmatch(head) else ""

    @cached_property
    def _parts(self) -> Markers:
        """What may follow a name or a parameter."""
        parts = (self.key_open, self.close, self.name_open, self.section_close)
        return markers(*filter(None, parts))

    @cached_property
    def _ends(self) -> Markers:
        """What may end a value."""
        ends = [self.value_close, self.close]
        if self.newlines:
            ends += ["\n" + end for end in ends]
        return markers(*ends, "\n" + self.key_open)


def name_attribute(head: str) -> str:
    """Return the attribute `name` of a tag, "" if it has none."""
    found = _NAME_ATTRIBUTE.search(head)
    return next((part for part in found.groups() if part), "").strip() if found else ""


def _goes_on(text: str, at: int, closed: bool, following: tuple[str, ...]) -> bool | None:
    """Whether one of these follows, behind white space (which some models escape), or nothing."""
    found = _SPACE.match(text, at, at + MAX_NAME)
    rest = text[found.end() if found else at :][:MAX_NAME]
    if rest.startswith(following):
        return True
    begun = any(begin.startswith(rest) for begin in following) or "\\n".startswith(rest)
    return begun and (closed or None)


def _decided(types: frozenset[str], guess: bool, text: str, at: int, closed: bool) -> bool | None:
    """Whether the value that begins here is a string for certain."""
    found = _BEGINNING.match(text, at)
    beginning = found.group() if found else ""
    if len(beginning) < 5 and at + len(beginning) == len(text) and not closed:
        return None
    return is_text(beginning, types, guess=guess)
