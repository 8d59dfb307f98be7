"""Writes what a JSON schema does not accept as another schema, for `not`, `if` and `oneOf`, which llguidance lacks.

A complement may leave out some values (never add one): then fewer answers are possible, and all of them are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from headrace.structured_outputs.formats import FORMATS, NATIVE_FORMATS
from headrace.structured_outputs.overlap import MAX_LEVELS, TYPES, Resolve, type_of

MAX_TEXT = 128
"""Characters of a text that must not be the value."""
WITHOUT_COMPLEMENT = frozenset((
    "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties", "dependencies",
    "dependentRequired", "dependentSchemas", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains",
    "uniqueItems", "pattern", "format", "multipleOf", "if", "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Keywords whose complement cannot be written here. All that are named nowhere are annotations."""
_SAYS_NOTHING = {"uniqueItems": False, "additionalProperties": True, "additionalItems": True, "items": True}


class NoComplement(Exception):
    """Names the keyword whose complement cannot be written."""


def negate(schema: Any, resolve: Resolve, names: Collection[str] = (), level: int = 0) -> Any:
    """Return a schema of values that another does not accept. `names`: property names that matter: of the objects with
    a property that `additionalProperties` forbids, those with one of these names are found. Raises NoComplement."""
    if isinstance(schema, bool):
        return not schema
    if level > MAX_LEVELS:
        raise NoComplement("$ref")

    def other(one: Any) -> Any:
        return negate(one, resolve, names, level + 1)

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
        elif keyword in ("enum", "const"):
            options.append(_other_values(value if keyword == "enum" else [value]))
        elif keyword == "properties":
            options += [
                {"type": "object", "properties": {name: unlike}, "required": [name]}
                for name, one in value.items()
                if (unlike := other(one)) is not False
            ]
        elif keyword == "additionalProperties" and value is False and not schema.get("patternProperties"):
            known = schema.get("properties", {})
            options += [{"type": "object", "required": [name]} for name in names if name not in known]
        elif keyword in _SIMPLE:
            options += _SIMPLE[keyword](value)
        elif keyword == "format" and value not in NATIVE_FORMATS and value not in FORMATS:
            continue  # a note to the reader
        elif keyword in WITHOUT_COMPLEMENT and value is not _SAYS_NOTHING.get(keyword):
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
