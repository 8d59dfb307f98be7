"""Turns a JSON schema into the grammar of what it accepts. A keyword that cannot be held is refused by name and path.

llguidance compiles most of JSON Schema exactly and refuses some of it. Here a schema is rewritten so that it holds
more: `not`, `oneOf`, `dependencies` and others become `anyOf` and `allOf`; references become one flat `$defs`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.structured_outputs.drafts import as_newest, draft_of
from headrace.structured_outputs.formats import FORMATS, NATIVE_FORMATS, REFUSED_FORMATS
from headrace.structured_outputs.grammar import Grammar, JsonOptions, Rules
from headrace.structured_outputs.keywords import REWRITTEN, Keyword, count_of, list_of, object_of
from headrace.structured_outputs.limits import (
    MAX_BOUND,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_LEVELS,
    MAX_NODES,
    MAX_PROPERTIES,
    MAX_REPEAT,
    MAX_RESOLVED,
    MAX_STACK,
    check_size,
    check_text,
    decoded,
)
from headrace.structured_outputs.references import Placed, References, stack_of
from headrace.structured_outputs.regex import checked_pattern, checked_patterns

REFUSED = frozenset((
    "extends", "disallow", "divisibleBy", "contains", "if", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Keywords that are not held, of which the first three are of draft 3."""
COPIED = frozenset((
    "type", "const", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
))  # fmt: skip
"""Keywords that llguidance holds as they are."""
COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
PATTERN_CHARS = 20
"""Characters of a pattern that count as one part of a schema: what `not` makes of a pattern may be long."""
MAX_OPTIONAL = 64
"""Properties of which one at least may have to be there."""
MAX_TRIED = 100
"""Parts of a schema that are tried one by one to find which of them llguidance refuses."""


def grammar_of_schema(schema: object, path: str, options: JsonOptions | None = None) -> Grammar:
    """Return the grammar of a JSON schema, as an object or as its text. Raises RequestError naming keyword and path for
    what it cannot hold."""
    options = options or JsonOptions()
    return grammar_of_checked(checked_schema(schema, path, options), options)


def grammar_of_checked(schema: Mapping[str, Any], options: JsonOptions) -> Grammar:
    """Return the grammar of a schema that `checked_schema` made."""
    rules = Rules()
    return rules.grammar(rules.json(schema, options))


