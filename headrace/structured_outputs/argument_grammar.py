"""Makes grammars of arguments that have a tag each; has what literal_grammar.py shares with them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from llguidance import regex_to_lark

from headrace.parsers.written import Tagged
from headrace.structured_outputs.alternatives import Impossible, Schema, Schemas, patterns_of, properties, types, values
from headrace.structured_outputs.formats import NATIVE_FORMATS
from headrace.structured_outputs.grammar import Rules, escaped, without
from headrace.structured_outputs.regex import whole_pattern
from headrace.structured_outputs.schema import NUMBERS

_KEY_AGAIN = "{key}"
KEY = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
NUMBER = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"
"""Numbers that are finite as floats."""
_SCALARS = {
    "null": "null", "boolean": "true|false|True|False", "integer": "-?(0|[1-9][0-9]{0,17})", "number": NUMBER,
}  # fmt: skip
"""Values that are read as no string although a string begins like them."""
_NUMBER_OR_WORD = r"/[ \t\r\n]*(-?[0-9][0-9.eE+-]*|(?i:true|false|null|none)|[\[{(\"'](?s:.*))[ \t\r\n]*/"
"""Text that is read as another type where a value may be a string or something else."""
_TRIMMED = r"(/[^ \t\r\n]((?s:.*)[^ \t\r\n])?/ | /(?:)/)"
"""Text that stays as it is when white space around it is taken away."""


def string_pattern(schema: dict[str, Any], stops: tuple[str, ...], taken: str = "") -> str:
    """Return the pattern of the strings that a schema allows, of which none holds a stop.

    `taken` is a pattern of what would be read as another type.
    """
    parts = [without(stops)]
    if is_free(schema) and not taken:
        return parts[0]
    parts.append(_TRIMMED)
    if taken:
        parts.append(f"~{taken}")
    for pattern in patterns_of(schema):
        parts.append(f"/{regex_to_lark(whole_pattern(pattern), 'dw')}/")
    if schema.get("format") in NATIVE_FORMATS:
        parts.append(f"/{NATIVE_FORMATS[schema['format']]}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.){{{int(least)},{most if most == '' else int(most)}}}/")
    return "(" + " & ".join(parts) + ")"


def is_free(schema: dict[str, Any]) -> bool:
    """Return whether a schema allows any string."""
    return not schema.keys() & {"pattern", "format", "minLength", "maxLength"}


def possible(write: Callable[[Schema, Schemas], str], schemas: Schemas) -> list[str]:
    """Return what matches each of the alternatives that some arguments fit."""
    found = []
    for one in schemas.alternatives(schemas.root):
        with contextlib.suppress(Impossible):
            found.append(write(one, schemas))
    if not found:
        raise schemas.refused(schemas.root, "arguments of which none could be written")
    return found


class TaggedArguments:
    """Makes the grammar of arguments that have a tag each."""

    def __init__(self, rules: Rules, tags: Tagged, before: str, stops: Iterable[str]) -> None:
        self._rules = rules
        self._tags = tags
        self._before = before
        """What matches the markup before a key."""
        self._stops = tuple(dict.fromkeys([tags.after.strip(), tags.before, *stops]))

    def of(self, schemas: Schemas) -> str:
        """Return what matches arguments that a tool's parameters allow."""
        return self._rules.one_of(possible(self._sequence, schemas))

    def any(self) -> str:
        """Return what matches any arguments."""
        key = self._rules.terminal(KEY)
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
                pattern = string_pattern(option, self._stops, _NUMBER_OR_WORD if mixed else "")
                found.append(self._text(pattern, tags.middle, exact=mixed or not is_free(option)))
            if "number" in others and not option.keys() & NUMBERS:
                others.remove("number")
                found.append(self._json(rules.terminal(f"/{NUMBER}/"), exact=mixed))
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
