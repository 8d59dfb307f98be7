"""Defines the normal form of what output is held to, and collects its rules: llguidance's dialect of Lark, which refers
to JSON schemas and to other grammars by name.

Names of rules and parts are made of their content, so that grammars may be put together: equal names mean the same.
What clients send becomes a Grammar in `conversion.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from headrace.structured_outputs.limits import GAP, SPACE

HEADER = '%llguidance {"no_forcing": true}\n'
"""Forced text would be tokenized by llguidance, which takes "<|im_end|>" in a string for the mark of that name."""
TEXT = "/(?s:.*)/"
"""Any text, of which marks are no part."""
_OPTIONAL_SPACE = re.compile(r"\s+(?![a-z`\s])|(?<=\{)(?=\")")
_META = re.compile(r"[\\.+*?()|\[\]{}^$/#&~-]")


@dataclass(frozen=True)
class JsonOptions:
    """Says how JSON may be written, beside what its schema says."""

    whitespace: str | None = f"({SPACE})"
    """A regular expression of what may stand between the tokens of JSON; None: nothing."""
    additional_properties: bool = True
    """False: objects whose schema names properties have no others, unless it says so."""


@dataclass(frozen=True)
class Grammar:
    """Describes what an answer, or a part of one, may be."""

    start: str
    """The body of a rule in Lark."""
    rules: tuple[str, ...] = ()
    """Rules that `start` or other rules refer to, as lines of Lark."""
    parts: tuple[str, ...] = ()
    """Grammars that they refer to with `@NAME`: llguidance's objects with a name, as JSON."""

    def to_text(self) -> str:
        """Return the text that llguidance compiles. It crosses the socket to the engine core, which keeps the compiled
        form by it."""
        lark = "\n".join([HEADER + "start: " + self.start, *self.rules]) + "\n"
        parts = "".join(", " + part for part in self.parts)
        return f'{{"grammars": [{{"lark_grammar": {json.dumps(lark)}}}{parts}]}}'


def escaped(text: str) -> str:
    """Return a pattern, for use between slashes, that matches exactly this text."""
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n").replace("\r", r"\r")


def without(stops: Sequence[str]) -> str:
    """Return a pattern of all text that has none of these in it."""
    if not stops:
        return TEXT
    return f"({TEXT} & ~/(?s:.*)(?:{'|'.join(map(escaped, stops))})(?s:.*)/)"


class Rules:
    """Collects the rules of one grammar, each of them once.

    Its methods return what stands for something in the body of a rule; "" stands for no text.
    """

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self.special = special or {}
        """Text -> id of the tokens that are marks (vocabulary.marks), which no string or pattern matches."""
        self._names: dict[str, str] = {}
        self._lines: dict[str, None] = {}
        self._parts: dict[str, None] = {}

    def literal(self, text: str) -> str:
        """Return what matches just this markup: where it spells a mark, that token is meant."""
        pattern = "|".join(re.escape(mark) for mark in sorted(self.special, key=len, reverse=True) if mark in text)
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        # In ASCII: Lark's lexer here takes no control characters in a string.
        return " ".join(f"<[{self.special[one]}]>" if one in self.special else json.dumps(one) for one in pieces if one)

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

    def regex(self, pattern: str) -> str:
        """Return what matches the texts that a regular expression matches as a whole."""
        return f"/{regex_to_lark(pattern, '')}/" if pattern else '""'

    def rule(self, body: str) -> str:
        """Return the name of a rule with this body."""
        return self._named("r_", body or '""', "")

    def one_of(self, bodies: Iterable[str]) -> str:
        """Return what matches any of these."""
        found = list(dict.fromkeys(bodies))
        return found[0] if len(found) == 1 else self.rule(" | ".join(body or '""' for body in found))

    def repeated(self, body: str, at_least: int = 0, at_most: int | None = None) -> str:
        """Return what matches so many of the same, one after the other."""
        return f"({body}){{{at_least},{'' if at_most is None else at_most}}}"

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

    def within(self, most: int, end: str) -> str:
        """Return what matches text of at most so many tokens, and `end`, which is a mark."""
        text = self._named("r_", TEXT, f"[max_tokens={most}]") if most else ""
        return self.joined(text, self.literal(end))

    def anything(self, but: Iterable[str] = ()) -> str:
        """Return what matches any number of tokens, of text or marks, other than the marks `but`."""
        ids = ",".join(str(self.special[mark]) for mark in but)
        return f"<[{f'^{ids}' if ids else '*'}]>*"

    def until_pattern(self, pattern: str, end: str) -> str:
        """Return what matches text of a pattern, and after it the first match of another."""
        return self._named("r_", f"{pattern} /{end}/", "[lazy]")

    def json(self, schema: Mapping[str, Any], options: JsonOptions | None = None) -> str:
        """Return what matches JSON of a schema that `schema.checked_schema` made."""
        space = (options or JsonOptions()).whitespace
        settings = {"whitespace_flexible": False} if space is None else {"whitespace_pattern": space}
        return self._part("json_schema", {**schema, "x-guidance": settings | schema.get("x-guidance", {})})

    def lark(self, source: str) -> str:
        """Return what matches a whole Lark grammar, with its own rule `start`."""
        return self._part("lark_grammar", source)

    def _part(self, kind: str, source: object) -> str:
        encoded = json.dumps(source)
        name = f"part_{_digest(kind + encoded)}"
        self._parts[f'{{"name": "{name}", "{kind}": {encoded}}}'] = None
        return "@" + name

    def placed(self, grammar: Grammar) -> str:
        """Return what matches a grammar that was made by itself."""
        self._lines.update(dict.fromkeys(grammar.rules))
        self._parts.update(dict.fromkeys(grammar.parts))
        return f"({grammar.start})"

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
        name = prefix + _digest(key)
        self._names[key] = name.upper() if prefix.isupper() else name
        return self._names[key]

    def define(self, name: str, body: str, options: str = "") -> None:
        """Give a reserved name its body."""
        self._lines[f"{name}{options}: {body}"] = None

    def grammar(self, start: str) -> Grammar:
        """Return the whole."""
        return Grammar(start or '""', tuple(self._lines), tuple(self._parts))


def _digest(content: str) -> str:
    return hashlib.blake2b(content.encode(errors="replace"), digest_size=9).hexdigest()


def either(*grammars: Grammar) -> Grammar:
    """Return the grammar of any one of several."""
    rules = Rules()
    return rules.grammar(rules.one_of(map(rules.placed, grammars)))


def after_reasoning(
    grammar: Grammar,
    *,
    opener: str,
    closers: Sequence[str],
    is_open: bool | None,
    special: Mapping[str, int],
    most: int | None = None,
) -> Grammar:
    """Return free reasoning and then a grammar.

    `is_open`: whether the prompt ends inside the reasoning; False: the prompt has closed it, so that the grammar begins
    at once; None: the answer may begin with `opener`, or leave the reasoning out. `most`: tokens of reasoning at which
    it must end, with those of the `closers` that are marks.
    """
    if is_open is False:
        return grammar
    rules = Rules(special)
    answer = rules.placed(grammar)
    ends = [
        rules.until(TEXT, closer) if most is None else rules.within(most, closer)
        for closer in closers
        if most is None or closer in special
    ]
    thought = f"{rules.one_of(ends)} {answer}"
    return rules.grammar(thought if is_open else rules.one_of([f"{rules.literal(opener)} {thought}", answer]))
