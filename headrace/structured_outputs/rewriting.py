"""Rewrites keywords that llguidance lacks: each becomes schemas that must hold beside the rest."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import RequestError
from headrace.structured_outputs.limits import MAX_ARRANGED, MAX_ONE_OF
from headrace.structured_outputs.negation import TYPES, differ, disjoint, few_values

if TYPE_CHECKING:
    from headrace.structured_outputs.schema import Rewriter


NOTES = frozenset(("type", "title", "description", "$comment", "default", "examples"))
"""Keywords that say nothing of which names fit."""


class Placed(NamedTuple):
    """Holds a schema that stands at a path of its own, within one that a keyword was rewritten to."""

    schema: Any
    path: str


SINCE = {
    "contains": 6, "propertyNames": 6, "if": 7, "minContains": 2019, "maxContains": 2019, "dependentRequired": 2019,
    "dependentSchemas": 2019, "unevaluatedProperties": 2019, "unevaluatedItems": 2019, "$recursiveRef": 2019,
    "$dynamicRef": 2020,
}  # fmt: skip
"""Keyword -> the draft that has brought it."""
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([3467])|draft/(2019|2020)-..)/schema#?")


def draft_of(root: Mapping[str, Any]) -> int:
    """Return the draft that a schema says it is written in; the newest, if it says nothing that is known."""
    match = _DRAFT.fullmatch(str(root.get("$schema", ""))[:100])
    return 2020 if match is None else int(match[1] or match[2])


def _not(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    return [self.negated(value, base, where)]


def _if(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    around, found = where.removesuffix("if"), []
    if "then" in schema:
        found.append({"anyOf": [Placed(schema["then"], around + "then"), self.negated(value, base, where)]})
    if "else" in schema:
        found.append({"anyOf": [Placed(value, where), Placed(schema["else"], around + "else")]})
    return found


def _one_of(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """`oneOf` is `anyOf` where no value fits two options; elsewhere each option excludes those it overlaps."""
    options = self.list_of(value, where)
    context = {key: schema[key] for key in ("type", "required", "properties") if key in schema}

    def resolved(one: Any) -> Any:
        return self.resolve(base, where, one)

    placed = [Placed(one, f"{where}[{index}]") for index, one in enumerate(options)]
    if differ([resolved(one) for one in options]):
        return [{"anyOf": placed}]
    if len(options) > MAX_ONE_OF:
        raise RequestError(f"{where} has {len(options)} options; at most {MAX_ONE_OF} are told apart", self.field)
    names = tuple(dict.fromkeys(name for one in options for name in _property_names(resolved(one))))
    merged = [_merged(context, resolved(one)) for one in options]
    parts = []
    for index, option in enumerate(placed):
        overlapping = [
            other
            for place, other in enumerate(options)
            if place != index and not disjoint(merged[index], merged[place], resolved)
        ]
        others = [self.negated(other, base, f"{where}[{index}]", names) for other in overlapping]
        parts.append({"allOf": [option, *others]} if others else option)
    return [{"anyOf": parts}]


def _merged(context: Mapping[str, Any], schema: Any) -> Any:
    """Return a schema with what is known from those around it, as far as it serves to tell it from others."""
    if not isinstance(schema, Mapping):
        return schema
    properties = {**context.get("properties", {}), **schema.get("properties", {})}
    if schema.get("additionalProperties") is False:
        properties = schema.get("properties", {})
    found = {**context, **schema, "properties": properties}
    found["required"] = [*context.get("required", ()), *schema.get("required", ())]
    return found


def _property_names(schema: Any) -> list[str]:
    return list(schema.get("properties", {})) if isinstance(schema, Mapping) else []


def _dependencies(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """A property that brings others, or a schema, with it is absent, or they are there."""
    found = []
    for name, needed in self.object_of(value, where).items():
        names = [needed] if isinstance(needed, str) else needed
        also = Placed(needed, f"{where}.{name}")
        there = {"required": [name, *names]} if isinstance(names, list) else {"allOf": [{"required": [name]}, also]}
        found.append({"anyOf": [{"properties": {name: False}}, there]})
    return found


def _property_names_schema(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Names that must fit a schema become `patternProperties` and `properties` without others."""
    names = self.resolve(base, where, value)
    if names is True or names == {} or names == {"type": "string"}:
        return []
    if not isinstance(names, Mapping) or "patternProperties" in schema:
        raise RequestError(f"{where} is not supported here", self.field)
    given = names.keys() - NOTES
    rest, known = schema.get("additionalProperties", True), schema.get("properties", {})
    if given in ({"enum"}, {"const"}):
        allowed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
        return [{"properties": {name: known.get(name, rest) for name in allowed}, "additionalProperties": False}]
    if given == {"pattern"} and not known:
        return [{"patternProperties": {names["pattern"]: rest}, "additionalProperties": False}]
    if given and given <= {"minLength", "maxLength"} and not known:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        pattern = f"^[\\s\\S]{{{least},{most}}}$"
        return [{"patternProperties": {pattern: rest}, "additionalProperties": False}]
    raise RequestError(f"{where} is not supported here", self.field)


def _unevaluated(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Without other schemas beside it, `unevaluatedProperties` is `additionalProperties`."""
    beside = {
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
        "not",
        "dependentSchemas",
        "dependencies",
        "additionalProperties",
    }
    if value is True:
        return []
    if beside & schema.keys():
        raise RequestError(f"{where} is not supported beside {', '.join(sorted(beside & schema.keys()))}", self.field)
    kept = {key: schema[key] for key in ("properties", "patternProperties") if key in schema}
    return [{**kept, "additionalProperties": value}]


def _unique_items(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Items that differ from each other, of a few values, are any arrangement of these."""
    if value is False or schema.get("maxItems", 2) in (0, 1):
        return []
    values = few_values(self.resolve(base, where, schema.get("items", True)))
    least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_ARRANGED)
    numbers = isinstance(least, int | float) and isinstance(most, int | float)
    if value is True and numbers and values is not None and len(values) <= MAX_ARRANGED and "prefixItems" not in schema:
        lengths = [length for length in range(len(values) + 1) if least <= length <= most]
        if sum(math.perm(len(values), length) for length in lengths) <= MAX_ARRANGED:
            arranged = {"enum": [list(some) for length in lengths for some in itertools.permutations(values, length)]}
            others = [name for name in TYPES if name != "array"]
            return [arranged if schema.get("type") == "array" else {"anyOf": [arranged, {"type": others}]}]
    why = f"is not supported but for items of an enum with at most {MAX_ARRANGED} arrangements"
    raise RequestError(f"{where} {why}", self.field)


REWRITTEN = {
    "not": _not,
    "if": _if,
    "oneOf": _one_of,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "propertyNames": _property_names_schema,
    "unevaluatedProperties": _unevaluated,
    "uniqueItems": _unique_items,
}
"""Keyword -> what makes schemas of it that must hold too."""
