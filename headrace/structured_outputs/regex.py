"""Reads regular expressions for what cannot be matched in linear time, and for what JSON schemas mean by it."""

from __future__ import annotations

import itertools
import re

from headrace.errors import RequestError
from headrace.structured_outputs.limits import MAX_REGEX_CHARS, check_text

_PART = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?:|\?<?[=!]|\?P?<\w+>)?|.", re.DOTALL)
"""What is looked at as one when groups are counted: a class, what opens a group, or a character."""
_LITERAL = re.compile(r"(\.\*)?((?:[\w@ :;,/#%&=-]|\\[.@/+*?^$()\[\]{}|-])+)")
_ONE_CLASS = re.compile(r"\^?(\[(?!\^)(?:\\.|[^\]\\])+\])\*\$")
_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_ALIKE = {
    r"(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?":
        rf"(?:(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})",
}  # fmt: skip
"""Parts of well-known patterns with look-ahead, each with what means the same: zod's for durations."""
_DIGITS = re.compile(r"\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)(\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}0\*\$?)")
"""Of pydantic, for decimals: so many characters, then so many digits on both sides of a point."""


def checked_patterns(pattern: object, path: str) -> list[str]:
    """Return patterns that are all found where a pattern of a JSON schema is, in a form that can be held, as
    `checked_regex` does. Of look-ahead, that which stands at the beginning is rewritten where it is simple."""
    text = as_javascript(check_text(pattern, path, MAX_REGEX_CHARS))
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


def _split(pattern: str, at: str = "|") -> list[str]:
    """Return a pattern's alternatives; with `at` ")", the groups it begins with, each in its parentheses, and the
    rest."""
    parts, depth = [""], 0
    for part in _PART.findall(pattern):
        if part == at == "|" and not depth:
            parts.append("")
            continue
        depth += (part[0] == "(") - (part == ")")
        parts[-1] += part
        if part == at and not depth and parts[-1].startswith("("):
            parts.append("")
    return parts


def _without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that are all found where `^(?=x)(?!y)z` is, without look-ahead. What has another form is returned
    as it is."""
    for known, alike in _ALIKE.items():
        pattern = pattern.replace(known, alike)
    pattern = _DIGITS.sub(lambda one: one[2] if int(one[3]) + 1 + int(one[4]) <= int(one[1]) else one[0], pattern)
    if not pattern.startswith(("^(?=", "^(?!")) or len(_split(pattern)) > 1:
        return [pattern]
    groups = _split(pattern[1:], ")")
    heads = [*itertools.takewhile(lambda group: group.startswith(("(?=", "(?!")), groups)]
    found = ["^" + "".join(groups[len(heads) :])]
    for head in heads:
        inner = head[3:-1]
        wanted = f"^{inner}" if len(_split(inner)) == 1 else f"^(?:{inner})"
        other = wanted if head.startswith("(?=") else _without(inner)
        if other is None:
            return [pattern]
        found.append(other)
    return found


def _without(inner: str) -> str | None:
    """Return a pattern of texts that do not begin as another says; None: it is none of those that are known."""
    if one_class := _ONE_CLASS.fullmatch(inner):
        inner = one_class[1][1:-1]  # some find `$` before a last end of line too
        return f"[^{inner}\\n]" if inner.startswith("-") else f"[^\\n{inner}]"
    literal = _LITERAL.fullmatch(inner)
    if literal is None:
        return None
    codes = [f"\\u{{{ord(char):x}}}" for char in re.sub(r"\\(.)", r"\1", literal[2])]
    if not literal[1]:
        found = ""
        for code in reversed(codes):
            found = f"|[^{code}][\\s\\S]*" + (f"|{code}(?:{found})" if found else "")
        return f"^(?:{found})$"
    if len({*codes}) > 1:
        return None
    some = f"(?:{codes[0]}){{0,{len(codes) - 1}}}" if codes[1:] else ""
    return f"^(?:{some}[^{codes[0]}])*{some}$"


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
