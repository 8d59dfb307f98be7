"""Tells JSON schemas apart that share no value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
Resolve = Callable[[Any], Any]
"""Returns a schema without `$ref` at its top."""
MAX_LEVELS = 12
"""Schemas within schemas that are looked into."""


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
    shared = types_of(one) & types_of(other)
    values, others = named_values(one), named_values(other)
    if not shared or (values is not None and others is not None and not values & others):
        return True
    return shared == {"object"} and any(
        disjoint(_property(one, name), _property(other, name), resolve, level + 1)
        for name in {*one.get("required", ()), *other.get("required", ())}
    )


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema may accept, of which integers are numbers."""
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


def type_of(value: Any) -> str:
    """Return the JSON type of a value, of which integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def plain(value: Any) -> Any:
    """Return a value in which equal numbers are written alike."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return what the value of a property must fit; True, if that is not certain."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
