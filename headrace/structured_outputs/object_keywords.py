"""Rewrites keywords of objects that llguidance lacks: each becomes schemas that must hold beside the rest."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.structured_outputs.difference import as_python, common, regions
from headrace.structured_outputs.formats import FORMATS, NATIVE_FORMATS
from headrace.structured_outputs.limits import MAX_ARRANGED
from headrace.structured_outputs.pattern import Unreadable
from headrace.structured_outputs.references import Placed
from headrace.structured_outputs.regex import checked_pattern, checked_patterns

if TYPE_CHECKING:
    from headrace.structured_outputs.schema import Rewriter

NOTES = frozenset(("type", "title", "description", "$comment", "default", "examples"))
"""Keywords that say nothing of which names fit."""
MAX_APART = 4
"""Patterns of one `patternProperties` that are looked at for names that several of them find."""
MAX_OPTIONAL = 5
"""Properties that may be left out beside others that are not named, where all are counted."""
MAX_WAYS = 64
"""Ways in which schemas that stand beside each other may name properties."""
MAX_DEPTH = 12
"""Schemas within schemas in which such names are looked for."""


def dependencies(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Return that a property which brings others, or a schema, with it is absent, or they are there."""
    found = []
    for name, needed in self.object_of(value, where).items():
        names = [needed] if isinstance(needed, str) else needed
        also = Placed(needed, f"{where}.{name}")
        there = {"required": [name, *names]} if isinstance(names, list) else {"allOf": [{"required": [name]}, also]}
        found.append({"anyOf": [{"properties": {name: False}}, there]})
    return found


def by_names(schema: Mapping[str, Any], keyword: str, count: Any) -> list[dict[str, Any]] | None:
    """Return the ways, by which named properties are there, in which `minProperties` or `maxProperties` holds. There
    are none if it always does. None: llguidance counts them, as it does where no named property may be left out."""
    named, required = schema.get("properties"), schema.get("required")
    if keyword not in ("minProperties", "maxProperties") or not isinstance(named, Mapping) or not named:
        return None
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    optional = [name for name in named if name not in needed]
    left = min(count - len(needed), len(optional) + 1)
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if left <= 0 if keyword == "minProperties" else closed and left >= len(optional):
        return []
    if left < 0 or not optional:
        return None
    if not closed and len(optional) <= MAX_OPTIONAL:
        # of the others at most one may be needed: llguidance counts a name that comes twice as two
        shortest = max(left - 1, 0) if keyword == "minProperties" else 0
        lengths = range(shortest, len(optional) + 1)
        subsets = [some for length in lengths for some in itertools.combinations(optional, length)]
        return [
            {"properties": {name: name in some for name in optional}, "required": [*some], keyword: count}
            for some in subsets
        ]
    if not 0 < math.comb(len(optional), left) * len(named) <= MAX_ARRANGED:
        return None
    if keyword == "minProperties":
        return [{"required": [*some]} for some in itertools.combinations(optional, left)]
    return [
        {"properties": {name: name in needed or name in some for name in named}, "additionalProperties": False}
        for some in itertools.combinations(optional, left)
    ]


