"""Writes what a JSON schema does not accept as another schema, for `not` and `oneOf`, which llguidance lacks.

A complement may leave out some values (never add one): then fewer answers are possible, and all of them are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.structured_outputs.overlap import MAX_LEVELS, TYPES, Resolve

WITHOUT_COMPLEMENT = frozenset((
    "patternProperties", "propertyNames", "additionalProperties", "dependencies", "dependentRequired", "if", "enum",
    "dependentSchemas", "items", "prefixItems", "additionalItems", "contains", "pattern", "format", "multipleOf",
    "const", "uniqueItems",
))  # fmt: skip
"""Keywords whose complement cannot be written here; of schemas that are true or false, nothing is said."""


class NoComplement(Exception):
    """Names the keyword whose complement cannot be written."""


def negate(schema: Any, resolve: Resolve, level: int = 0) -> Any:
    """Return a schema of values that another does not accept; False, if there are none. Raises NoComplement."""
    if isinstance(schema, bool):
        return not schema
    if level > MAX_LEVELS:
        raise NoComplement("$ref")

    def other(one: Any) -> Any:
        return negate(one, resolve, level + 1)

    options: list[Any] = []
    for keyword, value in schema.items():
        if keyword == "$ref":
            options.append(other(resolve(schema)))
        elif keyword == "allOf":
            options += [other(one) for one in value]
        elif keyword in ("anyOf", "oneOf"):  # of what fits several options of `oneOf`, nothing is said
            options.append({"allOf": [other(one) for one in value]})
        elif keyword == "not":
            options.append(value)
        elif keyword == "properties":
            options += [
                {"type": "object", "properties": {name: unlike}, "required": [name]}
                for name, one in value.items()
                if (unlike := other(one)) is not False
            ]
        elif keyword in _SIMPLE:
            options += _SIMPLE[keyword](value)
        elif keyword in WITHOUT_COMPLEMENT and (keyword == "uniqueItems" or not isinstance(value, bool)):
            raise NoComplement(keyword)
    options = [option for option in options if option is not False]
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


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
