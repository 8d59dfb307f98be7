"""Defines the normal form of what output is held to: rules in llguidance's dialect of Lark, which refer to JSON schemas
and to other grammars by name.

Grammars are values that are put together: `sequence`, `either`, `lazily`, `after_reasoning`. Names of rules and parts
are made of their content, so that no two grammars clash. What clients send becomes a Grammar in `conversion.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

HEADER = '%llguidance {"no_forcing": true}\n'
"""Forced text would be tokenized by llguidance, which takes "<|im_end|>" in a string for the mark of that name."""
TEXT = "/(?s:.*)/"
"""Any text, of which marks are no part."""


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


def _name(prefix: str, content: str) -> str:
    return f"{prefix}_{hashlib.blake2b(content.encode(errors='replace'), digest_size=9).hexdigest()}"


def _with(start: str, grammars: Sequence[Grammar]) -> Grammar:
    """Return a grammar whose `start` refers to rules of others, of which each is taken once."""
    used = dict.fromkeys(rule for grammar in grammars for rule in grammar.rules)
    parts = dict.fromkeys(part for grammar in grammars for part in grammar.parts)
    return Grammar(start, tuple(used), tuple(parts))


def of_text(text: str) -> Grammar:
    """Return the grammar of exactly this text; characters that spell a mark stay characters."""
    return Grammar(json.dumps(text))  # in ASCII: Lark's lexer here takes no control characters in a string


def literal(text: str, special: Mapping[str, int]) -> Grammar:
    """Return the grammar of exactly this markup. `special`: the vocabulary's marks (vocabulary.marks): where the text
    spells one, its token is meant."""
    pattern = "|".join(re.escape(mark) for mark in sorted(special, key=len, reverse=True) if mark in text)
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    found = [f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece]
    return Grammar(" ".join(found) or '""')


def of_regex(pattern: str) -> Grammar:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    return Grammar(f"/{regex_to_lark(pattern, '')}/" if pattern else '""')


def of_choice(texts: Sequence[str]) -> Grammar:
    """Return the grammar of any one of these texts."""
    body = " | ".join(map(json.dumps, dict.fromkeys(texts)))
    name = _name("CHOICE", body).upper()
    return Grammar(name, (f"{name}: {body}",))


def of_schema(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of the JSON that a schema, in the form that schema.py makes, describes."""
    return _named("json_schema", schema)


def of_lark(lark: str) -> Grammar:
    """Return the grammar of a whole Lark grammar, with its own rule `start`."""
    return _named("lark_grammar", lark)


def _named(kind: str, source: object) -> Grammar:
    encoded = json.dumps(source)
    name = _name("part", kind + encoded)
    return Grammar("@" + name, (), (f'{{"name": "{name}", "{kind}": {encoded}}}',))


def any_text(excluded: Sequence[str] = ()) -> Grammar:
    """Return the grammar of any text that has none of the `excluded` ones in it."""
    if not excluded:
        return Grammar(TEXT)
    inside = "|".join(regex_to_lark(re.escape(text), "") for text in excluded)
    body = f"{TEXT} & ~/(?s:.*)({inside})(?s:.*)/"
    name = _name("TEXT", body).upper()
    return Grammar(name, (f"{name}: {body}",))


def sequence(*grammars: Grammar) -> Grammar:
    """Return the grammar of one after the other."""
    start = " ".join(f"({grammar.start})" for grammar in grammars) or '""'
    return _with(start, grammars)


def either(*grammars: Grammar) -> Grammar:
    """Return the grammar of any one of several."""
    return _with(" | ".join(f"({grammar.start})" for grammar in grammars), grammars)


def repeated(grammar: Grammar, at_least: int = 0, at_most: int | None = None) -> Grammar:
    """Return the grammar of so many of the same, one after the other."""
    return _with(f"({grammar.start}){{{at_least},{'' if at_most is None else at_most}}}", [grammar])


def up_to(trigger: str, special: Mapping[str, int]) -> Grammar:
    """Return the grammar of any text up to and with the first occurrence of a trigger."""
    marks = [mark for mark in special if trigger.startswith(mark)]
    if marks:
        return sequence(any_text(), literal(trigger, special))
    body = f"{TEXT} {json.dumps(trigger)}"
    name = _name("until", body)
    return Grammar(name, (f"{name}[lazy]: {body}",))


def lazily(
    triggered: Sequence[tuple[str, Grammar]],
    special: Mapping[str, int],
    *,
    at_least: int = 0,
    at_most: int | None = None,
    text_after: bool = True,
) -> Grammar:
    """Return the grammar of free text in which whatever follows a trigger is held to that trigger's grammar.

    `at_least`, `at_most`: how often that happens; `text_after`: whether text may follow the last time.
    """
    choices: dict[str, list[Grammar]] = {}
    for trigger, grammar in triggered:
        choices.setdefault(trigger, []).append(grammar)
    each = either(*(sequence(up_to(trigger, special), either(*found)) for trigger, found in choices.items()))
    tail = any_text([] if at_most is None else [trigger for trigger in choices if trigger not in special])
    whole = repeated(each, at_least, at_most)
    if text_after:
        return sequence(whole, tail)
    return either(whole, tail) if not at_least else whole


def after_reasoning(
    grammar: Grammar,
    *,
    opener: str,
    closers: Sequence[str],
    is_open: bool | None,
    special: Mapping[str, int],
) -> Grammar:
    """Return free reasoning and then a grammar.

    `is_open`: whether the prompt ends inside the reasoning; False: the prompt has closed it, so that the grammar begins
    at once; None: the answer may begin with `opener`, or leave the reasoning out.
    """
    if is_open is False:
        return grammar
    thought = either(*(up_to(closer, special) for closer in closers))
    if is_open:
        return sequence(thought, grammar)
    return either(sequence(literal(opener, special), thought, grammar), grammar)
