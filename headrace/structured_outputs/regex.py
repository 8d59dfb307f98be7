"""Reads regular expressions for what cannot be matched in linear time, and for what JSON schemas mean by it."""

from __future__ import annotations

import re

from headrace.errors import RequestError
from headrace.structured_outputs.difference import common, without_look_ahead
from headrace.structured_outputs.limits import MAX_REGEX_CHARS, check_text
from headrace.structured_outputs.look_around import without_look_around
from headrace.structured_outputs.pattern import Unreadable, anchored


def checked_patterns(pattern: object, path: str) -> list[str]:
    """Return patterns that are all found where a pattern of a JSON schema is, in a form that can be held, as
    `checked_regex` does; anchors within it, look-around and word boundaries are rewritten."""
    parts = without_look_ahead(as_javascript(check_text(pattern, path, MAX_REGEX_CHARS)))
    return [anchored(checked_regex(without_look_around(part), path)) for part in parts]


def checked_pattern(pattern: object, path: str) -> str:
    """Return one such pattern. Raises RequestError also where there would have to be several."""
    parts = checked_patterns(pattern, path)
    try:
        return common(parts)
    except Unreadable:
        raise _no_regex(path, "look-around", "(?=") from None


def checked_regex(pattern: object, path: str) -> str:
    """Return a regular expression that can be matched in linear time, whose `\\d` and `\\w` are ASCII's, as in JSON
    schemas, and whose `\\D` and `\\W` are no letters or digits of any language. Raises RequestError for look-around and
    back-references, by name, for what is too long, and for a backslash at its end."""
    inside = ""  # what opened a class, where no group opens and \\b is a character

    def checked(match: re.Match[str]) -> str:
        nonlocal inside
        token = match[0]
        if token in ("[", "[^"):
            inside = inside or token
        elif token == "]":
            inside = ""
        elif not inside and token in _LOOK_AROUND:
            raise _no_regex(path, "look-around", token)
        elif token == "(?P=" or (not inside and _BACK_REFERENCE.fullmatch(token)):
            raise _no_regex(path, "back-references", token)
        elif token == "\\":
            raise RequestError(f"{path} ends in a backslash that nothing follows", path.partition(".")[0])
        elif token in _ASCII_CLASSES and inside != "[^":  # what it excludes may be more, and is then right anywhere
            return _ASCII_CLASSES[token] if inside else f"[{_ASCII_CLASSES[token]}]"
        return token if inside else _OTHERS.get(token, token)

    return _REGEX_TOKEN.sub(checked, as_javascript(check_text(pattern, path, MAX_REGEX_CHARS)))


def as_javascript(pattern: str) -> str:
    """Return a pattern that llguidance reads as JavaScript and Python read this one: in a class a bracket, `&&` and a
    hyphen beside another class are characters, and so are `\\<` and escapes of control characters."""
    in_class = False

    def read(match: re.Match[str]) -> str:
        nonlocal in_class
        token = match[0]
        if token in ("[", "[^"):
            if in_class:
                return "\\" + token
            in_class = True
        elif token == "]":
            in_class = False
        elif match["hyphen"] is not None:
            return f"{match['class'] or ''}\\-"
        elif match["control"]:
            return f"\\x{ord(match['control']) % 32:02x}"
        elif token == "\\b" and in_class:
            return "\\x08"
        elif token in ("&&", "~~") and in_class:
            return f"\\{token[0]}\\{token[0]}"
        return _SAME_AS.get(token, token)

    return _DIALECT_TOKEN.sub(read, pattern)


_DIALECT_TOKEN = re.compile(
    r"""\[:\^?[a-z]+:\]|(?:(?P<class>\\(?:[dDwWsS]|[pP]\{\w+\}))-|-(?=\\[dDwWsSpP]))(?P<hyphen>)
    |\\c(?P<control>[A-Za-z])|\\0(?![0-9])|\\.|\[\^?|\]|&&|~~""",
    re.DOTALL | re.VERBOSE,
)
_SAME_AS = {"\\<": "<", "\\>": ">", "\\0": "\\x00"}


_REGEX_TOKEN = re.compile(r"\\.|\\\Z|\(\?P?[=!]|\(\?<[=!]|\[\^?|\]", re.DOTALL)
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")
_ASCII_CLASSES = {"\\d": "0-9", "\\w": "0-9A-Za-z_"}
_OTHERS = {"\\D": r"[^\p{Nd}]", "\\W": r"[^\p{L}\p{M}\p{N}\p{Pc}]"}
"""What no dialect takes for a digit or a word's letter."""
_BACK_REFERENCE = re.compile(r"\\[1-9k]")


def _no_regex(path: str, kind: str, text: str) -> RequestError:
    message = f"{path} has {text}: {kind} cannot be matched in linear time and is not supported"
    return RequestError(message, path.partition(".")[0])
