"""Makes grammars of arguments that are not written as one JSON object: tags with a value each, and literals."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from headrace.parsers.written import Literals, Tagged
from headrace.structured_outputs.alternatives import Impossible, Schema, Schemas, properties, types, values
from headrace.structured_outputs.lark import Rules, escaped, without
from headrace.structured_outputs.pattern import Unreadable
from headrace.structured_outputs.schema import NUMBERS
from headrace.structured_outputs.text_pattern import is_free, string_pattern
from headrace.structured_outputs.unique_places import has_unique, wants_unique

_KEY_AGAIN = "{key}"
_KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_PYTHON_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_PYTHON_STRING = r"""/"([^"\\\x00-\x1f]|\\[nrtbf\\"'])*"|'([^'\\\x00-\x1f]|\\[nrtbf\\"'])*'/"""
_NUMBER = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"
"""Numbers that are finite as floats."""
_SCALARS = {
    "null": "null", "boolean": "true|false|True|False", "integer": "-?(0|[1-9][0-9]{0,17})", "number": _NUMBER,
}  # fmt: skip
"""Values that are read as no string although a string begins like them."""
_ESCAPES = {"json_allowed_escapes": 'nrtbf\\"'}
"""The escapes that mean the same in JSON's strings and Python's."""
_NUMBER_OR_WORD = r"/[ \t\r\n]*(-?[0-9][0-9.eE+-]*|(?i:true|false|null|none)|[\[{(\"'](?s:.*))[ \t\r\n]*/"
"""Text that is read as another type where a value may be a string or something else."""


def _possible(write: Callable[[Schema, Schemas], str], schemas: Schemas) -> list[str]:
    """Return what matches each of the alternatives that some arguments fit."""
    found = []
    for one in schemas.alternatives(schemas.root):
        with contextlib.suppress(Impossible):
            found.append(write(one, schemas))
    if not found:
        raise schemas.refused(schemas.root, "arguments of which none could be written")
    return found


def _written_pattern(schema: Schema, schemas: Schemas, stops: tuple[str, ...], taken: str = "") -> str:
    """Return the pattern of the strings that a schema allows, as `string_pattern` does."""
    try:
        return string_pattern(schema, stops, taken)
    except Unreadable:
        raise schemas.refused(schema, "a pattern") from None


class TaggedArguments:
    """Makes the grammar of arguments that have a tag each."""

    def __init__(self, rules: Rules, tags: Tagged, before: str, stops: Iterable[str]) -> None:
        self._rules = rules
        self._tags = tags
        self._before = before
        """What matches the markup before a key."""
        self._stops = tuple(dict.fromkeys([tags.after.strip(), *tags.stops, *stops]))

    def of(self, schemas: Schemas) -> str:
        """Return what matches arguments that a tool's parameters allow."""
        return self._rules.one_of(_possible(self._sequence, schemas))

    def any(self) -> str:
        """Return what matches any arguments."""
        key = self._rules.terminal(_KEY)
        if _KEY_AGAIN in self._tags.after:  # which key it is no grammar can tell
            head, tail = self._tags.after.split(_KEY_AGAIN)
            text = self._rules.until(without(self._stops), head)
            parts = self._before, key, self._rules.loose(self._tags.middle), text, key
            return self._rules.rule(self._rules.joined(*parts, self._rules.loose(tail))) + "*"
        middles = [self._tags.middle] + ([] if self._tags.middle_json is None else [self._tags.middle_json])
        texts = self._rules.one_of(self._text(without(self._stops), middle) for middle in middles)
        return self._rules.rule(f"{self._before} {key} {texts}") + "*"

    def _sequence(self, schema: Schema, schemas: Schemas) -> str:
        """A tag for each property, in order."""
        schemas.check_count(schema)
        if not schema.get("properties") and not schema.get("required"):
            return '""' if schema.get("additionalProperties") is False or schema.get("type") else self.any()
        return self._rules.rule(" ".join(self._parts(schema, schemas)) or '""')

    def _parts(self, schema: Schema, schemas: Schemas) -> Iterable[str]:
        for name, said, required in properties(schema):
            can_be_named = re.fullmatch(r"[^\s<>\"'=][^<>\"'=\n]*", name) is not None
            values = self._of_key(name)._values(said, schemas) if can_be_named else []
            if values:
                yield self._rules.rule(f"{self._before} {self._rules.literal(name)} {self._rules.one_of(values)}") + (
                    "" if required else "?"
                )
            elif required and can_be_named:
                raise Impossible
            elif required:
                raise schemas.refused(name, "a required property with a name that could not be written")

    def _of_key(self, name: str) -> TaggedArguments:
        """The same for a key that its closing tag names too."""
        if _KEY_AGAIN not in self._tags.after:
            return self
        tags = replace(self._tags, after=self._tags.after.replace(_KEY_AGAIN, name))
        return TaggedArguments(self._rules, tags, self._before, self._stops)

    def _values(self, schema: Any, schemas: Schemas) -> list[str]:
        """The ways of writing a value, each with what stands before and behind it."""
        tags, rules, found = self._tags, self._rules, []
        options = schemas.alternatives(schema)
        kinds = {kind for option in options for kind in types(option) or ["string"]}
        listed = [value for option in options for value in values(option) or ()]
        kinds |= {"string" if isinstance(value, str) else "null" if value is None else "number" for value in listed}
        mixed = tags.middle_json is None and "string" in kinds and len(kinds) > 1
        for option in options:
            allowed = values(option)
            if allowed is not None:
                found += [self._exactly(value) for value in allowed if isinstance(value, str) and self._is_plain(value)]
                rest = [value for value in allowed if not isinstance(value, str)]
                found += [self._json(rules.json({"enum": rest}), exact=mixed)] if rest else []
                continue
            others = [kind for kind in types(option) or ["string"] if kind != "string"]
            if len(others) < len(types(option) or ["string"]):
                pattern = _written_pattern(option, schemas, self._stops, _NUMBER_OR_WORD if mixed else "")
                found.append(self._text(pattern, tags.middle, exact=mixed or not is_free(option)))
            if "number" in others and not option.keys() & NUMBERS:
                others.remove("number")
                found.append(self._json(rules.terminal(f"/{_NUMBER}/"), exact=mixed))
            if "boolean" in others and tags.middle_json is None:
                found.append(self._json(rules.terminal("/True|False/"), exact=mixed))
            if mixed and not option.keys() & NUMBERS:
                found += [self._scalar(_SCALARS[kind]) for kind in others if kind in _SCALARS]
            if others:
                found.append(self._json(rules.json(schemas.alone({**option, "type": others})), exact=mixed))
        return found

    def _is_plain(self, text: str) -> bool:
        return text == text.strip() and not any(stop in text for stop in self._stops)

    def _text(self, pattern: str, before: str, *, exact: bool = False) -> str:
        """Text as it is. The white space that the tags have around it is part of a text only where any text will do."""
        rules, head, tail = self._rules, before.rstrip(), self._tags.after.lstrip()
        opening, closing = before[len(head) :], self._tags.after[: len(self._tags.after) - len(tail)]
        if not exact:
            return rules.joined(rules.loose(head), rules.until(pattern, tail.rstrip()), rules.space)
        opening = rules.joined(rules.loose(head), rules.literal(opening))
        return rules.joined(opening, rules.until(pattern, closing + tail.rstrip()), rules.space)

    def _exactly(self, text: str) -> str:
        return self._text(f"/{escaped(text)}/", self._tags.middle, exact=True)

    def _scalar(self, pattern: str) -> str:
        """A scalar where a string may stand too: one terminal with its closing tag, since the lexer, which goes on with
        a text for as long as it can, would never find the end of the scalar alone."""
        rules, head, closing = self._rules, self._tags.middle.rstrip(), self._tags.after.rstrip()
        opening = rules.joined(rules.loose(head), rules.literal(self._tags.middle[len(head) :]))
        closing, mark = rules.at_mark(closing)
        scalar = rules.terminal(f"/({pattern}){escaped(closing)}/")
        return rules.joined(opening, scalar, rules.literal(mark), rules.space)

    def _json(self, value: str, *, exact: bool) -> str:
        """A value that is not a string; exact: without white space that would make it one."""
        rules, after = self._rules, self._tags.after
        before = self._tags.middle if self._tags.middle_json is None else self._tags.middle_json
        if not exact:
            return rules.joined(rules.loose(before), value, rules.loose(after))
        opening, closing = before[len(before.rstrip()) :], after.rstrip()
        return rules.joined(
            rules.loose(before.rstrip()), rules.literal(opening), value, rules.literal(closing), rules.space
        )


class LiteralArguments:
    """Makes the grammar of arguments as `key=value`, with literals of Python or of a syntax with its own quotes."""

    def __init__(self, rules: Rules, syntax: Literals, stops: Iterable[str]) -> None:
        self._rules = rules
        self._syntax = syntax
        self._stops = (syntax.quote, *stops) if syntax.quote else ()
        self._impossible: set[str] = set()
        """Schemas that no value fits."""
        self._used: set[str] = set()
        """Schemas whose rules others use."""
        self._words = {True: "true", False: "false", None: "null"}
        if syntax.quote is None:
            self._words = {True: "True", False: "False", None: "None"}

    def of(self, schemas: Schemas) -> str:
        """Return what matches arguments that a tool's parameters allow."""
        return self._rules.one_of(_possible(self._arguments, schemas))

    def any(self) -> str:
        """Return what matches any arguments."""
        return self._map(self._anything(), top=True)

    def _arguments(self, schema: Schema, schemas: Schemas) -> str:
        schemas.check_count(schema)
        return self._members(schema, schemas, top=True)

    def _value(self, schema: Any, schemas: Schemas) -> str:
        """What matches a value. A schema that refers to itself becomes a rule that does."""
        key = f"{schemas.field} {json.dumps(schema)}"
        if key in self._impossible:
            raise Impossible
        if (known := self._rules.known(key)) is not None:
            self._used.add(key)
            return known
        name, options = self._rules.reserve(key), list[str]()
        for option in schemas.alternatives(schema):
            with contextlib.suppress(Impossible):
                options += self._options(option, schemas)
        if not options and key in self._used:
            raise schemas.refused(schema, "a value within itself of which none could be written")
        if not options:
            self._impossible.add(key)
            raise Impossible
        self._rules.define(name, " | ".join(dict.fromkeys(options)))
        return name

    def _options(self, schema: Schema, schemas: Schemas) -> list[str]:
        if wants_unique(schema) and "array" in (types(schema) or ["array"]):
            raise schemas.refused(schema, "uniqueItems")
        allowed = values(schema)
        if allowed is not None:
            return [self._written(value) for value in allowed if self._writable(value)]
        if schema.get("minItems", 0) > schema.get("maxItems", math.inf):
            return []
        kinds = types(schema)
        if schema.keys() & {"patternProperties", "minProperties", "maxProperties"} or (
            "prefixItems" in schema and schema.get("minItems", 0) > len(schema["prefixItems"])
        ):
            if self._syntax.quote is not None or has_unique(schemas.alone(schema)):
                raise schemas.refused(schema, "patternProperties, minProperties, maxProperties or minItems")
            return [self._rules.json(schemas.alone({**schema, "x-guidance": _ESCAPES}))]
        return [self._of_type(kind, schema, schemas) for kind in kinds] if kinds else [self._anything()]

    def _of_type(self, kind: str, schema: Schema, schemas: Schemas) -> str:
        match kind:
            case "string":
                return self._string(schema, schemas)
            case "boolean":
                return self._rules.one_of([self._written(True), self._written(False)])
            case "null":
                return self._written(None)
            case "array":
                return self._array(schema, schemas)
            case "object":
                return f"{self._rules.literal('{')} {self._members(schema, schemas)} {self._rules.literal('}')}"
            case _:
                limits = {key: schema[key] for key in schema if key in NUMBERS}
                if kind == "number" and not limits:
                    return self._rules.terminal(f"/{_NUMBER}/")
                return self._rules.json({"type": kind, **limits})

    def _string(self, schema: Schema, schemas: Schemas) -> str:
        if is_free(schema) or self._syntax.quote is not None:
            return self._quoted(_written_pattern(schema, schemas, self._stops))
        limits: Schema = {key: schema[key] for key in ("pattern", "format", "minLength", "maxLength") if key in schema}
        return self._rules.json({"type": "string", **limits, "x-guidance": _ESCAPES})

    def _quoted(self, pattern: str) -> str:
        """What matches a string of a pattern; Python's may be any."""
        if self._syntax.quote is None:
            return self._rules.terminal(_PYTHON_STRING)
        return f"{self._rules.literal(self._syntax.quote)} {self._rules.until(pattern, self._syntax.quote)}"

    def _array(self, schema: Schema, schemas: Schemas) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first: list[str] = []
        rest = schema.get("items", True)
        try:
            for item in schema.get("prefixItems", [])[:most]:
                first.append(self._value(item, schemas))
            item = "" if first or rest is False else self._value(rest, schemas)
        except Impossible:
            if len(first) < least:
                raise
            rest = False
        if first:
            rest, least, most = False, len(first), len(first)
        comma = self._comma
        if rest is False:
            inner = f" {comma} ".join(first)
        else:
            more = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            inner = "" if most == 0 else item if most == 1 else f"{item} {more}"
            inner = f"({inner})?" if not least and inner else inner
        return self._rules.rule(f"{self._rules.literal('[')} {inner} {self._rules.literal(']')}")

    @property
    def _comma(self) -> str:
        return f"{self._rules.literal(',')} {self._rules.space}"

    def _members(self, schema: Schema, schemas: Schemas, *, top: bool = False) -> str:
        """The properties that are named, in order; of an object that names none, any."""
        extra = schema.get("additionalProperties", True)
        if not schema.get("properties") and not schema.get("required"):
            if extra is False or (top and schema.get("type")):
                return '""'
            try:
                return self._map(self._value(extra, schemas), top=top)
            except Impossible:
                return '""'
        members = []
        for name, said, required in properties(schema):
            if self._is_key(name, top):
                key = name if top or self._syntax.quote is not None else json.dumps(name)
                colon = self._syntax.equals if top else ":"
                try:
                    value = self._value(said, schemas)
                except Impossible:
                    if required:
                        raise
                    continue
                members.append((f"{self._rules.literal(key + colon)} {self._rules.space} {value}", required))
            elif required:
                raise schemas.refused(name, "a required property with a name that could not be written")
        return self._in_order(members)

    def _in_order(self, members: list[tuple[str, bool]]) -> str:
        """Members with commas between them, of which some may be left out."""
        rest = [""]
        for body, required in reversed(members):
            one = f"{self._comma} {body}"
            rest.append(self._rules.rule(f"{one if required else f'({one})?'} {rest[-1]}".strip()))
        starts = []
        for place, (body, required) in enumerate(members):
            starts.append(f"{body} {rest[len(members) - place - 1]}".strip())
            if required:
                return self._rules.rule(" | ".join(starts))
        return self._rules.rule(" | ".join([*starts, '""']))

    def _map(self, value: str, *, top: bool = False) -> str:
        """Any members."""
        key = self._rules.terminal(_PYTHON_KEY if top else _KEY)
        if self._syntax.quote is None and not top:
            key = self._rules.terminal(_PYTHON_STRING)
        member = f"{key} {self._rules.literal(self._syntax.equals if top else ':')} {self._rules.space} {value}"
        return self._rules.rule(f"({member} ({self._comma} {member})*)?")

    def _anything(self) -> str:
        """Any value."""
        known = self._rules.known("any literal")
        if known is not None:
            return known
        name = self._rules.reserve("any literal")
        items = f"{name} ({self._comma} {name})*"
        options = [self._quoted(without(self._stops)), self._rules.terminal(f"/{_NUMBER}/")]
        options += map(self._written, self._words)
        options += [f"{self._rules.literal('[')} ({items})? {self._rules.literal(']')}"]
        options += [f"{self._rules.literal('{')} {self._map(name)} {self._rules.literal('}')}"]
        if self._syntax.quote is None:
            options += [self._rules.literal(word) for word in ("true", "false", "null")]
        self._rules.define(name, " | ".join(options))
        return name

    def _is_key(self, name: str, top: bool) -> bool:
        """Whether a property's name can be written."""
        if self._syntax.quote is None:
            return not top or name.isidentifier()
        return re.fullmatch(r"[^\s<>\"'{}\[\],:|]+", name) is not None

    def _writable(self, value: object) -> bool:
        """Whether a value of an enum can be written."""
        if isinstance(value, dict):
            return all(self._is_key(key, False) and self._writable(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(self._writable, value))
        return (
            not isinstance(value, str) or self._syntax.quote is None or not any(stop in value for stop in self._stops)
        )

    def _written(self, value: Any) -> str:
        """What matches just this value."""
        if value is None or isinstance(value, bool):
            return self._rules.literal(self._words[value])
        if isinstance(value, str):
            if self._syntax.quote is not None:
                return self._rules.literal(self._syntax.quote + value + self._syntax.quote)
            return self._rules.literal(_python_string(value))
        if isinstance(value, list):
            inner = f" {self._comma} ".join(map(self._written, value))
            return f"{self._rules.literal('[')} {inner} {self._rules.literal(']')}"
        if isinstance(value, dict):
            keys = {key: key if self._syntax.quote is not None else _python_string(key) for key in value}
            inner = f" {self._comma} ".join(
                f"{self._rules.literal(keys[key] + ':')} {self._rules.space} {self._written(item)}"
                for key, item in value.items()
            )
            return f"{self._rules.literal('{')} {inner} {self._rules.literal('}')}"
        return self._rules.literal(json.dumps(value))


def _python_string(text: str) -> str:
    """A string that Python and JSON read alike, but for a slash and marks of control."""
    return json.dumps(text, ensure_ascii=False)
