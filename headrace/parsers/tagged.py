"""Reads calls that are written as tags, as in <function=NAME><parameter=KEY>VALUE</parameter></function>."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from headrace.parsers.calls import Calls
from headrace.parsers.elements import element_json
from headrace.parsers.events import Content, Event, Steps
from headrace.parsers.json_text import pass_arguments
from headrace.parsers.reader import MAX_NAME, Markers, Reader, collected, markers
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
_NO_ENTITY = re.compile(r"<|&(?!(?:lt|gt|amp|quot|apos|#\d{1,7}|#x[0-9a-fA-F]{1,6});)")
"""what no text in XML has"""
_WRAPPERS = ("arguments", "properties")
"""Parameters that hold all of a call's arguments, where the tool has none of this name."""


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
    xml: bool = False
    """A value may stand in <![CDATA[ and ]]>, or have entities, which are read when it is whole."""
    trimmed: bool = False
    """White space around a value belongs to the markup."""
    lead: str = ""
    """Must stand before the tag of a call of a section; what follows anything else is none."""
    element_mark: str = ""
    """Stands before every tag, where a parameter's tags are its name and a value may be made of elements
    (`elements.py`)."""
    checked: bool = False
    """A call is one only if its closing tag is there, it names a tool that there is, each parameter once, and all that
    are required; so it begins when it is whole. Parameters that the tool does not have are dropped."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read one call, or those of a section."""
        made = False
        begun = opener == self.name_open
        while True:
            if not begun:
                marks = markers(*filter(None, (self.name_open, self.section_close)))
                before, mark = yield from reader.until(marks, limit=MAX_NAME)
                if mark != self.name_open or self.lead not in before:
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
        if not stop or not name or (self.checked and calls.tools and name not in calls.tools):
            return False
        if stop in (self.key_open, self.close):
            reader.back(stop)
        if self.in_attribute and head.endswith("/"):
            yield calls.start(name)
            yield calls.arguments("{}")
            return True
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            made = yield from pass_arguments(reader, calls, name)
            yield from reader.space()
            yield from reader.accept(markers(self.close))
            return made
        tool, seen = calls.tools.get(name), _Seen()
        if not self.checked:
            yield calls.start(name)
            yield from self._arguments(reader, calls, tool, seen)
            return True
        text, _ = yield from collected(reader, self._arguments(reader, calls, tool, seen))
        if not (seen.fits(tool) if seen.closed else reader.cut):
            return False
        yield calls.start(name)
        if text:
            yield calls.arguments(text)
        return True

    def _arguments(self, reader: Reader, calls: Calls, tool: FunctionTool | None, seen: _Seen) -> Steps[None]:
        """Hand on a call's arguments, up to its end."""
        separator = "{"
        while True:
            _, mark = yield from reader.until(self._parts)
            if mark != self.key_open:
                break
            separator, ended = yield from self._parameter(reader, calls, tool, seen, separator)
            if ended:
                mark = ""
                break
        seen.closed = mark == self.close
        if not seen.closed:
            reader.back(mark)
        if mark or not reader.cut:
            yield calls.arguments("{}" if separator == "{" else "}")

    def _parameter(
        self, reader: Reader, calls: Calls, tool: FunctionTool | None, seen: _Seen, separator: str
    ) -> Steps[tuple[str, bool]]:
        """Read a parameter from its name on. Returns what stands before the next one, and whether the text ended."""
        head, stop = yield from reader.until(markers(self.key_close), limit=MAX_NAME)
        if not stop:
            return separator, reader.ended
        if self.element_mark and head.strip()[:1] in ("", "/"):  # a closing tag too many
            return separator, False
        key = self._key(head)
        if self.value_open:
            _, mark = yield from reader.until(markers(self.value_open, self.key_open, self.close))
            if mark != self.value_open:
                reader.back(mark)
                return separator, not mark
        schema = parameters_of(tool)
        if not key or (self.checked and not schema.declares(key)):
            text, stop = yield from reader.until(markers(self.value_close))
            found = _wrapped(text, tool) if key in _WRAPPERS else {}
            for name, written in found.items() if key else [("", "")]:
                seen.keys.append(name)
                yield calls.arguments(f"{separator}{json_string(name)}: {written}")
                separator = ", "
            return separator, not stop
        seen.keys.append(key)
        types, values = schema.member(key).types
        said = _STRING_ATTRIBUTE.search(head) if self.in_attribute else None
        if said and said.group(1) == "true":
            types, values = STRING, ()
        guess = self.guess or bool(said)
        if self.newlines:
            yield from reader.accept(_NEWLINE)
        if self.trimmed:
            yield from reader.space()
        value = _Value(key, tool, self._ends(key, nested=types != STRING))
        has_entities = self.xml
        if self.xml and (yield from reader.accept(_CDATA)):
            value.ends, has_entities = markers("]]>" + self.value_close), False
            yield from reader.space()
        begun = f"{separator}{json_string(key)}: "
        waits = self.xml or (types != STRING and bool(self.element_mark))
        if not waits and (types == STRING or (yield from reader.ahead(partial(_decided, types, guess)))):
            yield calls.arguments(begun + '"')
            whole = yield from self._pass_value(reader, value, lambda text: calls.arguments(json_escaped(text)))
            if whole or not reader.cut:
                yield calls.arguments('"')
            return ", ", not whole
        text, whole = yield from collected(reader, self._pass_value(reader, value, Content))
        if not whole and reader.cut:
            return separator, True
        text = html.unescape(text) if has_entities and not _NO_ENTITY.search(text) else text
        if self.element_mark:
            yield calls.arguments(begun + element_json(self.element_mark, text, schema.member(key)))
        else:
            yield calls.arguments(begun + json_of(text, types, values, guess=guess))
        return ", ", not whole

    def _pass_value(self, reader: Reader, value: _Value, event: Callable[[str], Event]) -> Steps[bool]:
        """Hand on a value up to its end; returns whether the end is there."""
        held = ""

        def up_to_space(text: str) -> Event:
            nonlocal held
            text = held + text
            end = len(text.rstrip()) if self.trimmed else len(text)
            held = text[end:]
            return event(text[:end])

        while True:
            mark = yield from reader.pass_on(value.ends, up_to_space, strict=True)
            if not mark or (yield from self._is_end(reader, value, mark)):
                return bool(mark)
            yield up_to_space(mark)

    def _is_end(self, reader: Reader, value: _Value, mark: str) -> Steps[bool]:
        """Whether a marker within a value ends it.

        A closing tag does if the text goes on as it must after a parameter: a value may speak of such tags. Where the
        closing tag is missing, the call's end does, the section's at the end of the text, or the next parameter's name;
        these are then unread.
        """
        if self.element_mark:
            if mark in (self.close, self.name_open, self.section_close):
                reader.back(mark)
                return True
            value.depth += -1 if mark == self._element("/" + value.key) else 1
            return value.depth == 0
        if mark.endswith(self.value_close):
            following = (*self._parts.all, self.value_close)
            return mark.startswith("]]>") or (
                yield from reader.ahead(lambda text, at, closed: _goes_on(text, at, closed, following))
            )
        reader.back(mark)
        closed_by = mark.removeprefix("\n")
        if closed_by in (self.close, self.section_close):
            after = tuple(filter(None, (self.section_close, self.name_open))) if closed_by == self.close else ()
            ends = yield from reader.ahead(lambda text, at, closed: _goes_on(text, at + len(mark), closed, after))
        else:
            ends = yield from reader.ahead(
                lambda text, at, closed: self._begins_parameter(text, at, closed, mark, value.tool)
            )
        if not ends:
            yield from reader.scan(lambda _, at: at + len(mark))
        return ends

    def _begins_parameter(self, text: str, at: int, closed: bool, mark: str, tool: FunctionTool | None) -> bool | None:
        """Whether this mark is followed by the name of a parameter that the tool has, and its tag ends. Within a line
        the tool's schema must name it."""
        begin = at + len(mark)
        end = text.find(self.key_close, begin, begin + MAX_NAME)
        if end < 0:
            return False if closed or len(text) - begin >= MAX_NAME else None
        key, schema = self._key(text[begin:end]), parameters_of(tool)
        return bool(key) and (schema.declares(key) if mark[0] == "\n" else bool(schema.member(key).schemas))

    def _name(self, head: str) -> str:
        """The name of the function that stands in a tag, "" if there is none."""
        if self.in_attribute:
            return _name_attribute(head)
        head = head.strip()
        return head if _NAME.fullmatch(head) else ""

    def _key(self, head: str) -> str:
        """The name of the parameter that stands in a tag, "" if there is none."""
        return _name_attribute(head) if self.in_attribute and not self.element_mark else head.strip()

    def _element(self, name: str) -> str:
        """The tag of an element."""
        return f"{self.element_mark}<{name}>"

    @cached_property
    def _parts(self) -> Markers:
        """What may follow a name or a parameter."""
        return markers(*filter(None, (self.key_open, self.close, self.name_open, self.section_close)))

    def _ends(self, key: str, *, nested: bool) -> Markers:
        """What may end a parameter's value; with `nested`, within which there may be elements of the same name."""
        if self.element_mark:
            tags = (self._element(f"/{key}"), self._element(key)) if nested else (self._element(f"/{key}"),)
            return Markers(*tags, self.close, self.name_open, self.section_close)
        ends = [self.value_close, self.close, *filter(None, [self.section_close])]
        if self.newlines:
            ends += ["\n" + end for end in ends]
        return markers(*ends, self.key_open, "\n" + self.key_open)


