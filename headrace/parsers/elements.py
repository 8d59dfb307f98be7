"""Makes JSON of a value that is written as elements, as MiniMax-M3 does: MARK<city>Rome MARK</city>, MARK<zip>7..."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.parsers.scalars import json_string
from headrace.parsers.typed_values import ValueSchema, json_of

MAX_DEPTH = 64
"""Elements within elements; what is deeper is text."""
_TAG = re.compile(r"\s*<([^<>]{1,256})>")
_ITEM, _TEXT = "item", "$text"


def element_json(mark: str, text: str, schema: ValueSchema) -> str:
    """Return the JSON of a value: of its text, or of the elements in it, each of whose tags stands behind the mark.

    An object is the elements of its members, an array an element for each item. Anything else is text as it stands,
    whose type the schema says.
    """
    first, *rest = text.split(mark)
    path = [_Element("", schema, [first])]
    for piece in rest:
        tag = _TAG.match(piece)
        inside = tag.group(1).strip() if tag else ""
        if inside.startswith("/"):
            ended = [place for place, element in enumerate(path) if place and element.name == inside[1:]]
            _close(path, ended[-1] if ended else len(path))
        elif inside and len(path) < MAX_DEPTH:
            path.append(_Element(inside, path[-1].schema_of(inside)))
        else:
            tag = None
        path[-1].texts.append(piece[tag.end() :] if tag else mark + piece)
    _close(path, 1)
    return path[0].json()


@dataclass
class _Element:
    """One element, as far as it was read."""

    name: str
    schema: ValueSchema
    texts: list[str] = field(default_factory=list)
    members: list[tuple[str, str]] = field(default_factory=list)
    """Name and JSON of the elements within it."""

    def schema_of(self, name: str) -> ValueSchema:
        """Return what is said of an element that comes next within it."""
        member = self.schema.member(name)
        return member if member.schemas else self.schema.item(len(self.members))

    def json(self) -> str:
        """Return its value: of the elements within it, or of its text."""
        types, values = self.schema.types
        text = "".join(self.texts)
        if not self.members:
            empty = "" if text.strip() or "string" in types else "{}" if "object" in types else "[]"
            if empty and types & {"object", "array"}:
                return empty
            return json_of(text, types, values, guess=bool(self.schema.schemas))
        # The schema says if it is an array; else the name that the chat template gives to items does.
        is_array = "array" in types if len(types & {"array", "object"}) == 1 else {_ITEM} == {*dict(self.members)}
        if is_array:
            return _array([value for _, value in self.members])
        found: dict[str, list[str]] = {}
        for name, value in self.members:
            found.setdefault(name, []).append(value)
        if text.strip():
            found.setdefault(_TEXT, []).append(json_string(text))
        pairs = (f"{json_string(name)}: {some[0] if len(some) == 1 else _array(some)}" for name, some in found.items())
        return f"{{{', '.join(pairs)}}}"


def _array(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


def _close(path: list[_Element], place: int) -> None:
    """End the element at this place of a path, and those within it."""
    while len(path) > place:
        closed = path.pop()
        path[-1].members.append((closed.name, closed.json()))
