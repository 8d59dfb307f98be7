"""What tests of grammars share: texts held against a grammar byte by byte, and texts that a grammar itself writes."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headrace.structured_outputs.grammar import Grammar
from headrace.structured_outputs.limits import LIMITS
from headrace.structured_outputs.matcher import Matcher
from headrace.structured_outputs.vocabulary import byte_vocabulary

BYTES = byte_vocabulary({})


def matcher_of(grammar: Grammar, vocabulary: LLTokenizer = BYTES) -> Matcher:
    inner = LLMatcher(vocabulary, grammar.to_text(), log_level=0, limits=LIMITS)
    assert not inner.is_error(), inner.get_error()
    return Matcher(inner)


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether a text is an answer that a grammar allows. The matcher stays where it is."""
    here, data = matcher.copy(), [*text.encode()]
    return here.advance(data) == len(data) and here.inner.is_accepting()


def allowed(matcher: Matcher) -> list[int]:
    """The tokens that may come next, but for those that end the answer."""
    bits = np.unpackbits(np.frombuffer(matcher.inner.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def write(matcher: Matcher, rng: random.Random, most: int = 300) -> str | None:
    """A text that a grammar allows, made of bytes drawn at random; None if it takes more than so many."""
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