@dataclass
class _Seen:
    """Holds what was seen of a call: the names of its parameters, as often as they are there, and whether it ended."""

    keys: list[str] = field(default_factory=list)
    closed: bool = False

    def fits(self, tool: FunctionTool | None) -> bool:
        """Return whether these are the parameters of a call of this tool."""
        required = tool.parameters.get("required") if tool else None
        needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
        return len(set(self.keys)) == len(self.keys) and "" not in self.keys and needed <= set(self.keys)


@dataclass
class _Value:
    """Describes the value that is being read: of which parameter, and what may end it."""

    key: str
    tool: FunctionTool | None
    ends: Markers
    depth: int = 1
    """Of elements with the parameter's name, how many are open."""


def _name_attribute(head: str) -> str:
    """The attribute `name` of a tag, "" if it has none."""
    found = _NAME_ATTRIBUTE.search(head)
    return next((part for part in found.groups() if part), "").strip() if found else ""


def _wrapped(text: str, tool: FunctionTool | None) -> dict[str, str]:
    """The JSON of each of a tool's parameters that an object holds."""
    schema, found = parameters_of(tool), {}
    members = json.loads(json_of(text, frozenset({"object"})))
    for name, value in members.items() if isinstance(members, dict) else ():
        if schema.declares(name):
            types, values = schema.member(name).types
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found[name] = json_of(written, types, values, guess=True)
    return found


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
