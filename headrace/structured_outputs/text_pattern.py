"""Makes patterns of text that is written without quotes, from the keywords that a JSON schema has for strings."""

from __future__ import annotations

import re
from typing import Any

from llguidance import regex_to_lark

from headrace.structured_outputs.lark import without

_WORD_ALTERNATIVES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]|[^\\\[()|]+", re.DOTALL)
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HEX4 = "[0-9a-fA-F]{1,4}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:[0-9]{1,4}W|[0-9]{1,4}D(?:T[0-9]{1,4}H)?|T[0-9]{1,4}H(?:[0-9]{1,4}M)?|T[0-9]{1,4}[MS])",
    "email": r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@" + _HOST,
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": f"(?:{_HEX4}:){{7}}{_HEX4}|(?:{_HEX4}:){{1,6}}:{_HEX4}|::(?:{_HEX4})?",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:\/\/[A-Za-z0-9._~:\/?#@!$&'()*+,;=%-]+",
}
"""What is written for a `format`: some of what it allows."""
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
    if "pattern" in schema:
        parts.append("(" + " | ".join(map(_searched, _alternatives(schema["pattern"]))) + ")")
    if schema.get("format") in FORMATS:
        parts.append(f"/{FORMATS[schema['format']]}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.){{{int(least)},{most if most == '' else int(most)}}}/")
    return "(" + " & ".join(parts) + ")"


def is_free(schema: dict[str, Any]) -> bool:
    """Return whether a schema allows any string."""
    return not schema.keys() & {"pattern", "format", "minLength", "maxLength"}


def _alternatives(pattern: str) -> list[str]:
    """The parts between the bars of a pattern that are in no group."""
    found, depth = [""], 0
    for piece in _WORD_ALTERNATIVES.findall(pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and not depth:
            found.append("")
        else:
            found[-1] += piece
    return found


def _searched(pattern: str) -> str:
    """A terminal for text in which a pattern, without a bar outside of groups, is found, as in JSON Schema."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    core = pattern[begins : len(pattern) - ends]
    return f"/{'' if begins else '(?s:.*)'}(?:{regex_to_lark(core, 'dw')}){'' if ends else '(?s:.*)'}/"
