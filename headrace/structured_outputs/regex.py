"""Reads regular expressions for what cannot be matched in linear time, and for what JSON schemas mean by it."""

from __future__ import annotations

import re

from headrace.errors import RequestError
from headrace.structured_outputs.limits import MAX_REGEX_CHARS, check_text

_PART = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?:|\?<?[=!]|\?P?<\w+>)?|.", re.DOTALL)
"""What is looked at as one when groups are counted: a class, what opens a group, or a character."""
_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_ALIKE = {
    r"(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?":
        rf"(?:(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})",
}  # fmt: skip
"""Parts of well-known patterns with look-ahead, each with what means the same: zod's for durations."""
_DIGITS = re.compile(r"\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)(\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}0\*\$?)")
"""Of pydantic, for decimals: so many characters, then so many digits on both sides of a point."""
_AHEAD = re.compile(r"\(\?=((?:[^()\\]|\\.)*)\)")
_NOT_AHEAD = {
    r"(?!\.)": r"^(?:|[^.][\s\S]*)$", r"(?!.*\.\.)": r"^(?:\.?[^.])*\.?$", r"(?!^[-+.]*$)": r"[^\n\-+.]",
}  # fmt: skip
"""Negative look-ahead of zod's addresses and pydantic's decimals -> a pattern of texts in which it holds."""


def checked_patterns(pattern: object, path: str) -> list[str]:
    """Return patterns that are all found where a pattern of a JSON schema is, in a form that can be held, as
    `checked_regex` does. Of look-ahead, that which stands at the beginning is rewritten where it is simple."""
    text = check_text(pattern, path, MAX_REGEX_CHARS)
    return [checked_regex(part, path) for part in _without_look_ahead(text)]


def checked_pattern(pattern: object, path: str) -> str:
    """Return one such pattern. Raises RequestError also where there would have to be several."""
    parts = checked_patterns(pattern, path)
    if len(parts) > 1:
        raise _no_regex(path, "look-around", "(?=")
    return parts[0]


def whole_pattern(pattern: str) -> str:
    """Return a regular expression that matches, as a whole, the texts in which a pattern is found. `^` and `$` within
    it stay, which llguidance then refuses."""
    ways = []
    for way in _split(pattern):
        begin, end = ("" if way.startswith("^") else "(?s:.*)"), "(?s:.*)"
        if way.endswith("$") and (len(way) - len(way[:-1].rstrip("\\"))) % 2:
            way, end = way[:-1], ""
        ways.append(f"{begin}(?:{way.removeprefix('^')}){end}")
    return "|".join(ways)


def as_python(pattern: str) -> str:
    """Return a pattern as Python's `re` reads it, whose characters have numbers of another form."""
    return re.sub(r"\\u\{(\w+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)


def _split(pattern: str) -> list[str]:
    """Return a pattern's alternatives."""
    parts, depth = [""], 0
    for part in _PART.findall(pattern):
        if part == "|" and not depth:
            parts.append("")
            continue
        depth += (part[0] == "(") - (part == ")")
        parts[-1] += part
    return parts


def _without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that are all found where `^(?=x)(?!y)z` is, without the look-ahead that is known."""
    for known, alike in _ALIKE.items():
        pattern = pattern.replace(known, alike)
    pattern = _DIGITS.sub(lambda one: one[2] if int(one[3]) + 1 + int(one[4]) <= int(one[1]) else one[0], pattern)
    if not pattern.startswith("^(?") or len(_split(pattern)) > 1:
        return [pattern]
    rest, found = pattern[1:], list[str]()
    while rest:
        if ahead := _AHEAD.match(rest):
            head, other = ahead[0], f"^(?:{ahead[1]})"
        elif heads := [one for one in _NOT_AHEAD if rest.startswith(one)]:
            head, other = heads[0], _NOT_AHEAD[heads[0]]
        else:
            break
        rest = rest.removeprefix(head)
        found.append(other)
    return ["^" + rest, *found]


def checked_regex(pattern: object, path: str) -> str:
    """Return a regular expression that can be matched in linear time, which llguidance reads as JavaScript and Python
    read this one: in a class a bracket, `&&` and a hyphen beside another class are characters, and so are `\\<` and
    escapes of control characters. `\\d` and `\\w` are ASCII's, as in JSON schemas; `\\D` and `\\W` are no letters or
    digits of any language. Raises RequestError for look-around and back-references, by name, for what is too long, and
    for a backslash at its end."""
    opened = ""  # what opened the class it is in, if any

    def named(token: str) -> str:
        if token in _ASCII_CLASSES and opened != "[^":  # what it excludes may be more, and is then right anywhere
            return _ASCII_CLASSES[token] if opened else f"[{_ASCII_CLASSES[token]}]"
        return token if opened else _OTHERS.get(token, token)

    def read(match: re.Match[str]) -> str:
        nonlocal opened
        token = match[0]
        if opened and token in _IN_CLASS:
            return _IN_CLASS[token]
        if token in ("[", "[^", "]"):
            opened = token.removesuffix("]")
        elif match["hyphen"] is not None:
            return named(match["class"] or "") + "\\-"
        elif match["control"]:
            return f"\\x{ord(match['control']) % 32:02x}"
        elif not opened and token in _LOOK_AROUND:
            raise _no_regex(path, "look-around", token)
        elif token == "(?P=" or (not opened and _BACK_REFERENCE.fullmatch(token)):
            raise _no_regex(path, "back-references", token)
        elif token == "\\":
            raise RequestError(f"{path} ends in a backslash that nothing follows", path.partition(".")[0])
        return _SAME_AS.get(token) or named(token)

    return _TOKEN.sub(read, check_text(pattern, path, MAX_REGEX_CHARS))


_TOKEN = re.compile(
    r"""\[:\^?[a-z]+:\]|(?:(?P<class>\\(?:[dDwWsS]|[pP]\{\w+\}))-|-(?=\\[dDwWsSpP]))(?P<hyphen>)
    |\\c(?P<control>[A-Za-z])|\\0(?![0-9])|\\.|\\\Z|\[\^?|\]|&&|~~|\(\?P?[=!]|\(\?<[=!]""",
    re.DOTALL | re.VERBOSE,
)
_IN_CLASS = {"[": "\\[", "[^": "\\[^", "\\b": "\\x08", "&&": "\\&\\&", "~~": "\\~\\~"}
_SAME_AS = {"\\<": "<", "\\>": ">", "\\0": "\\x00"}
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")
_ASCII_CLASSES = {"\\d": "0-9", "\\w": "0-9A-Za-z_"}
_OTHERS = {"\\D": r"[^\p{Nd}]", "\\W": r"[^\p{L}\p{M}\p{N}\p{Pc}]"}
"""What no dialect takes for a digit or a word's letter."""
_BACK_REFERENCE = re.compile(r"\\[1-9k]")


def _no_regex(path: str, kind: str, text: str) -> RequestError:
    message = f"{path} has {text}: {kind} cannot be matched in linear time and is not supported"
    return RequestError(message, path.partition(".")[0])
