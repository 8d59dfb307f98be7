"""Gives JSON types to values that a model writes as bare text, by the schema of the tool's parameter."""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.parsers.literals import whole_literal
from headrace.parsers.scalars import json_number, json_string, json_word
from headrace.parsers.tools import FunctionTool

Schema = dict[str, Any]
MAX_SCHEMAS = 1000
"""How many subschemas are read to learn the types of one parameter; what is beyond says nothing."""

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


def parameter_schemas(tool: FunctionTool | None, name: str) -> list[Schema]:
    """Return the schemas that a tool has for a parameter: of several alternatives, one for each that names it."""
    return property_schemas([tool.parameters], tool.parameters, name) if tool else []


def property_schemas(outer: Iterable[Schema], root: Schema, name: str) -> list[Schema]:
    """Return the schemas that objects of these schemas, which lie in `root`, have for a property."""
    found: list[Schema] = []
    others: list[Schema] = []
    for schema in _all_alternatives(outer, root):
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(properties[name] if isinstance(properties[name], dict) else {})
        elif isinstance(schema.get("additionalProperties"), dict):
            others.append(schema["additionalProperties"])
    return found or others


def item_schemas(outer: Iterable[Schema], root: Schema, place: int) -> list[Schema]:
    """Return the schemas that arrays of these schemas have for the item at a place."""
    found = []
    for schema in _all_alternatives(outer, root):
        lists = [schema[key] for key in ("prefixItems", "items") if isinstance(schema.get(key), list)]
        first: list[Any] = lists[0] if lists else []
        rest = schema.get("items") if "prefixItems" in schema or not first else schema.get("additionalItems")
        said = first[place] if place < len(first) else rest
        found += [said] if isinstance(said, dict) else []
    return found


def is_declared(tool: FunctionTool | None, name: str) -> bool:
    """Return whether a tool lets a parameter pass, which it does if it declares none at all."""
    root = tool.parameters if tool else {}
    declared = [schema["properties"] for schema in _alternatives(root, root) if schema.get("properties")]
    return not declared or any(name in properties for properties in declared)


def value_types(tool: FunctionTool | None, name: str) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the JSON types that a parameter may have, none if the schema does not say; and the values of its enum."""
    return types_of(parameter_schemas(tool, name), tool.parameters if tool else {})


def types_of(outer: Iterable[Schema], root: Schema) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the JSON types that values of these schemas may have, and the values of their enums."""
    types: set[str] = set()
    values: list[Any] = []
    for schema in _all_alternatives(outer, root):
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


def _all_alternatives(outer: Iterable[Schema], root: Schema) -> Iterator[Schema]:
    return itertools.chain.from_iterable(_alternatives(schema, root) for schema in outer)


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The schema and all that it is made of: anyOf, oneOf, allOf and references within the tool's parameters."""
    waiting: deque[Any] = deque([schema])
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


def _referred(reference: str, root: Schema) -> Any:
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
