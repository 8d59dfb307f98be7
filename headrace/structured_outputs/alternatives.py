"""Makes schemas without references, allOf and anyOf of one that has them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.structured_outputs.grammar import JsonOptions
from headrace.structured_outputs.limits import MAX_WAYS
from headrace.structured_outputs.overlap import type_of
from headrace.structured_outputs.regex import as_python
from headrace.structured_outputs.schema import NUMBERS, checked_schema

Schema = dict[str, Any]
MAX_DEPTH = 32
"""How deep references and combinations may lie within each other before there is a value."""
_NAMES = frozenset(("properties", "patternProperties", "additionalProperties"))
_ITEMS = frozenset(("items", "prefixItems"))
_TYPE_OF_KEYWORD = {
    "properties": "object", "patternProperties": "object", "additionalProperties": "object", "required": "object",
    "minProperties": "object", "maxProperties": "object", "items": "array", "prefixItems": "array",
    "minItems": "array", "maxItems": "array",
    "pattern": "string", "minLength": "string", "maxLength": "string",
    "format": "string", **dict.fromkeys(sorted(NUMBERS), "number"),
}  # fmt: skip


class Impossible(Exception):
    """Tells of a schema that no value fits."""


class Schemas:
    """Holds the parameters of one tool; `field` names them in messages."""

    def __init__(self, parameters: Mapping[str, Any], field: str) -> None:
        self.field = field
        self.root = checked_schema(parameters, field, JsonOptions())
        if "object" not in (given := parameters.get("type", "object")):
            raise RequestError(f"{field}.type must be 'object', as arguments have names; got {quoted(given)}", "tools")

    def refused(self, schema: object, reason: str) -> RequestError:
        """Return the error for a schema that cannot be written in this family's format."""
        message = f"{self.field} has {reason}, which cannot be written as this model writes calls: {quoted(schema)}"
        return RequestError(message, "tools")

    def alone(self, schema: Schema) -> Schema:
        """Return a part of the parameters as a whole schema."""
        found = {key: value for key, value in schema.items() if key != "pattern"}
        if patterns := patterns_of(schema):
            found["allOf"] = [{"pattern": pattern} for pattern in patterns]
        return {**found, "$defs": self.root["$defs"]} if "$defs" in self.root else found

    def alternatives(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Return schemas without $ref, allOf and anyOf; what any of them allows is allowed."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if depth > MAX_DEPTH:
            raise self.refused(schema, f"references that lie more than {MAX_DEPTH} deep")
        found = [{key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "$defs")}]
        groups = [schema["anyOf"]] if "anyOf" in schema else []
        groups += [[part] for part in schema.get("allOf", ())]
        groups += [[self.root["$defs"][schema["$ref"].removeprefix("#/$defs/")]]] if "$ref" in schema else []
        for group in groups:
            options = [option for part in group for option in self.alternatives(part, depth + 1)]
            pairs = (self._both(one, option) for one in found for option in options)
            found = [pair for pair in pairs if pair is not None]
            if len(found) > MAX_WAYS:
                raise self.refused(schema, f"more than {MAX_WAYS} alternatives at one place")
        return found

    def check_count(self, schema: Schema) -> None:
        """Refuse limits on properties that do not hold for whatever of the named ones is written."""
        named, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("minProperties", 0) > len(required) or schema.get("maxProperties", len(named)) < len(named):
            raise self.refused(schema, "minProperties or maxProperties")
        if "patternProperties" in schema:
            raise self.refused(schema, "patternProperties")

    def _both(self, one: Schema, other: Schema) -> Schema | None:
        """What allows what both allow; None, if that is nothing."""
        merged = dict(one)
        for keys in (_NAMES, _ITEMS):
            by_name = (one | other).keys() & keys & {"patternProperties", "prefixItems"}
            if by_name and one.keys() & keys and other.keys() & keys:
                raise self.refused(other, f"two schemas with {' or '.join(sorted(keys))} at one place")
        for key, value in other.items():
            if key == "properties":
                continue  # see below: what one schema says of others applies to those that the other names too
            if key not in merged or merged[key] == value:
                merged[key] = value
            elif key == "required":
                merged[key] = list(dict.fromkeys([*merged[key], *value]))
            elif key == "type":
                merged[key] = _shared_types(types(one) or [], types(other) or [])
            elif key == "pattern":
                merged[key] = list(dict.fromkeys([*patterns_of(merged), *patterns_of(other)]))
            elif key in ("additionalProperties", "items"):
                merged[key] = {"allOf": [merged[key], value]}
            else:
                raise self.refused(other, f"two different values of {key} at one place")
        names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
        if names:
            merged["properties"] = {name: _of_name(name, one, other) for name in names}
        described = {*one.get("properties", ())} & {*other.get("properties", ())} & {*merged.get("required", ())}
        if any(not self.alternatives(merged["properties"][name]) for name in described):
            return None  # nothing fits a property that must be there
        return None if merged.get("type") == [] else merged


def _of_name(name: str, *schemas: Schema) -> Any:
    """Return what schemas say of a property, whether they name it or not."""
    said = [one.get("properties", {}).get(name, one.get("additionalProperties", True)) for one in schemas]
    said = [one for one in said if one is not True]
    return {"allOf": said} if len(said) > 1 else said[0] if said else True


def _shared_types(some: list[str], others: list[str]) -> list[str]:
    """Return the types that two lists share; an integer is a number."""
    shared = [kind for kind in some if kind in others]
    if "integer" not in shared and {"integer", "number"} <= {*some, *others} and "number" not in shared:
        shared.append("integer")
    return shared


def types(schema: Schema) -> list[str] | None:
    """Return the types that a schema without combinations allows; None if it says nothing of them."""
    said = schema.get("type")
    if said is None:
        return list({_TYPE_OF_KEYWORD[key]: None for key in schema if key in _TYPE_OF_KEYWORD}) or None
    return list(said) if isinstance(said, list) else [said]


def values(schema: Schema) -> list[Any] | None:
    """Return the values that enum and const leave, and other keywords of scalars; None if they leave all."""
    found = schema.get("enum")
    if "const" in schema:
        found = [schema["const"]] if schema["const"] in schema.get("enum", [schema["const"]]) else []
    return None if found is None else [value for value in found if _fits(value, schema)]


def _fits(value: Any, schema: Schema) -> bool:
    """Return whether a value fits what a schema says of types, numbers and texts."""
    kind = type_of(value)
    kinds = [kind, "integer"] if kind == "number" and value == int(value) else [kind]
    if "type" in schema and not {*kinds} & {*(types(schema) or ())}:
        return False
    if kind == "number":
        return bool(
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
            and value % schema.get("multipleOf", value or 1) == 0
        )
    if kind == "string":
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)) and all(
            _finds(pattern, value) for pattern in patterns_of(schema)
        )
    return True


def patterns_of(schema: Schema) -> list[str]:
    """Return the patterns that a text must have: `pattern` is a list where schemas with several were merged."""
    found = schema.get("pattern", [])
    return [found] if isinstance(found, str) else found


def _finds(pattern: str, text: str) -> bool:
    """Return whether it is certain that a pattern is found in a text: not if Python does not read it."""
    try:
        return re.search(as_python(pattern), text) is not None
    except re.error:
        return False


def properties(schema: Schema) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, schema and whether it is required, of each property that is named, in the schema's order."""
    named = schema.get("properties") or {}
    required = schema.get("required") or []
    extra = schema.get("additionalProperties", True)
    for name in [*named, *(name for name in required if name not in named)]:
        yield name, named.get(name, extra), name in required
