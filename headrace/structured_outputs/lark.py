"""Collects the rules of a large grammar, so that each is written once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.structured_outputs.grammar import TEXT, Grammar, literal
from headrace.structured_outputs.limits import GAP
from headrace.structured_outputs.schema import grammar_of_checked

_OPTIONAL_SPACE = re.compile(r"\s+(?![a-z`\s])|(?<=\{)(?=\")")
_META = re.compile(r"[\\.+*?()|\[\]{}^$/#&~-]")


def escaped(text: str) -> str:
    """Return a pattern, for use between slashes, that matches exactly this text."""
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n").replace("\r", r"\r")


def without(stops: Sequence[str]) -> str:
    """Return a pattern of all text that has none of these in it."""
    if not stops:
        return TEXT
    return f"({TEXT} & ~/(?s:.*)(?:{'|'.join(map(escaped, stops))})(?s:.*)/)"


class Rules:
    """Collects the rules of one grammar.

    Its methods return what stands for something in the body of a rule; "" stands for no text.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        """Text -> id of the tokens that are marks, which no string or pattern matches."""
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._parts: dict[str, None] = {}

    def literal(self, text: str) -> str:
        """Return what matches just this text, marks as the tokens that they are."""
        return literal(text, self.special).start if text else ""

    def loose(self, text: str) -> str:
        """Return what matches this text; white space is any or none but before a letter or backquote, and may be
        within braces."""
        first, *rest = map(self.literal, _OPTIONAL_SPACE.split(text))
        return self.joined(first, *(part for piece in rest for part in (self.space, piece)))

    def joined(self, *parts: str) -> str:
        """Put one after the other; optional white space next to optional white space is one."""
        found: list[str] = []
        for part in filter(None, parts):
            if not (found and found[-1].endswith(self.space) and part.startswith(self.space)):
                found.append(part)
            elif part != self.space:
                found.append(part[len(self.space) :].strip())
        return " ".join(found)

    @property
    def space(self) -> str:
        """Optional white space."""
        return self.terminal(f"/{GAP}/") + "?"

    def terminal(self, pattern: str) -> str:
        """Return the name of a terminal with this pattern."""
        return self._named("T_", pattern, "")

    def rule(self, body: str) -> str:
        """Return the name of a rule with this body."""
        return self._named("r_", body or '""', "")

    def until(self, pattern: str, end: str, *, spelled: bool = False) -> str:
        """Return what matches text of a pattern, and `end` where it first is.

        A pattern must itself keep out an `end` with a mark in it. `spelled`: its characters are meant even then.
        """
        head, rest = (end, "") if spelled else self.at_mark(end)
        if rest:
            text = f"{pattern} {json.dumps(head)}" if head else pattern
            return f"{self.terminal(text)} {self.literal(rest)}"
        return self._named("r_", f"{pattern} {json.dumps(end)}", "[lazy]")

    def at_mark(self, text: str) -> tuple[str, str]:
        """Split a text before the first token in it that is a mark."""
        place = min((place for mark in self.special if (place := text.find(mark)) >= 0), default=len(text))
        return text[:place], text[place:]

    def until_pattern(self, pattern: str, end: str) -> str:
        """Return what matches text of a pattern, and after it the first match of another."""
        return self._named("r_", f"{pattern} /{end}/", "[lazy]")

    def _named(self, prefix: str, body: str, options: str) -> str:
        key = options + body
        if key not in self._names:
            self.define(self.reserve(key, prefix), body, options)
        return self._names[key]

    def known(self, key: str) -> str | None:
        """Return the name that was reserved for this key."""
        return self._names.get(key)

    def reserve(self, key: str, prefix: str = "r_") -> str:
        """Return a name for a rule that is defined later, so that it may refer to itself."""
        # By content, so that grammars with equal names may be put together: they mean the same.
        name = prefix + hashlib.blake2b(key.encode(errors="replace"), digest_size=6).hexdigest()
        self._names[key] = name.upper() if prefix.isupper() else name
        return self._names[key]

    def define(self, name: str, body: str, options: str = "") -> None:
        """Give a reserved name its body."""
        self._lines.append(f"{name}{options}: {body}")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return what matches JSON of this schema."""
        grammar = grammar_of_checked(schema)
        self._parts.update(dict.fromkeys(grammar.parts))
        return grammar.start

    def one_of(self, bodies: Iterable[str]) -> str:
        """Return what matches any of these."""
        found = list(dict.fromkeys(bodies))
        return found[0] if len(found) == 1 else self.rule(" | ".join(body or '""' for body in found))

    def grammar(self, start: str) -> Grammar:
        """Return the whole."""
        return Grammar(start or '""', tuple(self._lines), tuple(self._parts))
