"""Calls as Gemma writes them: call:NAME{key:<|"|>text<|"|>,count:3,list:[1,2]}."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.literals import MAX_DEPTH, close, past_commas
from headrace.parsers.reader import MAX_NAME, Reader, markers
from headrace.parsers.scalars import json_escaped, json_scalar, json_string
from headrace.parsers.typed_values import ValueSchema, json_of, parameters_of

_NAME = re.compile(r"[^\s{}\[\]()<>\"'`|:]+")
_NULLS = ("null", "none", "nil")


@dataclass(frozen=True)
class GemmaCalls:
    """Describes calls of a name and an object with bare keys, whose strings stand between marks of their own."""

    quote: str
    """Stands before and behind a string."""
    closers: tuple[str, ...]
    """Markup that ends a call."""
    thought: tuple[str, str] = ("", "")
    """Markup around a thought, which is left out where no reasoning is read: its opening is an opener too."""
    guess: bool = False
    """An argument between quotes whose type no schema says is JSON, or a Python literal, if it looks like one."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read one call."""
        if opener == self.thought[0]:
            _, stop = yield from reader.until(markers(self.thought[1]))
            return bool(stop)
        yield from reader.space()
        if not (yield from reader.accept(markers("call:"))):
            return False
        head, stop = yield from reader.until(markers("{", *self.closers), limit=MAX_NAME)
        name = head.strip()
        if stop != "{" or not _NAME.fullmatch(name):
            return False
        yield calls.start(name)
        yield from self._object(reader, calls, parameters_of(calls.tools.get(name)), 0)
        yield from reader.space()
        yield from reader.accept(markers(*self.closers))
        return True

    def _object(self, reader: Reader, calls: Calls, schema: ValueSchema, depth: int) -> Steps[None]:
        """Hand on an object, whose opening brace was read."""
        separator = "{"
        while True:
            mark = yield from past_commas(reader, markers(",", "}", "]", *self.closers))
            if mark or reader.ended:
                break
            key, stop = yield from self._key(reader)
            if stop != ":":
                reader.back(stop)
                continue
            yield calls.arguments(f"{separator}{json_string(key)}: ")
            separator = ", "
            yield from self._value(reader, calls, schema.member(key), depth)
        yield from close(reader, calls.arguments, mark, "}", "{}" if separator == "{" else "}")

    def _array(self, reader: Reader, calls: Calls, schema: ValueSchema, depth: int) -> Steps[None]:
        """Hand on an array, whose opening bracket was read."""
        separator = "["
        for place in itertools.count():
            mark = yield from past_commas(reader, markers(",", "}", "]", *self.closers))
            if mark or reader.ended:
                break
            yield calls.arguments(separator)
            separator = ", "
            yield from self._value(reader, calls, schema.item(place), depth)
        yield from close(reader, calls.arguments, mark, "]", "[]" if separator == "[" else "]")

    def _key(self, reader: Reader) -> Steps[tuple[str, str]]:
        """Read a key and what ends it."""
        stops = markers(":", ",", "{", "}", "[", "]", *self.closers)
        if (yield from reader.accept(markers(self.quote))):
            key, _ = yield from reader.until(markers(self.quote, *self.closers))
            _, stop = yield from reader.until(stops)
            return key, stop
        key, stop = yield from reader.until(stops)
        if stop in ("{", "["):  # no key: over the bracket, so that reading goes on
            return "", ""
        return key.strip(), stop

    def _value(self, reader: Reader, calls: Calls, schema: ValueSchema, depth: int) -> Steps[None]:
        """Hand on a value."""
        yield from reader.space()
        nested = ("{", "[") if depth < MAX_DEPTH else ()
        mark = yield from reader.accept(markers(self.quote, '"', *nested))
        if mark == "{":
            yield from self._object(reader, calls, schema, depth + 1)
        elif mark == "[":
            yield from self._array(reader, calls, schema, depth + 1)
        elif mark:
            yield from self._quoted(reader, calls, mark, schema, self.guess and depth == 0)
        else:
            text, stop = yield from reader.until(markers(",", "}", "]", *self.closers))
            reader.back(stop)
            if stop or not reader.cut:
                yield calls.arguments(_bare(text.strip(), schema))

    def _quoted(self, reader: Reader, calls: Calls, quote: str, schema: ValueSchema, guess: bool) -> Steps[None]:
        """Hand on what stands in quotes, the first of which was read: a string where the schema allows one or (unless
        `guess`) says nothing."""
        ends = markers(quote, *self.closers)
        types, values = schema.types
        if "string" in types or not (types or guess):
            yield calls.arguments('"')
            stop = yield from reader.pass_on(ends, lambda text: calls.arguments(json_escaped(text)), strict=True)
            written = '"'
        else:
            text, stop = yield from reader.until(ends)
            written = json_of(text, types, values, guess=True)
        if stop != quote:
            reader.back(stop)
        if stop or not reader.cut:
            yield calls.arguments(written)


def _bare(text: str, schema: ValueSchema) -> str:
    """Return the JSON of what stands without quotes: null, what the schema says it is, or what it looks like."""
    types, values = schema.types
    if text.lower() in _NULLS and (text not in values or None in values):
        return "null"
    return json_of(text, types, values) if types else json_scalar(text) or json_string(text)
