"""Finds what `$ref` in a JSON schema refers to, within the schema alone: no other document is ever read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from headrace.errors import RequestError, quoted

NOT_SCHEMAS = frozenset(("enum", "const", "default", "examples", "example"))
"""Keywords whose values are data, in which `$id` means nothing."""


class Placed(NamedTuple):
    """Holds a schema with its path in the whole."""

    schema: Any
    path: str


class References:
    """Follows the references of one schema."""

    def __init__(self, root: Any, path: str) -> None:
        """Raises RequestError for references within a part that has an address (`$id`) of its own: what they refer to
        is counted from there."""
        self._root = Placed(root, path)
        self._address = _address_of(root).partition("#")[0]
        waiting = [(self._root, False)]
        while waiting:
            (value, where), elsewhere = waiting.pop()
            if isinstance(value, list):
                waiting += [(Placed(item, f"{where}[{index}]"), elsewhere) for index, item in enumerate(value)]
            elif isinstance(value, Mapping):
                elsewhere = elsewhere or (value is not root and _address_of(value) != "")
                if elsewhere and isinstance(value.get("$ref"), str):
                    message = f"{where}.$ref is not supported within a schema that has a `$id` of its own"
                    raise RequestError(message, path.partition(".")[0])
                waiting += [
                    (Placed(item, f"{where}.{key}"), elsewhere) for key, item in value.items() if key not in NOT_SCHEMAS
                ]

    def resolve(self, reference: object, path: str) -> Placed:
        """Return what a reference refers to. Raises RequestError, naming `path`, if that is no part of the schema."""
        field = path.partition(".")[0]
        if not isinstance(reference, str):
            raise RequestError(f"{path} must be a text, got {quoted(reference)}", field)
        address, _, pointer = reference.partition("#")
        if address not in ("", self._address):
            raise RequestError(
                f"{path}: {quoted(reference)} refers to another document; none is read: put it into `$defs`", field
            )
        value, where = self._root
        if pointer and not pointer.startswith("/"):
            raise RequestError(f"{path}: {quoted(reference)} is an anchor; a path as '#/$defs/name' is taken", field)
        for part in unquote(pointer).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and len(key) < 8 and int(key) < len(value):
                value = value[int(key)]
            else:
                raise RequestError(f"{path}: {quoted(reference)} refers to nothing", field)
            where = f"{where}.{key}"
        return Placed(value, where)


def _address_of(schema: Any) -> str:
    """Return the address that a schema gives itself; one that is only a fragment is none."""
    found = schema.get("$id", schema.get("id", "")) if isinstance(schema, Mapping) else ""
    return found if isinstance(found, str) and not found.startswith("#") else ""


def stack_of(uses: Mapping[str, set[str]], levels: Mapping[str, int]) -> int:
    """Return a bound on how deep llguidance recurses: a crash of its stack would be one of the process."""
    used_by: dict[str, list[str]] = {name: [] for name in levels}
    left = {name: len(uses.get(name, ())) for name in levels}
    for name, used in uses.items():
        for one in used:
            used_by[one].append(name)
    deep = dict.fromkeys(levels, 0)  # with all that a definition refers to, for those that lead to no circle
    free = [name for name, count in left.items() if not count]
    for name in free:
        deep[name] = levels[name] + max((deep[one] for one in uses.get(name, ())), default=0)
        for user in used_by[name]:
            left[user] -= 1
            if not left[user]:
                free.append(user)
    return max(deep.values()) + sum(levels[name] for name, count in left.items() if count)
