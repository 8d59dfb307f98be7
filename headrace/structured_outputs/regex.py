"""Refuses regular expressions that cannot be matched in linear time."""

from __future__ import annotations

import re

from headrace.errors import RequestError
from headrace.structured_outputs.limits import MAX_REGEX_CHARS, check_text


def checked_regex(pattern: object, path: str) -> str:
    """Return a regular expression that can be matched in linear time. Raises RequestError for look-around and
    back-references, by name, and for what is too long."""
    text = check_text(pattern, path, MAX_REGEX_CHARS)
    inside = False  # a class in brackets, where no group opens and \\b is a character
    for token in _REGEX_TOKEN.findall(text):
        if token == "[":
            inside = True
        elif token == "]":
            inside = False
        elif not inside and token in _LOOK_AROUND:
            raise _no_regex(path, "look-around", token)
        elif token == "(?P=" or (not inside and _BACK_REFERENCE.fullmatch(token)):
            raise _no_regex(path, "back-references", token)
    return text


_REGEX_TOKEN = re.compile(r"\\.|\(\?P?[=!]|\(\?<[=!]|[\[\]]", re.DOTALL)
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")
_BACK_REFERENCE = re.compile(r"\\[1-9k]")


def _no_regex(path: str, kind: str, text: str) -> RequestError:
    message = f"{path} has {text}: {kind} cannot be matched in linear time and is not supported"
    return RequestError(message, path.partition(".")[0])
