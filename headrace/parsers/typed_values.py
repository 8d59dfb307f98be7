"""Gives JSON types to values that a model writes as bare text, by the schema of the tool's parameter."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.parsers.literals import whole_literal
from headrace.parsers.scalars import json_number, json_string, json_word
from headrace.parsers.tools import FunctionTool

MAX_SCHEMAS = 1000
"""How many subschemas are read to learn the types of one value; what is beyond says nothing."""

STRING = frozenset({"string"})

_ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "int32": "integer", "int64": "integer", "uint": "integer", "uint32": "integer",
    "uint64": "integer", "long": "integer", "short": "integer", "unsigned": "integer",
    "float": "number", "float32": "number", "float64": "number", "double": "number", "num": "number",
    "bool": "boolean", "dict": "object", "map": "object", "arr": "array", "list": "array", "tuple": "array",
    "none": "null", "nil": "null",
}  # fmt: skip
_OF_PYTHON = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_OF_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_MAY_BE_LITERAL = frozenset("{[(\"'-+.0123456789tfnTFN")


@dataclass(frozen=True, eq=False)
class ValueSchema:
    """Holds what a tool's parameters say of one value, at any depth: the schemas that it may have to fit."""

    schemas: tuple[dict[str, Any], ...]
    """none: nothing is said of it"""
    root: dict[str, Any]
    """the tool's parameters, within which references lead"""

    def member(self, name: str) -> ValueSchema:
        """Return what is said of an object's member: of several alternatives, by those that name it, if any do."""
        named, others = [], []
        for schema in self._alternatives:
            properties = schema.get("properties")
            if isinstance(properties, dict) and name in properties:
                named.append(properties[name] if isinstance(properties[name], dict) else {})
            else:
                others.append(schema.get("additionalProperties"))
        return self._within(named or others)

    def item(self, place: int) -> ValueSchema:
        """Return what is said of an array's item."""
        if place >= self._most_listed:
            return self._other_items
        found = []
        for schema in self._alternatives:
            listed = _listed_items(schema)
            found.append(listed[place] if place < len(listed) else _items_behind(schema))
        return self._within(found)

    @cached_property
    def types(self) -> tuple[frozenset[str], tuple[Any, ...]]:
        """Return the JSON types that the value may have, none if nothing says; and the values of its enum."""
        types: set[str] = set()
        values: list[Any] = []
        for schema in self._alternatives:
            said = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
            kinds = {kind.strip().lower() for kind in said if isinstance(kind, str)}
            allowed = schema["enum"] if isinstance(schema.get("enum"), list) else []
            allowed = [*allowed, schema["const"]] if "const" in schema else allowed
            values += allowed
            kinds |= {_OF_PYTHON.get(type(value), "null") for value in allowed}
            if not kinds:
                kinds = {kind for keyword, kind in _OF_KEYWORD.items() if keyword in schema}
            if schema.get("nullable") is True:
                kinds.add("null")
            types |= {_ALIASES.get(kind, kind) for kind in kinds}
        return frozenset(types), tuple(values)

    def declares(self, name: str) -> bool:
        """Return whether an object may have this member, as it may if none is declared at all."""
        declared = [schema.get("properties") for schema in self._alternatives]
        named = [properties for properties in declared if isinstance(properties, dict) and properties]
        return not named or any(name in properties for properties in named)

    @cached_property
    def _alternatives(self) -> list[dict[str, Any]]:
        return list(_all_of(self.schemas, self.root))

    @cached_property
    def _most_listed(self) -> int:
        return max(map(len, map(_listed_items, self._alternatives)), default=0)

    @cached_property
    def _other_items(self) -> ValueSchema:
        return self._within(map(_items_behind, self._alternatives))

    def _within(self, schemas: Iterable[Any]) -> ValueSchema:
        return ValueSchema(tuple(schema for schema in schemas if isinstance(schema, dict)), self.root)


def parameters_of(tool: FunctionTool | None) -> ValueSchema:
    """Return what is said of all of a tool's arguments, as one object; nothing if there is no such tool."""
    root = tool.parameters if tool else {}
    return ValueSchema((root,), root)


def _listed_items(schema: dict[str, Any]) -> list[Any]:
    """The schemas of an array's first items, as `prefixItems` or, in older drafts, a list in `items`."""
    listed = schema.get("prefixItems", schema.get("items"))
    return listed if isinstance(listed, list) else []