def apart(patterns: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return patterns of which no name fits two, as llguidance wants them, each with the places of those of `patterns`
    that find its names. Of many patterns, or long ones, only equal ones are found."""
    places: dict[str, list[int]] = {}
    for place, pattern in enumerate(patterns):
        places.setdefault(pattern, []).append(place)
    alone = [(pattern, tuple(some)) for pattern, some in places.items()]
    if not 1 < len(alone) <= MAX_APART:
        return alone
    try:
        found = regions([*places])
    except Unreadable:
        return alone
    if all(len(some) == 1 for _, some in found):
        return alone
    return [(pattern, tuple(one for place in some for one in alone[place][1])) for pattern, some in found]


def property_names(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Return `patternProperties` and `properties`, without others, of the names that a schema allows."""
    names = self.resolve(base, where, value)
    if names is False:
        return [{"properties": {}, "additionalProperties": False}]
    rest, known = schema.get("additionalProperties", True), self.object_of(schema.get("properties", {}), where)
    if isinstance(names, Mapping) and names.keys() - NOTES in ({"enum"}, {"const"}):
        allowed = self.list_of(names.get("enum", [names.get("const")]), where)
        texts = [name for name in allowed if isinstance(name, str)]
        return [{"properties": {name: known.get(name, rest) for name in texts}, "additionalProperties": False}]
    pattern = _pattern_of_names(self, names, where)
    if pattern is None:
        return []
    fitting = {name: re.search(as_python(pattern), name) is not None for name in known}
    return [{"properties": fitting, "patternProperties": {pattern: True}, "additionalProperties": False}]


def with_patterns_of_names(self: Rewriter, schema: Mapping[str, Any], base: str, path: str) -> Mapping[str, Any]:
    """Return a schema in which `patternProperties` are those whose names `propertyNames` allows too."""
    where = f"{path}.propertyNames"
    pattern = _pattern_of_names(self, self.resolve(base, where, schema["propertyNames"]), where)
    others = {key: value for key, value in schema.items() if key != "propertyNames"}
    if pattern is None:
        return others
    rest, known = schema.get("additionalProperties", True), self.object_of(schema.get("properties", {}), where)
    described = [*self.object_of(schema["patternProperties"], where).items()]
    if not isinstance(rest, bool):
        raise RequestError(f"{where} is not supported beside patternProperties and additionalProperties", self.field)
    patterns = [pattern, *(checked_pattern(one, where) for one, _ in described)]
    try:
        if len(patterns) > MAX_APART:
            raise Unreadable
        cut = regions(patterns)
    except Unreadable:
        raise RequestError(f"{where} is not supported beside these patternProperties", self.field) from None
    found: dict[str, Any] = {}
    for region, (first, *places) in cut:
        if first == 0:
            schemas = [Placed(described[place - 1][1], f"{path}.patternProperties") for place in places]
            found[region] = {"allOf": schemas} if schemas else rest
    fitting = {name: value if re.search(as_python(pattern), name) else False for name, value in known.items()}
    return {**others, "properties": fitting, "patternProperties": found, "additionalProperties": False}


def _pattern_of_names(self: Rewriter, names: Any, where: str) -> str | None:
    """Return the pattern of the names that a schema allows; None: it allows all."""
    refused = RequestError(f"{where} is not supported here", self.field)
    if names is True:
        return None
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        raise refused
    patterns = []
    for keyword in sorted(names.keys() - NOTES):
        if keyword == "pattern":
            patterns += checked_patterns(names["pattern"], f"{where}.pattern")
        elif keyword in ("minLength", "maxLength") and isinstance(names[keyword], int):
            patterns.append(f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$")
        elif keyword != "format" or not isinstance(names["format"], str):
            raise refused
        elif text := NATIVE_FORMATS.get(names["format"]) or FORMATS.get(names["format"]):
            patterns.append(f"^(?:{text.removeprefix('^').removesuffix('$')})$")
    try:
        found = common([*dict.fromkeys(patterns)]) if patterns else None
        re.compile(as_python(found or ""))
    except (re.error, Unreadable):
        raise refused from None
    return found


@dataclass(frozen=True)
class Named:
    """Says which properties schemas beside each other name if some conditions hold; `all_of_them`: any."""

    conditions: tuple[Any, ...] = ()
    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    all_of_them: bool = False

    def __add__(self, other: Named) -> Named:
        return Named(
            self.conditions + other.conditions,
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_of_them or other.all_of_them,
        )


def unevaluated_properties(self: Rewriter, schema: Mapping[str, Any], value: Any, base: str, where: str) -> list[Any]:
    """Return `unevaluatedProperties` as `additionalProperties` with the names of all schemas beside it that hold."""
    if value is True:
        return []
    own = {key: item for key, item in schema.items() if key != "unevaluatedProperties"}
    ways: list[Any] = []
    for way in _named(self, own, base, where):
        closed = {"properties": way.names, "patternProperties": way.patterns, "additionalProperties": value}
        ways.append({"allOf": [*way.conditions, *([] if way.all_of_them else [closed])]} if way.conditions else closed)
        if way.all_of_them and not way.conditions:
            return []
    return ways if len(ways) == 1 else [{"anyOf": ways}]


def _named(self: Rewriter, schema: Any, base: str, where: str, depth: int = 0) -> list[Named]:
    """Return ways that hold for any value that fits a schema, of which one at least must. Names may be missing."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return [Named()]

    def of(one: Any) -> list[Named]:
        return _named(self, one, base, where, depth + 1)

    own = Named(
        names=dict.fromkeys(self.object_of(schema.get("properties", {}), where), True),
        patterns=dict.fromkeys(self.object_of(schema.get("patternProperties", {}), where), True),
        all_of_them="additionalProperties" in schema or "unevaluatedProperties" in schema,
    )
    groups = [of(one) for one in self.list_of(schema.get("allOf", []), where)]
    if "$ref" in schema:
        groups.append(of(self.resolve(base, where, {"$ref": schema["$ref"]})))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            groups.append([Named((one,)) + way for one in self.list_of(schema[keyword], where) for way in of(one)])
    if "if" in schema:
        then = [
            Named((schema["if"],)) + one + other for one in of(schema["if"]) for other in of(schema.get("then", {}))
        ]
        unlike = Named(({"not": schema["if"]},) if "else" in schema else ())
        groups.append([*then, *(unlike + way for way in of(schema.get("else", {})))])
    found = [own]
    for group in groups:
        found = [one + way for one in found for way in group]
        if len(found) > MAX_WAYS:
            raise RequestError(
                f"{where} is not supported beside more than {MAX_WAYS} ways to name properties", self.field
            )
    return found
