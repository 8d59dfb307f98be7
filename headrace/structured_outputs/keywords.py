"""Rewrites keywords that llguidance lacks: each becomes schemas that must hold beside the rest, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.structured_outputs.formats import FORMATS, NATIVE_FORMATS
from headrace.structured_outputs.limits import MAX_ONE_OF
from headrace.structured_outputs.negation import NoComplement, negate
from headrace.structured_outputs.overlap import Resolve, disjoint, named_values
from headrace.structured_outputs.references import Placed

NOTES = frozenset(("type", "title", "description", "$comment", "default", "examples"))
"""Keywords that say nothing of which names fit."""


@dataclass(frozen=True)
class Keyword:
    """Describes a keyword where it stands in a schema."""

    schema: Mapping[str, Any]
    value: Any
    path: str
    resolve: Resolve

    def refusal(self, why: str) -> RequestError:
        """Return the error for a keyword that is not held."""
        return RequestError(f"{self.path} {why}", self.path.partition(".")[0])

    def negated(self, schema: Any) -> Any:
        """Return a schema of what another does not accept, or refuse this keyword."""
        try:
            return negate(schema, self.resolve)
        except NoComplement as error:
            raise self.refusal(f"is not supported here: what {error} does not accept cannot be described") from None


def list_of(value: Any, path: str) -> list[Any]:
    """Return a value that must be a list."""
    if not isinstance(value, list):
        raise RequestError(f"{path} must be a list, got {quoted(value)}", path.partition(".")[0])
    return value


def object_of(value: Any, path: str) -> Mapping[str, Any]:
    """Return a value that must be an object."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{path} must be an object, got {quoted(value)}", path.partition(".")[0])
    return value


def count_of(value: Any) -> int | None:
    """Return a count, which may be written as 2.0; None: it is no integer of at least 0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _not(keyword: Keyword) -> list[Any]:
    return [keyword.negated(keyword.value)]


def _one_of(keyword: Keyword) -> list[Any]:
    """Return `oneOf` as `anyOf` where no value fits two options; elsewhere each option excludes those it overlaps."""
    options, resolve = list_of(keyword.value, keyword.path), keyword.resolve
    placed = [Placed(one, f"{keyword.path}[{index}]") for index, one in enumerate(options)]
    resolved = [resolve(one) for one in options]
    values = [named_values(one) if isinstance(one, Mapping) else None for one in resolved]
    named = [value for one in values if one is not None for value in one]
    if None not in values and len(named) == len({*named}):
        return [{"anyOf": placed}]
    if len(options) > MAX_ONE_OF:
        raise keyword.refusal(f"has {len(options)} options; at most {MAX_ONE_OF} are told apart")
    merged = [_merged(keyword.schema, one) for one in resolved]
    parts = []
    for index, option in enumerate(placed):
        others = [
            Keyword(keyword.schema, other, option.path, resolve).negated(other)
            for place, other in enumerate(options)
            if place != index and not disjoint(merged[index], merged[place], resolve)
        ]
        parts.append({"allOf": [option, *others]} if others else option)
    return [{"anyOf": parts}]


def _merged(around: Mapping[str, Any], schema: Any) -> Any:
    """Return a schema with what is known from those around it, as far as it serves to tell it from others."""
    if not isinstance(schema, Mapping):
        return schema
    context = {key: around[key] for key in ("type", "required", "properties") if key in around}
    properties = {**context.get("properties", {}), **schema.get("properties", {})}
    if schema.get("additionalProperties") is False:
        properties = schema.get("properties", {})
    found = {**context, **schema, "properties": properties}
    found["required"] = [*context.get("required", ()), *schema.get("required", ())]
    return found


def _dependencies(keyword: Keyword) -> list[Any]:
    """Return that a property which brings others, or a schema, with it is absent, or they are there."""
    found = []
    for name, needed in object_of(keyword.value, keyword.path).items():
        names = [needed] if isinstance(needed, str) else needed
        also = Placed(needed, f"{keyword.path}.{name}")
        there = {"required": [name, *names]} if isinstance(names, list) else {"allOf": [{"required": [name]}, also]}
        found.append({"anyOf": [{"properties": {name: False}}, there]})
    return found


def _property_names(keyword: Keyword) -> list[Any]:
    """Return `properties` or `patternProperties`, without others, of the names that a schema allows."""
    names, schema = keyword.resolve(keyword.value), keyword.schema
    if isinstance(names, bool):
        return [] if names else [{"properties": {}, "additionalProperties": False}]
    rest, known = schema.get("additionalProperties", True), object_of(schema.get("properties", {}), keyword.path)
    said = sorted(object_of(names, keyword.path).keys() - NOTES)
    if said in (["enum"], ["const"]):
        allowed = list_of(names.get("enum", [names.get("const")]), keyword.path)
        texts = [name for name in allowed if isinstance(name, str)]
        return [{"properties": {name: known.get(name, rest) for name in texts}, "additionalProperties": False}]
    if names.get("type", "string") != "string" or known or schema.get("patternProperties"):
        raise keyword.refusal("is not supported beside properties, or for names that are no strings")
    if not said:
        return []
    if said == ["pattern"]:
        pattern = names["pattern"]
    elif said == ["format"] and (text := NATIVE_FORMATS.get(names["format"]) or FORMATS.get(names["format"])):
        pattern = f"^(?:{text.removeprefix('^').removesuffix('$')})$"
    elif {*said} <= {"minLength", "maxLength"} and all(count_of(names[one]) is not None for one in said):
        least, most = (count_of(names.get(one, "")) for one in ("minLength", "maxLength"))
        pattern = f"^[\\s\\S]{{{least or 0},{'' if most is None else most}}}$"
    else:
        raise keyword.refusal(f"is supported with one of pattern, format, lengths and enum; it has {', '.join(said)}")
    return [{"patternProperties": {pattern: True}, "additionalProperties": False}]


def _unique_items(keyword: Keyword) -> list[Any]:
    """Refuse what grammars cannot hold, which know nothing of equality: items that all differ, if there are several."""
    schema = keyword.schema
    if not isinstance(keyword.value, bool):
        raise keyword.refusal(f"must be true or false, got {quoted(keyword.value)}")
    if keyword.value and count_of(schema.get("maxItems")) not in (0, 1) and "array" in schema.get("type", "array"):
        raise keyword.refusal("is not supported but for arrays of at most one item")
    return []


REWRITTEN: dict[str, Callable[[Keyword], list[Any]]] = {
    "not": _not,
    "oneOf": _one_of,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "propertyNames": _property_names,
    "uniqueItems": _unique_items,
}
"""Keyword -> what makes schemas of it that must hold too."""
