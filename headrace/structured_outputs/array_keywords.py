"""Rewrites keywords of arrays that llguidance lacks: each becomes schemas that must hold beside the rest. What
`uniqueItems` says cannot be said so, and stays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError, quoted
from headrace.structured_outputs.limits import MAX_DIFFERENT
from headrace.structured_outputs.negation import TYPES, few_values
from headrace.structured_outputs.references import Placed

if TYPE_CHECKING:
    from headrace.structured_outputs.schema import Rewriter

MAX_PLACES = 8
"""Places, from the first, at which the items are that `contains` asks for."""
MAX_WAYS = 64
"""Ways in which they may stand there."""
_OTHERS = [name for name in TYPES if name != "array"]


def unique_items(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> bool:
    """Return whether the items of an array must differ, which unique_items.py holds. Raises RequestError where there
    are fewer values than there must be items."""
    if not isinstance(value, bool):
        raise RequestError(f"{where} must be true or false, got {quoted(value)}", self.field)
    least = schema.get("minItems", 0)
    if value and isinstance(least, int) and least > MAX_DIFFERENT:
        raise RequestError(f"{where} is supported for {MAX_DIFFERENT} items, got minItems {least}", self.field)
    values = few_values(self.resolve(base, where, schema.get("items", True)))
    closed = schema.get("type") == "array" and "prefixItems" not in schema
    if value and closed and values is not None and isinstance(least, int) and least > len(values):
        raise RequestError(f"{where}: nothing fits it: {least} items are wanted of {len(values)} values", self.field)
    return value


def count_of(value: Any) -> int | None:
    """Return a count, which may be written as 2.0; None: it is no integer of at least 0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def contains(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Return arrays whose first few items have those that must be there; where there may be but so many, no others fit
    the schema."""
    least, most = count_of(schema.get("minContains", 1)), count_of(schema.get("maxContains", 0))
    for name, count in (("minContains", least), ("maxContains", most)):
        if count is None:
            around, wrong = where.removesuffix("contains"), quoted(schema[name])
            raise RequestError(f"{around}{name} must be an integer of at least 0, got {wrong}", self.field)
    assert least is not None
    most = most if "maxContains" in schema else None
    if not least and most is None:
        return []
    if least > MAX_WAYS:
        raise RequestError(f"{where} is not supported with minContains above {MAX_WAYS}, got {least}", self.field)
    wanted, other = Placed(value, where), True if most is None else self.negated(value, base, where)
    for places in range(max(MAX_PLACES, least), least - 1, -1):
        counts = range(least, least + 1 if most is None else min(most, places) + 1)
        if sum(math.comb(places, count) for count in counts) <= MAX_WAYS:
            break
    ways: list[Any] = []
    for count in counts:
        for chosen in itertools.combinations(range(places), count):
            length = chosen[-1] + 1 if chosen else 0
            items = [wanted if place in chosen else other for place in range(length)]
            ways.append({"type": "array", "prefixItems": items, "items": other, "minItems": length})
    return _arrays(schema, ways)


def unevaluated_items(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Return `unevaluatedItems` as `items` behind the items that schemas beside it describe."""
    beside = sorted({"anyOf", "oneOf", "if", "contains"} & schema.keys())
    if beside:
        raise RequestError(f"{where} is not supported beside {', '.join(beside)}", self.field)
    known = _num_described(self, schema, base, where)
    return [] if value is True or known is None else [{"prefixItems": [True] * known, "items": value}]


def _num_described(self: Rewriter, schema: Any, base: str, where: str, depth: int = 0) -> int | None:
    """Return how many items, from the first, a schema describes; None: all."""
    if not isinstance(schema, Mapping) or depth > MAX_PLACES:
        return 0
    items = schema.get("items", schema.get("prefixItems", []))
    if "items" in schema and (not isinstance(items, list) or "additionalItems" in schema):
        return None  # without items in a list, additionalItems says nothing
    parts = [*self.list_of(schema.get("allOf", []), where)]
    if "$ref" in schema:
        parts.append(self.resolve(base, where, {"$ref": schema["$ref"]}))
    counts = [len(self.list_of(items, where))]
    for part in parts:
        count = _num_described(self, part, base, where, depth + 1)
        if count is None:
            return None
        counts.append(count)
    return max(counts)


def _arrays(schema: Mapping[str, Any], ways: list[Any]) -> list[Any]:
    """Return that an array is one of several; what is none need not be."""
    if schema.get("type") != "array":
        ways = [*ways, {"type": _OTHERS}]
    return ways if len(ways) == 1 else [{"anyOf": ways}]