def checked_schema(
    schema: object, path: str, options: JsonOptions, made: dict[int, tuple[str, dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """Return a schema in the form that llguidance holds wholly. Raises RequestError as `grammar_of_schema` does.
    `made` receives all of its parts, each with the path of what it is made of."""
    field = path.partition(".")[0]
    schema = decoded(schema, path)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RequestError(f"{path} must be a JSON schema (an object), got {quoted(schema)}", field)
    check_size(schema, path)
    return Rewriter(schema, path, options, {} if made is None else made).whole()


class Rewriter:
    """Rewrites one schema. References become `#/$defs/dN`, each defined once and only if it is used."""

    def __init__(
        self, root: dict[str, Any], path: str, options: JsonOptions, made: dict[int, tuple[str, dict[str, Any]]]
    ) -> None:
        self._made = made
        self.draft = draft_of(root)
        self._root: dict[str, Any] = as_newest(root, self.draft)
        self._path = path
        self.field = path.partition(".")[0]
        self._options = options
        self._references = References(self._root, path)
        self._names: dict[int | str, str] = {}
        """id of a schema that is referred to (a path, if it is true or false) -> its name in `$defs`."""
        self._waiting: list[tuple[str, Any, str]] = []
        self._current = "#"
        """The definition that is being rewritten; "#" is the whole."""
        self._uses: dict[str, set[str]] = {}
        """Definition -> those it refers to."""
        self._levels: dict[str, int] = {}
        """Definition -> how deep schemas are nested in it."""
        self._count = 0
        self._num_resolved = 0

    def whole(self) -> dict[str, Any]:
        """Return the schema, rewritten."""
        found = self._node(self._root, self._path)
        definitions: dict[str, Any] = {}
        while self._waiting:
            self._current, schema, path = self._waiting.pop()
            definitions[self._current] = self._node(schema, path)
        if stack_of(self._uses, self._levels) > MAX_STACK:
            raise RequestError(f"{self._path}: its references are nested more than {MAX_STACK} deep", self.field)
        whole = found if isinstance(found, dict) else {"enum": []} if found is False else {}
        return {**whole, "$defs": definitions} if definitions else whole

    def _refuse(self, path: str, keyword: str, why: str = "is not supported") -> RequestError:
        return RequestError(f"{path}.{keyword} {why}", self.field)

    def _node(self, schema: Any, path: str, depth: int = 0) -> Any:
        self._count += 1
        self._levels[self._current] = max(depth + 1, self._levels.get(self._current, 0))
        if self._count > MAX_NODES or depth > MAX_LEVELS:
            raise RequestError(f"{self._path} has more than {MAX_NODES} parts, or some {MAX_LEVELS} deep", self.field)
        if isinstance(schema, Placed):
            schema, path = schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise RequestError(f"{path} must be a schema (an object), got {quoted(schema)}", self.field)
        found: dict[str, Any] = {}
        also: list[Any] = []
        """What else must hold."""
        bases: list[Any] = []
        """What stands before `properties` by reference: its properties come first."""
        for keyword, value in schema.items():
            where = f"{path}.{keyword}"
            if keyword in COPIED:
                self._copy(schema, keyword, value, path, found)
            elif keyword == "enum":
                found["enum"] = self._values(value, where)
            elif keyword == "$ref":
                before = bases if _comes_first(schema, keyword) else also
                before.append({"$ref": self._refer(value, where)})
            elif keyword in ("properties", "patternProperties"):
                found[keyword] = self._properties(keyword, value, where, depth)
            elif keyword == "additionalProperties":
                found[keyword] = self._node(value, where, depth + 1)
            elif keyword in ("items", "prefixItems", "additionalItems"):
                self._items(schema, keyword, value, where, depth, found)
            elif keyword in ("allOf", "anyOf"):
                parts = [
                    self._node(one, f"{where}[{index}]", depth + 1) for index, one in enumerate(list_of(value, where))
                ]
                if keyword == "anyOf":
                    also.append({"anyOf": parts})
                    continue
                first = _comes_first(schema, keyword)
                for one, part in zip(value, parts, strict=True):
                    (bases if first and isinstance(one, Mapping) and "$ref" in one else also).append(part)
            elif keyword == "pattern":
                found["pattern"], *others = checked_patterns(value, where)
                also += [{"pattern": pattern} for pattern in others]
                self._count += sum(map(len, [found["pattern"], *others])) // PATTERN_CHARS
            elif keyword == "format":
                self._format(schema, value, where, found, also)
            elif keyword in REWRITTEN:
                also += self._rewritten(schema, keyword, value, where, depth)
            elif keyword in REFUSED:
                raise self._refuse(path, keyword)
        if not self._options.additional_properties and "properties" in found:
            found.setdefault("additionalProperties", False)
        if bases or also:
            parts = [*bases, *([found] if found else []), *also]
            found = parts[0] if len(parts) == 1 else {"allOf": parts}
        if isinstance(found, dict):
            self._made[id(found)] = (path, found)
        return found

    def _rewritten(self, schema: Mapping[str, Any], keyword: str, value: Any, where: str, depth: int) -> list[Any]:
        """Return what else must hold for a keyword in REWRITTEN."""
        try:
            made = REWRITTEN[keyword](Keyword(schema, value, where, lambda one: self._resolve(where, one)))
        except (AttributeError, TypeError):  # what is within has not been looked at yet
            raise RequestError(f"{where} has a keyword with a value that it cannot have", self.field) from None
        return [self._node(one, where, depth + 1) for one in made]

    def _copy(self, schema: Mapping[str, Any], keyword: str, value: Any, path: str, found: dict[str, Any]) -> None:
        where = f"{path}.{keyword}"
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):  # as in draft 4
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                found.pop(bound, None)
                found[keyword] = schema[bound]
            return
        if keyword in ("minimum", "maximum") and schema.get("exclusive" + keyword.capitalize()) is True:
            return
        if keyword in COUNTS:
            given, value = value, count_of(value)
            if value is None:
                raise self._refuse(path, keyword, f"must be an integer of at least 0, got {quoted(given)}")
            if keyword.startswith("max"):
                if value > MAX_REPEAT:
                    return  # no answer is that long
            elif value > MAX_REPEAT:
                raise self._refuse(path, keyword, f"must be at most {MAX_REPEAT}, got {quoted(value)}")
            if keyword.endswith("Properties"):
                needed = {*map(str, list_of(schema.get("required", []), where))}
                if keyword == "minProperties" and value <= len(needed):
                    return
                optional = object_of(schema.get("properties", {}), where).keys() - needed
                if keyword == "minProperties" and value == len(needed) + 1 and 0 < len(optional) <= MAX_OPTIONAL:
                    found["anyOf"] = [{"required": [name]} for name in sorted(optional)]
                    return
                if optional:
                    raise self._refuse(path, keyword, "is not supported beside properties that may be left out")
        elif keyword in NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._refuse(path, keyword, f"must be a number, got {quoted(value)}")
            value = self._bound(keyword, value, path)
            if keyword == "multipleOf" and value <= 0:
                raise self._refuse(path, keyword, f"must be above 0, got {quoted(value)}")
        elif keyword == "required":
            if isinstance(value, bool):
                raise self._refuse(path, keyword, "must be a list of names, as since draft 4")
            for name in list_of(value, where):
                check_text(name, where)
        elif keyword == "type":
            known = ("null", "boolean", "integer", "number", "string", "array", "object")
            named = [value] if isinstance(value, str) else value
            if not isinstance(named, list) or not named or any(name not in known for name in named):
                raise self._refuse(path, keyword, f"must be one or a list of {', '.join(known)}; got {quoted(value)}")
        elif keyword == "const":
            self._check_integers(value, where)
        found[keyword] = value

    def _bound(self, keyword: str, value: int | float, path: str) -> int | float:
        """Return a bound that llguidance can hold: of those that it cannot, as of 64 bits, a nearer one."""
        if abs(value) <= MAX_BOUND:
            return value
        if (value > 0) != (keyword in ("maximum", "exclusiveMaximum")):
            raise self._refuse(path, keyword, f"is supported up to {MAX_BOUND} from 0, got {quoted(value)}")
        return MAX_BOUND if value > 0 else -MAX_BOUND

    def _values(self, value: Any, where: str) -> list[Any]:
        values = list_of(value, where)
        self._check_integers(values, where)
        if len(values) > MAX_CHOICES:
            raise RequestError(f"{where} has {len(values)} values; at most {MAX_CHOICES} are taken", self.field)
        return values

    def _check_integers(self, value: Any, where: str) -> None:
        """Refuse values with integers that llguidance would round."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise RequestError(f"{where} holds {quoted(value)}; integers of 64 bits are taken", self.field)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._check_integers(item, where)

    def _refer(self, reference: Any, where: str) -> str:
        target = self._references.resolve(reference, where)
        uses = self._uses.setdefault(self._current, set())
        key = target.path if isinstance(target.schema, bool) else id(target.schema)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"d{len(self._names)}"
            self._waiting.append((name, target.schema, target.path))
        uses.add(name)
        return f"#/$defs/{name}"

    def _properties(self, keyword: str, value: Any, where: str, depth: int) -> dict[str, Any]:
        properties = object_of(value, where)
        if len(properties) > MAX_PROPERTIES:
            raise RequestError(f"{where} has {len(properties)} names; at most {MAX_PROPERTIES} are taken", self.field)
        if keyword == "patternProperties":
            patterned: dict[str, list[Any]] = {}
            for name, one in properties.items():
                node = self._node(one, f"{where}.{name}", depth + 1)
                patterned.setdefault(checked_pattern(name, where), []).append(node)
            return {name: nodes[0] if len(nodes) == 1 else {"allOf": nodes} for name, nodes in patterned.items()}
        return {name: self._node(one, f"{where}.{name}", depth + 1) for name, one in properties.items()}

    def _items(
        self, schema: Mapping[str, Any], keyword: str, value: Any, where: str, depth: int, found: dict[str, Any]
    ) -> None:
        if isinstance(value, list):  # a list in `items`, as before 2020-12, is what `prefixItems` is now
            parts = [self._node(one, f"{where}[{index}]", depth + 1) for index, one in enumerate(value)]
            found["prefixItems"] = parts
        elif keyword == "items" or isinstance(schema.get("items"), list):
            found["items"] = self._node(value, where, depth + 1)
        elif keyword == "prefixItems":
            raise RequestError(f"{where} must be a list, got {quoted(value)}", self.field)

    def _format(
        self, schema: Mapping[str, Any], value: Any, where: str, found: dict[str, Any], also: list[Any]
    ) -> None:
        """Hold the formats that JSON Schema defines. Others are notes to a reader, by its specification."""
        check_text(value, where)
        if value in REFUSED_FORMATS:
            raise RequestError(f"{where} {value!r} is not supported", self.field)
        if value in NATIVE_FORMATS:
            found["format"] = value
        elif value in FORMATS and "pattern" in schema:
            also.append({"pattern": FORMATS[value]})
        elif value in FORMATS:
            found["pattern"] = FORMATS[value]

    def _resolve(self, where: str, schema: Any) -> Any:
        """Return a schema without a `$ref` at its top, for those who look into it."""
        self._num_resolved += 1
        if self._num_resolved > MAX_RESOLVED:
            raise RequestError(f"{self._path}: its references make it too large to be compared in parts", self.field)
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            schema = self._references.resolve(schema["$ref"], where).schema
        raise RequestError(f"{where}: its references lead in a circle", self.field)


def _comes_first(schema: Mapping[str, Any], keyword: str) -> bool:
    """Return whether a keyword stands before `properties`, whose names follow those that it brings."""
    keywords = [*schema]
    return "properties" in schema and keywords.index(keyword) < keywords.index("properties")


def culprit(schema: object, path: str, options: JsonOptions, error_of: Callable[[Grammar], str]) -> tuple[str, str]:
    """Return the path of the smallest part of a schema that llguidance refuses, and its reason. `error_of` returns the
    reason against a grammar, or nothing."""
    made: dict[int, tuple[str, dict[str, Any]]] = {}
    whole = checked_schema(schema, path, options, made)
    worst = (path, error_of(grammar_of_checked(whole, options)))
    definitions = whole.get("$defs", {})
    parts = sorted(made.values(), key=lambda part: len(json.dumps(part[1])))
    for where, part in parts[:MAX_TRIED]:
        error = error_of(grammar_of_checked({**part, "$defs": definitions}, options))
        if error:
            return where, error
    return worst
