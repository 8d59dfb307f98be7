"""Makes scalars of JSON, which models spell in Python's words and in JSON's, and as loose numbers."""

from __future__ import annotations

import math
import re
from json.encoder import encode_basestring

_NUMBER = re.compile(r"([+-]?)([0-9][0-9_]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?", re.ASCII)
_WORDS = {
    "true": "true", "True": "true", "TRUE": "true", "false": "false", "False": "false", "FALSE": "false",
    "null": "null", "None": "null",
}  # fmt: skip


def json_string(text: str) -> str:
    """Return a text as a JSON string, with its quotes."""
    return encode_basestring(text)


def json_escaped(text: str) -> str:
    """Return a piece of a text as it stands between the quotes of a JSON string.

    The pieces of a text, escaped one by one and joined, are the escaped text.
    """
    return encode_basestring(text)[1:-1]


def json_number(text: str) -> str | None:
    """Return a number as JSON writes it, or None for what is no finite number.

    Digits are kept as they are, so that no number is too long to be converted; what only JSON refuses is mended: a
    plus sign, leading zeros, underscores, a point with no digit on one side.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction, exponent = (part or "" for part in match.groups())
    digits = whole.replace("_", "").lstrip("0") or "0"
    if not whole and fraction in ("", "."):
        return None
    if exponent or len(digits) > 300:
        value = float(f"{digits}{fraction}{exponent}")
        if math.isinf(value) and (fraction or exponent):
            return None
    minus = "-" if sign == "-" else ""
    return f"{minus}{digits}{'' if fraction == '' else fraction if fraction != '.' else '.0'}{exponent}"


def json_word(text: str) -> str | None:
    """Return JSON's word for true, false or null as Python or JSON spell them, or None for anything else."""
    return _WORDS.get(text)


def json_scalar(text: str) -> str | None:
    """Return a bare word or number as JSON, or None for anything else."""
    return json_word(text) or json_number(text)
