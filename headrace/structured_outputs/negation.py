"""Writes what a JSON schema does not accept as another schema, and tells schemas apart that share no value.

Both serve `not`, `if` and `oneOf`, which llguidance lacks. A complement may leave out some values (never add one): then
fewer answers are possible, and all of them are right.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace.structured_outputs.difference import difference
from headrace.structured_outputs.limits import MAX_REGEX_CHARS
from headrace.structured_outputs.pattern import Unreadable

TYPES = ("null", "boolean", "number", "string", "array", "object")
Resolve = Callable[[Any], Any]
"""Returns a schema without `$ref` at its top."""
MAX_LEVELS = 12
"""Schemas within schemas that are looked into."""
MAX_TEXT = 128
"""Characters of a text that must not be the value."""


class NoComplement(Exception):
    """Names the keyword whose complement cannot be written."""


def negate(schema: Any, resolve: Resolve, names: Collection[str] = (), level: int = 0) -> Any:
    """Return a schema of values that `schema` does not accept. `names`: property names that matter: of the objects with
    a property that `additionalProperties` forbids, those with one of these names are found. Raises NoComplement."""
    if isinstance(schema, bool):
        return not schema
    if level > MAX_LEVELS:
        raise NoComplement("$ref")
    options: list[Any] = []
    for keyword, value in schema.items():
        if keyword == "$ref":
            options.append(negate(resolve(schema), resolve, names, level + 1))
        elif keyword == "allOf":
            options += [negate(one, resolve, names, level + 1) for one in value]
        elif keyword == "anyOf":
            options.append({"allOf": [negate(one, resolve, names, level + 1) for one in value]})
        elif keyword == "not":
            options.append(value)
        elif keyword in ("enum", "const"):
            options.append(_other_values(value if keyword == "enum" else [value]))
        elif keyword == "properties":
            options += [
                {"type": "object", "properties": {name: other}, "required": [name]}
                for name, one in value.items()
                if (other := negate(one, resolve, names, level + 1)) is not False
            ]
        elif keyword == "additionalProperties" and value is False and not schema.get("patternProperties"):
            known = schema.get("properties", {})
            options += [{"type": "object", "required": [name]} for name in names if name not in known]
        elif keyword == "pattern":
            options.append(_other_texts(value))
        elif keyword in _SIMPLE:
            options += _SIMPLE[keyword](value)
        elif keyword in CONSTRAINING:
            raise NoComplement(keyword)
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


CONSTRAINING = frozenset((
    "oneOf", "if", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
    "dependencies", "dependentRequired", "dependentSchemas", "items", "additionalItems", "prefixItems", "contains",
    "uniqueItems", "unevaluatedItems", "minContains", "maxContains", "format", "multipleOf", "$dynamicRef",
    "$recursiveRef",
))  # fmt: skip
"""Keywords without a complement here; all that are not named at all are annotations."""


def _other_types(value: str | list[str]) -> list[Any]:
    named = {value} if isinstance(value, str) else {*value}
    left = [name for name in TYPES if name not in named and not (name == "number" and "integer" in named)]
    return [{"type": left}] if left else []


_SIMPLE: dict[str, Callable[[Any], list[Any]]] = {
    "type": _other_types,
    "required": lambda names: [{"type": "object", "properties": {name: False}} for name in names],
    "minimum": lambda value: [{"type": "number", "exclusiveMaximum": value}],
    "maximum": lambda value: [{"type": "number", "exclusiveMinimum": value}],
    "exclusiveMinimum": lambda value: [{"type": "number", "maximum": value}],
    "exclusiveMaximum": lambda value: [{"type": "number", "minimum": value}],
    "minLength": lambda value: [{"type": "string", "maxLength": value - 1}] if value else [],
    "maxLength": lambda value: [{"type": "string", "minLength": value + 1}],
    "minItems": lambda value: [{"type": "array", "maxItems": value - 1}] if value else [],
    "maxItems": lambda value: [{"type": "array", "minItems": value + 1}],
    "minProperties": lambda value: [{"type": "object", "maxProperties": value - 1}] if value else [],
    "maxProperties": lambda value: [{"type": "object", "minProperties": value + 1}],
}


def _other_texts(pattern: Any) -> Any:
    """Return a schema of the texts in which a pattern is not found."""
    if not isinstance(pattern, str) or len(pattern) > MAX_REGEX_CHARS:
        raise NoComplement("pattern")
    try:
        others = difference("", pattern)
    except Unreadable:
        raise NoComplement("pattern") from None
    return False if others is None else {"type": "string", "pattern": others}


def _other_values(values: Sequence[Any]) -> Any:
    """Return a schema of values that are not among `values`."""
    kinds = {type_of(value) for value in values}
    if kinds & {"array", "object"} or any(len(value) > MAX_TEXT for value in values if isinstance(value, str)):
        raise NoComplement("enum")
    options: list[Any] = [{"type": [name for name in TYPES if name not in kinds]}]
    if "boolean" in kinds:
        options += [{"const": value} for value in (True, False) if not any(value is one for one in values)]
    if "string" in kinds:
        options.append({"type": "string", "pattern": f"^({_unlike({v for v in values if isinstance(v, str)})})$"})
    if "number" in kinds:
        numbers = sorted({value for value in values if type_of(value) == "number"})
        options.append({"type": "number", "exclusiveMaximum": numbers[0]})
        options += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
        ]
        options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return {"anyOf": options}


def _unlike(texts: Collection[str]) -> str:
    """Return a regex, to be matched as a whole, of the texts that are not among some: those which leave the tree of
    their first characters somewhere, or end before its leaves."""
    firsts = sorted({text[0] for text in texts if text})
    if not firsts:
        return "[\\s\\S]+" if "" in texts else "[\\s\\S]*"
    codes = [f"\\u{{{ord(char):x}}}" for char in firsts]
    ways = [f"[^{''.join(codes)}][\\s\\S]*"]
    for char, code in zip(firsts, codes, strict=True):
        ways.append(f"{code}({_unlike({text[1:] for text in texts if text[:1] == char})})")
    return ("" if "" in texts else "|") + "|".join(ways)


def type_of(value: Any) -> str:
    """Return the JSON type of a value, of which integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def few_values(schema: Any) -> list[Any] | None:
    """Return the values, none twice, of a schema that names them, or is boolean or null; None for others."""
    if not isinstance(schema, Mapping):
        return None
    named = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if named is None:
        named = [True, False] if schema.get("type") == "boolean" else [None] if schema.get("type") == "null" else None
    if not isinstance(named, list) or any(isinstance(value, list | dict) for value in named):
        return None
    return [*{json.dumps(_plain(value)): value for value in named}.values()]