def _items_behind(schema: dict[str, Any]) -> Any:
    """The schema of the items behind those, if any."""
    return schema.get("additionalItems") if isinstance(schema.get("items"), list) else schema.get("items")


def _all_of(schemas: Iterable[Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas and all that they are made of: anyOf, oneOf, allOf and references within the tool's parameters."""
    waiting: deque[Any] = deque(schemas)
    seen: set[int] = set()
    while waiting and len(seen) < MAX_SCHEMAS:
        current = waiting.popleft()
        if not isinstance(current, dict) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(current.get(keyword), list):
                waiting += current[keyword]
        if isinstance(current.get("$ref"), str):
            waiting.append(_referred(current["$ref"], root))


def _referred(reference: str, root: dict[str, Any]) -> Any:
    """What a reference of the form #/a/b names, or None."""
    found: Any = root if reference.startswith("#") else None
    for key in reference[1:].split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def is_text(beginning: str, types: frozenset[str], *, guess: bool) -> bool:
    """Return whether a value that begins so (five characters, or all of it) is a string whatever follows.

    `guess` is for formats in which a value whose type is unknown is JSON if it looks like it, and a string otherwise.
    """
    if types == STRING or (not types and not guess):
        return True
    if types == {"string", "null"}:
        return len(beginning) > len("null") or beginning.lower() not in ("", "n", "nu", "nul", "null")
    return not types and bool(beginning.strip()) and beginning.lstrip()[0] not in _MAY_BE_LITERAL


def json_of(text: str, types: frozenset[str], values: tuple[Any, ...] = (), *, guess: bool = False) -> str:
    """Return the JSON of a value: of the types that a parameter may have, the first that the text can be.

    A text that can be none of them is what it says as JSON, or a string.
    """
    stripped = text.strip()
    if text in values or (not types and not guess):
        return json_string(text)
    if not types:
        return _json_text(stripped) or whole_literal(stripped) or _unescaped(stripped) or json_string(text)
    for kind in ("null", "integer", "number", "boolean", "object", "array"):
        if kind in types and (found := _OF_KIND[kind](stripped, "string" in types)):
            return found
    if "string" in types:
        return json_string(text)
    return _json_text(stripped) or json_string(text)


def _null(text: str, or_string: bool) -> str | None:
    return "null" if text.lower() == "null" or (text == "None" and not or_string) else None


def _integer(text: str, or_string: bool) -> str | None:
    number = json_number(text)
    if number is None:
        return None
    whole, point, fraction = number.partition(".")
    if not point or (fraction.strip("0") == "" and not or_string):
        return whole if "e" not in whole.lower() or not or_string else None
    return None


def _number(text: str, or_string: bool) -> str | None:
    return json_number(text)


def _boolean(text: str, or_string: bool) -> str | None:
    word = json_word(text.capitalize() if text.lower() in ("true", "false") else text)
    if word in ("true", "false"):
        return word
    return None if or_string else {"1": "true", "0": "false"}.get(text)


def _structure(brackets: str, text: str) -> str | None:
    """JSON or a Python literal in these brackets, or the same with its quotes escaped once too often."""
    if text[:1] and text[0] in brackets:
        return _json_text(text) or whole_literal(text) or _unescaped(text)
    if text[:1] == '"' and (inner := _json_text(text)) is not None:
        inner = json.loads(inner).strip()
        return _json_text(inner) if inner[:1] and inner[0] in brackets else None
    return None


def _object(text: str, or_string: bool) -> str | None:
    found = _structure("{", text)
    return found if found and found.startswith("{") else None


def _array(text: str, or_string: bool) -> str | None:
    found = _structure("[({", text)
    return found if found and found.startswith("[") else None


_OF_KIND = {
    "null": _null, "integer": _integer, "number": _number, "boolean": _boolean, "object": _object, "array": _array,
}  # fmt: skip


def _json_text(text: str) -> str | None:
    """The text itself if it is JSON, which knows no NaN and no Infinity."""
    try:
        json.loads(text, parse_constant=_refused, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return None
    return text


def _refused(constant: str) -> None:
    raise ValueError(constant)


_ESCAPED_QUOTE = re.compile(r'[{\[][\s{\[]*\\"')


def _unescaped(text: str) -> str | None:
    """The JSON of a text in which every quote is escaped, as if it stood in a string."""
    if not _ESCAPED_QUOTE.match(text):
        return None
    quoted = _json_text(f'"{text}"')
    return _json_text(json.loads(quoted)) if quoted else None
