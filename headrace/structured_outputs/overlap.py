"""Tells JSON schemas apart that share no value, or none but an empty array or object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.structured_outputs.difference import intersection
from headrace.structured_outputs.negation import MAX_LEVELS, TYPES, Resolve, plain, type_of
from headrace.structured_outputs.pattern import Unreadable

_LITERAL_START = re.compile(r"\^([\w -]*)(?![*?+{|])")


def differ(schemas: Sequence[Any]) -> bool:
    """Return whether all of several schemas name their values, and none of these twice."""
    named = [named_values(schema) if isinstance(schema, Mapping) else None for schema in schemas]
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
    if not types_of(one) & types_of(other):
        return True
    values, others = named_values(one), named_values(other)
    if values is not None and others is not None and not values & others:
        return True
    shared = types_of(one) & types_of(other)
    if shared == {"string"} and "pattern" in one and "pattern" in other:
        return _patterns_differ(one["pattern"], other["pattern"])
    if shared == {"object"} and any(
        disjoint(_property(one, name), _property(other, name), resolve, level + 1)
        for name in {*one.get("required", ()), *other.get("required", ())}
    ):
        return True
    least = ("minItems",) if shared == {"array"} else ("required", "minProperties")
    never_empty = any(schema.get(keyword) for schema in (one, other) for keyword in least)
    return never_empty and share_only_empty(one, other, resolve, level)


def share_only_empty(one: Any, other: Any, resolve: Resolve, level: int = 0) -> bool:
    """Return whether it is certain that what fits both schemas is an empty array, or that it is an empty object."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    shared = types_of(one) & types_of(other)
    if shared == {"array"}:
        return disjoint(_first_item(one), _first_item(other), resolve, level + 1)
    return (
        shared == {"object"} and _names_differ(one, other, resolve, level) and _names_differ(other, one, resolve, level)
    )


def not_empty(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of what fits another and is no empty array or object."""
    named = schema.get("properties") or {}
    ways: list[Any] = [{"required": [name]} for name, value in named.items() if value is not False]
    if not named or schema.get("patternProperties"):
        ways.append({"properties": dict.fromkeys(named, False), "minProperties": 1})
    return {"minItems": 1, "anyOf": ways}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema may accept, where integers are apart from other numbers."""
    named = schema.get("type", TYPES)
    found = {named} if isinstance(named, str) else {*named}
    if "integer" in found:
        found = (found - {"integer"}) | {"number"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if values is None else found & {type_of(value) for value in values}


def named_values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the values that a schema names, as texts that are equal where the values are; None: it names none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if values is None else {json.dumps(plain(value), sort_keys=True) for value in values}


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return what the value of a property must fit; True, if that is not certain."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return schema.get("additionalProperties", True) if not schema.get("patternProperties") else True


def _first_item(schema: Mapping[str, Any]) -> Any:
    """Return what the first item of an array must fit."""
    for keyword in ("prefixItems", "items"):
        value = schema.get(keyword)
        if isinstance(value, list) and value:
            return value[0]
    items = schema.get("items", True)
    return True if isinstance(items, list) else items


def _names_differ(one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve, level: int) -> bool:
    """Return whether it is certain that no property that one schema names or describes may be in an object of the
    other."""
    if one.get("additionalProperties", True) is not False:
        return False
    patterns = other.get("patternProperties") or {}
    for name, value in (one.get("properties") or {}).items():
        if any(_may_find(pattern, name) for pattern in patterns):
            return False
        if not disjoint(value, _property({**other, "patternProperties": None}, name), resolve, level + 1):
            return False
    return all(_patterns_differ(one_, two) for one_ in one.get("patternProperties") or () for two in patterns)


def _may_find(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _patterns_differ(one: str, other: str) -> bool:
    """Return whether it is certain that no text has both patterns in it."""
    first, second = (_LITERAL_START.match(pattern) for pattern in (one, other))
    if first and second and not first[1].startswith(second[1]) and not second[1].startswith(first[1]):
        return "|" not in one + other
    try:
        return intersection(one, other) is None
    except Unreadable:
        return False
