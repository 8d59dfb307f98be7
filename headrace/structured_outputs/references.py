"""Finds what `$ref` in a JSON schema refers to, within the schema alone: no other document is ever read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from headrace.errors import RequestError, quoted

NOT_SCHEMAS = frozenset(("enum", "const", "default", "examples", "example"))
"""Keywords whose values are data, in which `$id` means nothing."""


class Target(NamedTuple):
    """Represents what a reference refers to."""

    schema: Any
    base: str
    """The URI against which references in it are resolved."""
    path: str
    """Where it stands in the whole schema."""


class Placed(NamedTuple):
    """Holds a schema that stands at a path of its own, within one that a keyword was rewritten to."""

    schema: Any
    path: str


class References:
    """Knows the resources (`$id`) and anchors of one schema."""

    def __init__(self, root: Any, path: str) -> None:
        self._resources: dict[str, Target] = {}
        self._anchors: dict[tuple[str, str], Target] = {}
        self.base = ""
        self._resources[""] = Target(root, "", path)
        self._index(root, "", path)
        identity = _identity(root)
        if identity is not None:
            self.base = urldefrag(identity)[0]
        self._resources.setdefault(self.base, Target(root, self.base, path))

    @property
    def is_one_resource(self) -> bool:
        """Return whether the schema has no other schema with an address of its own in it: a reference by
        `$dynamicRef` or `$recursiveRef` then refers to what one by `$ref` does."""
        return len(self._resources) <= 1 + (self.base != "")

    def resolve(self, reference: object, base: str, path: str) -> Target:
        """Return what a reference in a schema with this base refers to. Raises RequestError, naming `path`, if that is
        no part of the schema."""
        field = path.partition(".")[0]
        if not isinstance(reference, str):
            raise RequestError(f"{path} must be a text, got {quoted(reference)}", field)
        try:
            # urljoin knows no `urn:`, in which a fragment is all that can be relative.
            whole = base + reference if reference.startswith("#") else urljoin(base, reference)
            uri, fragment = urldefrag(whole)
        except ValueError:
            raise RequestError(f"{path}: {quoted(reference)} is no URI", field) from None
        resource = self._resources.get(uri)
        if resource is None:
            raise RequestError(
                f"{path}: {quoted(reference)} refers to another document; none is read: put it into `$defs`", field
            )
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            anchor = self._anchors.get((uri, fragment))
            if anchor is None:
                raise RequestError(f"{path}: {quoted(reference)} names an anchor that the schema does not have", field)
            return anchor
        return self._walk(resource, fragment, path, reference)

    def _walk(self, resource: Target, pointer: str, path: str, reference: str) -> Target:
        value, base, where = resource
        for part in unquote(pointer[1:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and len(key) < 8 and int(key) < len(value):
                value = value[int(key)]
            else:
                raise RequestError(f"{path}: {quoted(reference)} refers to nothing", path.partition(".")[0])
            where = f"{where}.{key}"
            if isinstance(value, Mapping) and (identity := _identity(value)) is not None:
                base = urldefrag(urljoin(base, identity))[0]
        return Target(value, base, where)

    def _index(self, root: Any, base: str, path: str) -> None:
        waiting = [(root, base, path)]
        while waiting:
            value, base, path = waiting.pop()
            if isinstance(value, list):
                waiting += [(item, base, f"{path}[{index}]") for index, item in enumerate(value)]
            if not isinstance(value, Mapping):
                continue
            identity = _identity(value)
            if identity is not None:
                base, anchor = urldefrag(urljoin(base, identity))
                if anchor:
                    self._anchors[base, anchor] = Target(value, base, path)
                if not identity.startswith("#"):
                    self._resources.setdefault(base, Target(value, base, path))
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(value.get(name), str):
                    self._anchors[base, value[name]] = Target(value, base, path)
            waiting += [(item, base, f"{path}.{key}") for key, item in value.items() if key not in NOT_SCHEMAS]


def identity_of(schema: Mapping[str, Any], base: str) -> str:
    """Return the base for references within a schema that stands where the base is `base`."""
    identity = _identity(schema)
    return base if identity is None else urldefrag(urljoin(base, identity))[0]


def _identity(schema: Any) -> str | None:
    if not isinstance(schema, Mapping):
        return None
    for name in ("$id", "id"):
        value = schema.get(name)
        if isinstance(value, str):
            try:
                urljoin("", value)
            except ValueError:
                continue
            return value
    return None


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
