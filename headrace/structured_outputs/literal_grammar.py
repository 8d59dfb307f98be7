"""Makes grammars of arguments as `key=value`, with literals of Python or of a syntax with its own quotes."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any

from headrace.parsers.written import Literals
from headrace.structured_outputs.alternatives import (
    Impossible,
    Schema,
    Schemas,
    properties,
    types,
    values,
)
from headrace.structured_outputs.argument_grammar import KEY, NUMBER, is_free, possible, string_pattern
from headrace.structured_outputs.grammar import Rules, without
from headrace.structured_outputs.schema import NUMBERS

_PYTHON_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_PYTHON_STRING = r"""/"([^"\\\x00-\x1f]|\\[nrtbf\\"'])*"|'([^'\\\x00-\x1f]|\\[nrtbf\\"'])*'/"""
_ESCAPES = {"json_allowed_escapes": 'nrtbf\\"'}
"""The escapes that mean the same in JSON's strings and Python's."""


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
        return self._rules.one_of(possible(self._arguments, schemas))

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
        allowed = values(schema)
        if allowed is not None:
            plain = [value for value in allowed if not isinstance(value, dict | list)]
            if self._syntax.quote is not None and len(plain) < len(allowed):
                raise schemas.refused(schema, "lists or objects in an enum")
            rest = [value for value in allowed if isinstance(value, dict | list)]
            found = [self._written(value) for value in plain if not any(stop in str(value) for stop in self._stops)]
            return [*found, self._rules.json({"enum": rest, "x-guidance": _ESCAPES})] if rest else found
        if schema.get("minItems", 0) > schema.get("maxItems", math.inf):
            return []
        kinds = types(schema)
        if schema.keys() & {"patternProperties", "minProperties", "maxProperties"} or (
            "prefixItems" in schema and schema.get("minItems", 0) > len(schema["prefixItems"])
        ):
            if self._syntax.quote is not None:
                raise schemas.refused(schema, "patternProperties, minProperties, maxProperties or minItems")
            return [self._rules.json(schemas.alone({**schema, "x-guidance": _ESCAPES}))]
        return [self._of_type(kind, schema, schemas) for kind in kinds] if kinds else [self._anything()]

    def _of_type(self, kind: str, schema: Schema, schemas: Schemas) -> str:
        match kind:
            case "string":
                return self._quoted(schema)
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
                    return self._rules.terminal(f"/{NUMBER}/")
                return self._rules.json({"type": kind, **limits})

    def _quoted(self, schema: Schema | None = None) -> str:
        """What matches a string that a schema allows, or any. With limits, Python's has none of its escapes."""
        quote = self._syntax.quote or '"'
        if self._syntax.quote is None and (schema is None or is_free(schema)):
            return self._rules.terminal(_PYTHON_STRING)
        pattern = without(self._stops) if schema is None else string_pattern(schema, self._stops)
        if self._syntax.quote is None:
            pattern = rf"({pattern} & /[^\"\\\x00-\x1f]*/)"
        return f"{self._rules.literal(quote)} {self._rules.until(pattern, quote)}"

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
        key = self._rules.terminal(_PYTHON_KEY if top else KEY)
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
        options = [self._quoted(), self._rules.terminal(f"/{NUMBER}/")]
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

    def _written(self, value: Any) -> str:
        """What matches just this value."""
        if value is None or isinstance(value, bool):
            return self._rules.literal(self._words[value])
        if isinstance(value, str) and self._syntax.quote is not None:
            return self._rules.literal(self._syntax.quote + value + self._syntax.quote)
        return self._rules.literal(json.dumps(value, ensure_ascii=False))