def differ(schemas: Sequence[Any]) -> bool:
    """Return whether all of several schemas name their values, and none of these twice."""
    named = [_values(schema) if isinstance(schema, Mapping) else None for schema in schemas]
    values = [value for one in named if one is not None for value in one]
    return None not in named and len(values) == len({*values})


def disjoint(one: Any, other: Any, resolve: Resolve, level: int = 0) -> bool:
    """Return whether it is certain that no value fits both schemas."""
    if one is False or other is False:
        return True
    if isinstance(one, bool) or isinstance(other, bool) or level > MAX_LEVELS:
        return False
    for first, second in ((one, other), (other, one)):
        if "$ref" in first and disjoint(resolve(first), second, resolve, level + 1):
            return True
        for keyword in ("anyOf", "oneOf"):
            if keyword in first and all(disjoint(part, second, resolve, level + 1) for part in first[keyword]):
                return True
        if any(disjoint(part, second, resolve, level + 1) for part in first.get("allOf", ())):
            return True
    if not _types(one) & _types(other):
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None and not values & others:
        return True
    return _types(one) & _types(other) == {"object"} and _objects_differ(one, other, resolve, level)


def _objects_differ(one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, level: int) -> bool:
    needed = {*one.get("required", ()), *other.get("required", ())}
    return any(disjoint(_property(one, name), _property(other, name), resolve, level + 1) for name in needed)


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return schema.get("additionalProperties", True) if not schema.get("patternProperties") else True


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema may accept, where integers are apart from other numbers."""
    named = schema.get("type", TYPES)
    found = {named} if isinstance(named, str) else {*named}
    if "integer" in found:
        found = (found - {"integer"}) | {"number"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if values is None else found & {type_of(value) for value in values}


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the values that a schema names, as texts that are equal where the values are; None: it names none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if values is None else {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    """Return a value in which equal numbers are written alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
