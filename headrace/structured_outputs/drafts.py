"""Knows what the drafts of JSON Schema read in different ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.structured_outputs.references import NOT_SCHEMAS

NEWEST = 2020
_SINCE = {
    "allOf": 4, "anyOf": 4, "oneOf": 4, "not": 4, "minProperties": 4, "maxProperties": 4,
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7,
    "minContains": 2019, "maxContains": 2019, "dependentRequired": 2019, "dependentSchemas": 2019,
    "unevaluatedProperties": 2019, "unevaluatedItems": 2019, "$recursiveRef": 2019,
    "prefixItems": 2020, "$dynamicRef": 2020,
}  # fmt: skip
"""Keyword -> the draft that has brought it."""
_OF_NAMES = frozenset((
    "properties", "patternProperties", "dependencies", "dependentSchemas", "definitions", "$defs",
))  # fmt: skip
"""Keywords with a schema for each of some names, which may be spelled like keywords."""
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([3467])|draft/(2019|2020)-..)/schema#?")
_IGNORED_BESIDE_REF = frozenset((
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependencies", "items", "additionalItems", "contains", "minItems", "maxItems",
    "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
))  # fmt: skip


def draft_of(root: Mapping[str, Any]) -> int:
    """Return the draft that a schema says it is written in; the newest, if it says nothing that is known."""
    match = _DRAFT.fullmatch(str(root.get("$schema", ""))[:100])
    return NEWEST if match is None else int(match[1] or match[2])


def as_newest(schema: Any, draft: int, *, whole: bool = True) -> Any:
    """Return a schema without what its draft ignores and the newest does not: keywords that came later and, up to
    draft 7, those beside `$ref`. An address stays where the schema is `whole`, since its references are often written
    with it."""
    if draft == NEWEST:
        return schema
    if isinstance(schema, list):
        return [as_newest(item, draft, whole=False) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    ignored = {keyword for keyword, since in _SINCE.items() if since > draft}
    if draft <= 7 and isinstance(schema.get("$ref"), str):
        ignored |= _IGNORED_BESIDE_REF if whole else _IGNORED_BESIDE_REF | {"$id", "id"}
    found = {}
    for key, value in schema.items():
        if key in ignored:
            continue
        if key in _OF_NAMES and isinstance(value, Mapping):
            found[key] = {name: as_newest(one, draft, whole=False) for name, one in value.items()}
        else:
            found[key] = value if key in NOT_SCHEMAS else as_newest(value, draft, whole=False)
    return found
