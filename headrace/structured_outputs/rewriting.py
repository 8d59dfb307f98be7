"""Rewrites keywords that llguidance lacks: each becomes schemas that must hold beside the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.structured_outputs.array_keywords import contains, unevaluated_items
from headrace.structured_outputs.limits import MAX_ONE_OF
from headrace.structured_outputs.object_keywords import dependencies, property_names, unevaluated_properties
from headrace.structured_outputs.overlap import differ, disjoint, not_empty, share_only_empty
from headrace.structured_outputs.references import Placed

if TYPE_CHECKING:
    from headrace.structured_outputs.schema import Rewriter


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
        others: list[Any] = []
        for place, other in enumerate(options):
            if place == index or disjoint(merged[index], merged[place], resolved):
                continue
            if share_only_empty(merged[index], merged[place], resolved):
                others.append(not_empty(merged[index]))
            else:
                others.append(self.negated(other, base, f"{where}[{index}]", names))
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


REWRITTEN: dict[str, Callable[[Rewriter, Mapping[str, Any], Any, str, str], list[Any]]] = {
    "not": _not,
    "if": _if,
    "oneOf": _one_of,
    "dependencies": dependencies,
    "dependentRequired": dependencies,
    "dependentSchemas": dependencies,
    "propertyNames": property_names,
    "unevaluatedProperties": unevaluated_properties,
    "contains": contains,
    "unevaluatedItems": unevaluated_items,
}
"""Keyword -> what makes schemas of it that must hold too. They get the rewriter, the schema, the keyword's value, the
base of its references and its path."""
