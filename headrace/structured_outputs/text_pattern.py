"""Makes patterns of text that is written without quotes, from the keywords that a JSON schema has for strings."""

from __future__ import annotations

from typing import Any

from llguidance import regex_to_lark

from headrace.structured_outputs.alternatives import patterns_of
from headrace.structured_outputs.formats import NATIVE_FORMATS
from headrace.structured_outputs.lark import without
from headrace.structured_outputs.regex import whole_pattern

_TRIMMED = r"(/[^ \t\r\n]((?s:.*)[^ \t\r\n])?/ | /(?:)/)"
"""Text that stays as it is when white space around it is taken away."""


def string_pattern(schema: dict[str, Any], stops: tuple[str, ...], taken: str = "") -> str:
    """Return the pattern of the strings that a schema allows, of which none holds a stop.

    `taken` is a pattern of what would be read as another type.
    """
    parts = [without(stops)]
    if is_free(schema) and not taken:
        return parts[0]
    parts.append(_TRIMMED)
    if taken:
        parts.append(f"~{taken}")
    for pattern in patterns_of(schema):
        parts.append(f"/{regex_to_lark(whole_pattern(pattern), 'dw')}/")
    if schema.get("format") in NATIVE_FORMATS:
        parts.append(f"/{NATIVE_FORMATS[schema['format']]}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.){{{int(least)},{most if most == '' else int(most)}}}/")
    return "(" + " & ".join(parts) + ")"


def is_free(schema: dict[str, Any]) -> bool:
    """Return whether a schema allows any string."""
    return not schema.keys() & {"pattern", "format", "minLength", "maxLength"}
