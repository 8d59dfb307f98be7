"""Splits shell text into commands and words, as a shell would, without running anything.

What only a shell can expand (`$NAME`, `${...}`, `$(...)` and backticks) stays in its word between marks, so that the
word can be shown, and written again in such a way that the shell still expands it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from headrace.errors import ConfigError

BARE, QUOTED, END = "\ufdd0", "\ufdd1", "\ufdd2"
"""The marks around what a shell expands: its beginning outside of quotes, or in double quotes; its end. (Unicode leaves
these three to programs: they are no characters of any text.)"""
MARKED = re.compile(f"[{BARE}{QUOTED}](.*?){END}", re.DOTALL)
LONE = re.compile(f"{BARE}([^{END}]*){END}")
NAMED = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
SIMPLE = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])")
REDIRECTION = re.compile(r"(?:\d+|&)?(?:[<>]&(?:\d+|-)|(?P<target><<<|<<-?|>>|>\||[<>])[ \t\r]*)")
PLACEHOLDER = re.compile(r"<([A-Za-z][\w ./-]*)>")
BLANKS, ENDS = " \t\r", ";&|()\n"
UNENDED = "the line cannot be read as shell words: no closing quotation"


def plain(word: str) -> str:
    """Return the word as it stands in the text, without marks."""
    return MARKED.sub(r"\1", word)


def is_unexpanded(word: str) -> bool:
    """Return whether a part of the word is still to be expanded by the shell."""
    return BARE in word or QUOTED in word


def is_variable(word: str) -> bool:
    """Return whether the word is nothing but `$NAME`."""
    return is_unexpanded(word) and NAMED.fullmatch(plain(word)) is not None


def as_typed(word: str, splits: bool = False) -> str:
    """Return the word as one types it, in quotes where it needs them.

    With `splits` an expansion that stands alone stays without quotes, as it may become several words.
    """
    if not is_unexpanded(word):
        return word[:2] + shlex.quote(word[2:]) if re.match(r"~/.", word) else shlex.quote(word)
    if splits and LONE.fullmatch(word):
        return plain(word)
    parts, at = [], 0
    for match in MARKED.finditer(word):
        parts += [_escaped(word[at : match.start()]), match[1]]
        at = match.end()
    return '"' + "".join([*parts, _escaped(word[at:])]) + '"'


def _escaped(text: str) -> str:
    return re.sub(r'(["\\$`])', r"\\\1", text)


def expanded(word: str, values: Mapping[str, str]) -> list[str]:
    """Return the word with the variables of `values` expanded; one that stands alone may become several words."""

    def value(match: re.Match[str]) -> str:
        named = NAMED.fullmatch(match[1])
        return values.get(named[1] or named[2], match[0]) if named else match[0]

    lone = LONE.fullmatch(word)
    named = NAMED.fullmatch(lone[1]) if lone else None
    text = MARKED.sub(value, word)
    return text.split() if named and (named[1] or named[2]) in values else [text]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without comments and redirections. Raises ConfigError for an unclosed quote."""
    text = re.sub(f"[{BARE}{QUOTED}{END}]", "", text)
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    text = PLACEHOLDER.sub(lambda match: "./" + re.sub(r"[^\w.-]+", "-", match[1]), text)
    words: list[str] = []
    for token in (*_tokens(text), None):
        if token is not None:
            words.append(token)
        elif words:
            yield words
            words = []


def _tokens(text: str) -> Iterator[str | None]:
    """Words; None where a command ends."""
    at = 0
    while at < len(text):
        redirection = REDIRECTION.match(text, at)
        if text[at] in BLANKS:
            at += 1
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif redirection is not None:
            at = redirection.end()
            if redirection["target"]:
                at = _word(text, at)[1]
        elif text[at] in ENDS:
            at += 1
            yield None
        else:
            word, at = _word(text, at)
            if word != "\\":
                yield word


def _word(text: str, at: int, quoted: bool = False) -> tuple[str, int]:
    """(word, where it ends) of the word that begins at `at`; `quoted`: of what stands in double quotes."""
    parts: list[str] = []
    while at < len(text) and (text[at] != '"' if quoted else text[at] not in BLANKS + ENDS + "<>"):
        char, after = text[at], text[at + 1 : at + 2]
        if char in "$`":
            part, at = _expansion(text, at, quoted)
        elif char == "\\" and (not quoted or (after and after in '$`"\\')):
            part, at = after, at + 2
        elif char == "'" and not quoted:
            end = text.find("'", at + 1)
            if end < 0:
                raise ConfigError(UNENDED)
            part, at = text[at + 1 : end], end + 1
        elif char == '"':
            part, at = _word(text, at + 1, quoted=True)
        else:
            part, at = char, at + 1
        parts.append(part)
    if quoted and at >= len(text):
        raise ConfigError(UNENDED)
    return "".join(parts), at + quoted


def _expansion(text: str, start: int, quoted: bool) -> tuple[str, int]:
    """(what begins at a `$` or a backtick, between marks; where it ends); a sign that begins nothing stays as it is."""
    pair, simple = text[start : start + 2], SIMPLE.match(text, start)
    if text[start] == "`":
        end = text.find("`", start + 1) + 1
    elif pair in ("$(", "${"):
        end = _closing(text, start + 1)
    elif pair in ("$'", '$"') and not quoted:
        return "", start + 1  # another kind of quote
    else:
        end = simple.end() if simple else 0
    return (f"{QUOTED if quoted else BARE}{text[start:end]}{END}", end) if end else (text[start], start + 1)


def _closing(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`; 0: none does."""
    opens = text[start]
    closes, depth, quote = {"(": ")", "{": "}"}[opens], 0, ""
    for at in range(start, len(text)):
        char = text[at]
        if quote or (char in "\"'" and opens == "("):
            quote = "" if char == quote else quote or char
            continue
        depth += (char == opens) - (char == closes)
        if not depth:
            return at + 1
    return 0
