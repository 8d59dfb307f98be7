"""Finds where in JSON of a schema the arrays are whose items must differ.

Where `anyOf` leaves several schemas for one value, an array must have different items if any of them says so: some
answers that fit the schema are then not possible, and none is that does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.structured_outputs.difference import as_python

_MAX_KNOWN = 4096
"""Places that are kept for each schema."""
_COMBINED = ("allOf", "anyOf")
_FEW = frozenset(("enum", "const", "pattern"))
"""Keywords that may leave a few values."""
_SHORT = 2
"""Characters of texts of which there may be a few."""


class Place:
    """Represents a place in JSON, as far as a schema tells it from others."""

    __slots__ = ("_schema", "_schemas", "runs_out", "unique")

    def __init__(self, schema: Places, schemas: tuple[Mapping[str, Any], ...]) -> None:
        self._schema = schema
        self._schemas = schemas
        self.unique = any(map(wants_unique, schemas))
        """Whether the items of an array must differ."""
        self.runs_out = self.unique and not all(map(_is_endless, schema.whole(_items(schemas))))
        """Whether there may be no item left that differs from all before."""

    def item(self, index: int) -> Place:
        """Return the place of an item of an array."""
        return self._schema.place(_items(self._schemas, index)) if self._schemas else self

    def named(self, name: str) -> Place:
        """Return the place of an object's property."""
        return self._schema.place(_named(self._schemas, name)) if self._schemas else self


class Places:
    """Knows the places of one schema, in the form that schema.py makes."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._known: dict[tuple[int, ...], Place] = {}
        self._matters: dict[int, bool] = {}
        self.start = self.place([schema])

    def place(self, schemas: Iterable[Any]) -> Place:
        """Return the place of a value that these schemas describe."""
        whole = tuple(one for one in self.whole(schemas) if self._has_unique(one))
        key = tuple(sorted({id(one) for one in whole}))
        found = self._known.get(key)
        if found is None:
            found = Place(self, whole)
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = found
        return found

    def whole(self, schemas: Iterable[Any]) -> list[Mapping[str, Any]]:
        """Return schemas with all that they refer to, or put together, for the same value."""
        found: dict[int, Mapping[str, Any]] = {}
        waiting = [*schemas]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Mapping) and id(one) not in found:
                found[id(one)] = one
                waiting += [part for keyword in _COMBINED for part in one.get(keyword, ())]
                waiting += self._referred(one)
        return [*found.values()]

    def _referred(self, schema: Mapping[str, Any]) -> list[Any]:
        if "$ref" not in schema:
            return []
        name = schema["$ref"].removeprefix("#/$defs/")
        return [self._root if name == "#" else self._root["$defs"][name]]

    def _has_unique(self, schema: Mapping[str, Any]) -> bool:
        """Return whether a schema, or one within, speaks of arrays whose items must differ."""
        if (found := self._matters.get(id(schema))) is not None:
            return found
        reached: dict[int, Mapping[str, Any]] = {}
        waiting: list[Any] = [schema]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Mapping) and id(one) not in reached:
                reached[id(one)] = one
                waiting += [*_inner(one), *self._referred(one)]
        answer = any(map(wants_unique, reached.values()))
        self._matters[id(schema)] = answer
        if not answer:
            self._matters.update(dict.fromkeys(reached, False))
        return answer


def has_unique(schema: Any) -> bool:
    """Return whether a schema, or one within it, wants arrays whose items differ."""
    return any(map(wants_unique, _all(schema)))


def without_unique(schema: Any) -> Any:
    """Return a schema without `uniqueItems`, which llguidance does not know."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs"):
            found[keyword] = {name: without_unique(one) for name, one in value.items()}
        elif keyword in ("prefixItems", *_COMBINED):
            found[keyword] = [without_unique(one) for one in value]
        elif keyword in ("items", "additionalProperties"):
            found[keyword] = without_unique(value)
        elif keyword != "uniqueItems":
            found[keyword] = value
    return found


def wants_unique(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema itself wants arrays whose items differ."""
    return (
        schema.get("uniqueItems") is True and schema.get("maxItems", 2) > 1 and "array" in schema.get("type", "array")
    )


def _all(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all within it."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting += [*_inner(one), *one.get("$defs", {}).values()]


def _inner(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that stand in a schema."""
    found = [part for keyword in ("prefixItems", *_COMBINED) for part in schema.get(keyword, ())]
    found += [part for keyword in ("properties", "patternProperties") for part in schema.get(keyword, {}).values()]
    return [*found, *(schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema)]


def _items(schemas: Iterable[Mapping[str, Any]], index: int | None = None) -> list[Any]:
    """Return what describes an item of an array: that at an index, or any."""
    found: list[Any] = []
    for one in schemas:
        first = one.get("prefixItems", ())
        if index is None:
            found += [*first, one.get("items", True)]
        else:
            found.append(first[index] if index < len(first) else one.get("items", True))
    return found


def _named(schemas: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return what describes a property."""
    found: list[Any] = []
    for one in schemas:
        fitting = [value for pattern, value in one.get("patternProperties", {}).items() if _finds(pattern, name)]
        if name in one.get("properties", {}):
            fitting.append(one["properties"][name])
        found += fitting or [one.get("additionalProperties", True)]
    return found


def _finds(pattern: str, name: str) -> bool:
    """Return whether a pattern may be found in a name."""
    try:
        return re.search(as_python(pattern), name) is not None
    except re.error:
        return True


def _is_endless(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema leaves endless values, as far as its own keywords say."""
    if _FEW & schema.keys() or schema.get("maxLength", _SHORT + 1) <= _SHORT:
        return False
    named = schema.get("type", "object")
    kinds = {named} if isinstance(named, str) else {*named}
    low, high = ({side, f"exclusive{side.capitalize()}"} & schema.keys() for side in ("minimum", "maximum"))
    return not kinds <= {"boolean", "null"} and not (kinds <= {"integer", "number"} and low and high)
