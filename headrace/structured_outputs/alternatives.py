"""What a schema says once references, allOf, anyOf and oneOf are written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.errors import RequestError, quoted

Schema = dict[str, Any]
MAX_ALTERNATIVES = 64
"""How many alternatives a schema may be written out as."""
MAX_DEPTH = 32
"""How deep references and combinations may lie within each other before there is a value."""
_OF_KEYWORD = {
    "properties": "object", "additionalProperties": "object", "required": "object", "items": "array",
    "prefixItems": "array", "minItems": "array", "maxItems": "array", "pattern": "string", "minLength": "string",
    "maxLength": "string", "format": "string", "minimum": "number", "maximum": "number", "multipleOf": "number",
    "exclusiveMinimum": "number", "exclusiveMaximum": "number",
}  # fmt: skip
LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
"""Keywords of numbers."""
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
                "deprecated", "readOnly", "writeOnly"}  # fmt: skip


class Schemas:
    """The parameters of one tool; `field` names them in messages."""

    def __init__(self, root: Schema, field: str) -> None:
        self.root = root
        self.field = field

    def refused(self, schema: object, reason: str) -> RequestError:
        """An error for a schema that cannot be written in this family's format."""
        return RequestError(
            f"{self.field}: {reason}, which this model's format of tool calls cannot hold to under tool_choice required,"
            f" a named tool or strict: {quoted(schema)}"
        )

    def alternatives(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Return schemas without $ref, allOf, anyOf and oneOf; what any of them allows is allowed."""
        if schema is True:
            return [{}]
        if schema is False:
            return []
        if depth > MAX_DEPTH:
            raise self.refused(schema, f"references that lie more than {MAX_DEPTH} deep")
        found = [{key: value for key, value in schema.items() if key not in _ANNOTATIONS}]
        for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            if keyword not in schema:
                continue
            found = [{key: value for key, value in one.items() if key != keyword} for one in found]
            said = schema[keyword]
            for group in [[self.target(said)]] if keyword == "$ref" else [[s] for s in said] if keyword == "allOf" else [said]:
                options = [option for one in group for option in self.alternatives(one, depth + 1)]
                found = [self._both(one, option) for one in found for option in options]
                if len(found) > MAX_ALTERNATIVES:
                    raise self.refused(schema, f"more than {MAX_ALTERNATIVES} alternatives")
        return found

    def target(self, reference: str) -> Any:
        """Return what a reference within the parameters names."""
        found: Any = self.root if reference.startswith("#") else None
        for key in reference[1:].split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else found[int(key)] if isinstance(found, list) else None
        if not isinstance(found, dict | bool):
            raise self.refused(reference, "a reference that names no schema within it")
        return found

    def alone(self, schema: Any) -> Any:
        """Return a schema that means the same with nothing around it."""
        inside = _with_references(schema)
        if inside == schema:
            return schema
        return {**inside, "$defs": {"parameters": _with_references(self.root)}}

    def _both(self, one: Schema, other: Schema) -> Schema:
        """What allows what both allow."""
        merged = dict(one)
        for key, value in other.items():
            if key not in merged or merged[key] == value:
                merged[key] = value
            elif key == "properties":
                merged[key] = {**merged[key], **value}
                for name in merged[key].keys() & one[key].keys() & value.keys():
                    merged[key][name] = {"allOf": [one[key][name], value[name]]}
            elif key == "required":
                merged[key] = list(dict.fromkeys([*merged[key], *value]))
            elif key in ("minimum", "minLength", "minItems", "exclusiveMinimum"):
                merged[key] = max(merged[key], value)
            elif key in ("maximum", "maxLength", "maxItems", "exclusiveMaximum"):
                merged[key] = min(merged[key], value)
            elif key == "enum":
                merged[key] = [item for item in merged[key] if item in value]
            elif key == "type":
                merged[key] = [kind for kind in types(one) or [] if kind in (types(other) or [])]
            elif key == "additionalProperties":
                merged[key] = {"allOf": [merged[key], value]}
            else:
                raise self.refused(other, f"two different values of {key} at one place")
        return merged


def types(schema: Schema) -> list[str] | None:
    """Return the types that a schema without combinations allows; None if it says nothing of them."""
    said = schema.get("type")
    kinds = list(said) if isinstance(said, list) else [said] if said else []
    if not kinds:
        kinds = list({_OF_KEYWORD[key]: None for key in schema if key in _OF_KEYWORD})
    if kinds and schema.get("nullable") is True and "null" not in kinds:
        kinds.append("null")
    return kinds or None


def values(schema: Schema) -> list[Any] | None:
    """Return the values that enum and const leave; None if they leave all."""
    if "const" in schema:
        return [schema["const"]] if schema["const"] in schema.get("enum", [schema["const"]]) else []
    return schema.get("enum")


def _with_references(schema: Any) -> Any:
    """A copy in which references name a place within $defs/parameters."""
    if isinstance(schema, list):
        return [_with_references(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            copy[key] = "#/$defs/parameters" + value[1:]
        else:
            copy[key] = value if key in ("enum", "const", "default", "examples") else _with_references(value)
    return copy


def properties(schema: Schema) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, schema and whether it is required, of each property that is named, in the schema's order."""
    named = schema.get("properties") or {}
    required = schema.get("required") or []
    extra = schema.get("additionalProperties", True)
    for name in [*named, *(name for name in required if name not in named)]:
        yield name, named.get(name, extra), name in required
