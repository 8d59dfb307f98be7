"""What tests of grammars share: texts held against a grammar byte by byte, and texts that a grammar itself writes."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headrace.structured_outputs.grammar import Grammar, split
from headrace.structured_outputs.limits import LIMITS
from headrace.structured_outputs.matcher import Matcher
from headrace.structured_outputs.unique_items import TokenTexts, UniqueItems, parts_of
from headrace.structured_outputs.vocabulary import byte_vocabulary

BYTES = byte_vocabulary({})
texts_of = lru_cache(TokenTexts)


def matcher_of(grammar: Grammar, vocabulary: LLTokenizer = BYTES) -> Matcher:
    text, unique = split(grammar.to_text())
    inner = LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
    assert not inner.is_error(), inner.get_error()
    return Matcher(inner, UniqueItems(parts_of(unique), texts_of(vocabulary)) if unique else None)


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether a text is an answer that a grammar allows. The matcher stays where it is."""
    here, data = matcher.copy(), [*text.encode()]
    return here.advance(data) == len(data) and here.inner.is_accepting()


def allowed(matcher: Matcher) -> list[int]:
    """The tokens that may come next, but for those that end the answer."""
    lines = np.frombuffer(matcher.inner.compute_bitmask(), np.uint32)[None].copy()
    matcher.hold_unique(lines, ())
    return np.flatnonzero(np.unpackbits(lines.view(np.uint8), bitorder="little")).tolist()


def write(matcher: Matcher, rng: random.Random, most: int = 300) -> str | None:
    """A text that a grammar allows, made of bytes drawn at random; None if it takes more than so many, or comes where
    nothing may follow: in an array of one value with `minItems: 2` whose items must differ."""
    here, data = matcher.copy(), bytearray()
    while len(data) < most:
        values = [value for value in allowed(here) if value < 256]
        if not values or (here.inner.is_accepting() and rng.random() < 0.5):
            return data.decode() if here.inner.is_accepting() else None
        short = [value for value in values if value in b'"}],0123456789'] or values
        plain = [value for value in values if 0x20 <= value < 0x7F] or values
        chosen = rng.choice(rng.choices([short, plain, values], [4, 5, 1])[0])
        data.append(chosen)
        assert here.advance([chosen]), here.error
    return None
