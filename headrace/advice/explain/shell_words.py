"""Shell text split into commands and words, as a shell would split it; what only a shell can fill in stays marked.

`$NAME`, `${...}`, `$(...)` and backticks are kept in their words between marks, so that a word can be shown, and typed
again in such a way that the shell still fills it in. Runs nothing, and knows nothing of what a word means.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from headrace.errors import ConfigError

BARE, QUOTED, END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Around what a shell fills in: where it stands bare, where in double quotes; behind it. (Unicode leaves these three to
programs: they are no characters of any text.)"""
MARKED = re.compile(f"[{BARE}{QUOTED}](.*?){END}", re.DOTALL)
LONE = re.compile(f"{BARE}([^{END}]*){END}")
NAMED = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
SIMPLE = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])")
REDIRECTION = re.compile(r"(?:\d+|&)?(?:[<>]&(?:\d+|-)|(?P<target><<<|<<-?|>>|>\||[<>]))")
PLACEHOLDER = re.compile(r"<([A-Za-z][\w ./-]*)>")
BLANKS, ENDS = " \t\r", ";&|()\n"
UNENDED = "the line cannot be read as shell words: no closing quotation"


def plain(word: str) -> str:
    """As it stands in the text, without marks."""
    return MARKED.sub(r"\1", word)


def is_open(word: str) -> bool:
    """The shell has yet to fill in some of it."""
    return BARE in word or QUOTED in word


def is_variable(word: str) -> bool:
    """It is nothing but `$NAME`."""
    return is_open(word) and NAMED.fullmatch(plain(word)) is not None


def typed(word: str, splits: bool = False) -> str:
    """The word as one types it. `splits`: what stands bare, and alone, may become several words, and so stays bare."""
    if not is_open(word):
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


def filled(word: str, values: Mapping[str, str]) -> list[str]:
    """With variables of `values` in the place of their names; one that stands bare and alone may be several words."""

    def value(match: re.Match[str]) -> str:
        named = NAMED.fullmatch(match[1])
        return values.get(named[1] or named[2], match[0]) if named else match[0]

    lone = LONE.fullmatch(word)
    named = NAMED.fullmatch(lone[1]) if lone else None
    text = MARKED.sub(value, word)
    return text.split() if named and (named[1] or named[2]) in values else [text]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command; comments and redirections are dropped. Raises ConfigError for a quote without end."""
    text = re.sub(f"[{BARE}{QUOTED}{END}]", "", text)
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    text = PLACEHOLDER.sub(lambda match: "./" + re.sub(r"[^\w.-]+", "-", match[1]), text)
    words: list[str] = []
    for token in _Reader(text).tokens():
        if token is not None:
            words.append(token)
        elif words:
            yield words
            words = []
    if words:
        yield words


class _Reader:
    """Walks through shell text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def tokens(self) -> Iterator[str | None]:
        """Words; None where a command ends."""
        while self.at < len(self.text):
            char = self.text[self.at]
            redirection = REDIRECTION.match(self.text, self.at)
            if char in BLANKS:
                self.at += 1
            elif char == "#":
                self.at = self._find("\n", len(self.text))
            elif redirection is not None:
                self._redirect(redirection)
            elif char in ENDS:
                self.at += 1
                yield None
            else:
                word = self._word()
                if word != "\\":
                    yield word

    def _redirect(self, match: re.Match[str]) -> None:
        self.at = match.end()
        if match["target"]:
            while self.at < len(self.text) and self.text[self.at] in BLANKS:
                self.at += 1
            self._word()

    def _word(self) -> str:
        parts: list[str] = []
        while self.at < len(self.text) and self.text[self.at] not in BLANKS + ENDS + "<>":
            char = self.text[self.at]
            if char == "'":
                start = self.at + 1
                self.at = self._find("'", -1, start) + 1
                if not self.at:
                    raise ConfigError(UNENDED)
                parts.append(self.text[start : self.at - 1])
            elif char == '"':
                parts += self._quoted()
            elif char in "$`":
                parts.append(self._expansion(BARE))
            elif char == "\\":
                parts.append(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            else:
                parts.append(char)
                self.at += 1
        return "".join(parts)

    def _quoted(self) -> Iterator[str]:
        """What stands in double quotes."""
        self.at += 1
        while self.at < len(self.text):
            char, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == '"':
                self.at += 1
                return
            if char in "$`":
                yield self._expansion(QUOTED)
                continue
            escapes = char == "\\" and after and after in '$`"\\'
            yield after if escapes else char
            self.at += 2 if escapes else 1
        raise ConfigError(UNENDED)

    def _expansion(self, mark: str) -> str:
        """What begins at a `$` or a backtick, between marks; a sign that begins nothing as it is."""
        start, self.at = self.at, self.at + 1
        pair = self.text[start : start + 2]
        simple = SIMPLE.match(self.text, start)
        if self.text[start] == "`":
            end = self._find("`", -1, self.at) + 1
        elif pair in ("$(", "${"):
            end = self._closing(start + 1)
        elif pair in ("$'", '$"') and mark == BARE:
            return ""  # another kind of quote
        else:
            end = simple.end() if simple else 0
        if not end:
            return self.text[start]
        self.at = end
        return f"{mark}{self.text[start:end]}{END}"

    def _closing(self, start: int) -> int:
        """The place behind the bracket that closes the one at `start`; 0: none does."""
        opens = self.text[start]
        closes, depth, quote = {"(": ")", "{": "}"}[opens], 0, ""
        for at in range(start, len(self.text)):
            char = self.text[at]
            if quote or (char in "\"'" and opens == "("):
                quote = "" if char == quote else quote or char
                continue
            depth += (char == opens) - (char == closes)
            if not depth:
                return at + 1
        return 0

    def _find(self, sign: str, otherwise: int, start: int | None = None) -> int:
        found = self.text.find(sign, self.at if start is None else start)
        return found if found >= 0 else otherwise
