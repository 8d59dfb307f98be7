"""Random walks through grammars: answers that a model held to one might write, and random tools to call."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headrace.parsers.tools import FunctionTool
from headrace.structured_outputs.grammar import Grammar
from headrace.structured_outputs.vocabulary import byte_vocabulary

TEXT = "abc xyzé\"'\\<>&{}[]():=,\n\t|/.-0123456789eEtrufalsn日"
MAX_TOKENS = 1500


@dataclass(frozen=True)
class Vocabulary:
    """What a walk chooses from: tokens with their bytes."""

    tokenizer: LLTokenizer
    marks: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """Ids of a text in bytes, marks as the tokens that they are."""
        pattern = "|".join(map(re.escape, sorted(self.marks, key=len, reverse=True))) or "(?!)"
        ids: list[int] = []
        for piece in re.split(f"({pattern})", text):
            ids += [self.marks[piece]] if piece in self.marks else self.tokenizer.greedy_tokenize(piece)
        return ids


def of_bytes(marks: Iterable[str] = ()) -> Vocabulary:
    """Single bytes, and marks."""
    return _of_bytes(tuple(dict.fromkeys(marks)))


@cache
def _of_bytes(marks: tuple[str, ...]) -> Vocabulary:
    numbered = {mark: 256 + place for place, mark in enumerate(marks)}
    return Vocabulary(byte_vocabulary(numbered), numbered)


def matcher_of(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at its start."""
    return _compiled(grammar.to_text(), vocabulary.tokenizer).deep_copy()


@lru_cache(maxsize=8)
def _compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Held against several texts, one after the other."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def fits(grammar: Grammar, text: str, vocabulary: Vocabulary | None = None) -> bool:
    """Whether a text is a whole answer of a grammar."""
    vocabulary = vocabulary or of_bytes()
    matcher, ids = matcher_of(grammar, vocabulary), vocabulary.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def walk(
    grammar: Grammar, vocabulary: Vocabulary, markup: Sequence[str], rng: random.Random, *, in_strings: bool = True
) -> list[int] | None:
    """The tokens of a random answer, with pieces of markup wherever they may stand; None if it does not end.
    `in_strings`: they may stand in strings between quotes too."""
    matcher = matcher_of(grammar, vocabulary)
    wanted = [vocabulary.encode(text) for text in (*markup, *"\"}])',: \n")]
    control, text = vocabulary.encode("\1"), vocabulary.encode("<é")
    ids: list[int] = []
    length = rng.randint(0, 100)
    while len(ids) < MAX_TOKENS:
        if matcher.is_accepting() and (len(ids) > length or rng.random() < 0.3):
            return ids
        if rng.random() < (0.1 if len(ids) < length else 0.6):
            piece = rng.choice(wanted)
            in_string = matcher.validate_tokens(text) == len(text) and not matcher.validate_tokens(control)
            if len(piece) > 1 and in_string and not in_strings:
                continue
        elif len(ids) < length and rng.random() < 0.7:
            piece = vocabulary.encode(rng.choice(TEXT))
        else:
            token = _any_token(matcher, vocabulary, rng)
            if token is None:
                assert matcher.is_accepting(), "nothing may follow, and the answer is no whole one"
                return ids
            piece = [token]
        if matcher.validate_tokens(piece) == len(piece):
            assert matcher.consume_tokens(piece), matcher.get_error()
            ids += piece
    return ids if matcher.is_accepting() else None


def _any_token(matcher: LLMatcher, vocabulary: Vocabulary, rng: random.Random) -> int | None:
    """A token that may come, marks and ASCII rather than others; None if the answer can only end."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    assert not matcher.is_error(), matcher.get_error()
    bits[vocabulary.tokenizer.eos_tokens] = 0
    allowed = np.flatnonzero(bits)
    if not len(allowed):
        return None
    marks = [one for one in vocabulary.marks.values() if bits[one]]
    if marks and rng.random() < 0.5:
        return rng.choice(marks)
    some = [int(allowed[rng.randrange(len(allowed))]) for _ in range(8)]
    return next((one for one in some if vocabulary.tokenizer.decode_bytes([one]).isascii()), some[0])


def random_tools(rng: random.Random) -> list[FunctionTool]:
    """Some tools with random parameters."""
    names = dict.fromkeys(
        _word(rng, "_-" + string.digits, first="_-" + string.digits) for _ in range(rng.randint(1, 4))
    )
    return [FunctionTool(name, _object(rng, 2) if rng.random() < 0.9 else {}, rng.random() < 0.5) for name in names]


def _word(rng: random.Random, more: str, first: str = "_") -> str:
    rest = "".join(rng.choice(string.ascii_letters + more) for _ in range(rng.randint(0, 9)))
    return rng.choice(string.ascii_letters + first) + rest


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = list(dict.fromkeys(_word(rng, "_" + string.digits) for _ in range(rng.randint(0, 4))))
    schema: dict[str, Any] = {"type": "object", "properties": {key: _schema(rng, depth - 1) for key in keys}}
    required = [key for key in keys if rng.random() < 0.5]
    return schema | ({"required": required} if required else {}) | rng.choice([{}, {"additionalProperties": False}])


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(
        ["plain", "plain", "nullable", "enum", "limited", "any"] + ["array", "object", "anyOf"] * (depth > 0)
    )
    match kind:
        case "array":
            limits: dict[str, Any] = rng.choice([{}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 1, "maxItems": 1}])
            return {"type": "array", "items": _schema(rng, depth - 1), **limits}
        case "object":
            return _object(rng, depth)
        case "anyOf":
            return {"anyOf": [_schema(rng, depth - 1), _schema(rng, depth - 1)]}
        case "nullable":
            return {"type": [rng.choice(["string", "integer", "boolean", "number"]), "null"]}
        case "plain":
            return {"type": rng.choice(["string", "string", "integer", "number", "boolean", "null"])}
        case "any":
            return {}
        case "enum":
            values = ["a", "b c", 'x"y', "<d>", "é", "l'autre", 1, 2.5, True, None, "null", "12"]
            texts = [value for value in values if isinstance(value, str)]
            return rng.choice([
                {"enum": rng.sample(values, 3)}, {"const": rng.choice(values)},
                {"type": "string", "enum": rng.sample(texts, 3)},
            ])  # fmt: skip
        case _:
            return rng.choice([
                {"type": "string", "minLength": 2, "maxLength": 6}, {"type": "string", "pattern": "^[a-z<]+$|[0-9]{3}"},
                {"type": "integer", "minimum": 3, "maximum": 20}, {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "format": rng.choice(["date", "date-time", "email", "uuid", "ipv4", "uri"])},
            ])  # fmt: skip
