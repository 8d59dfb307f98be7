"""What tests of grammars share: texts held against a grammar byte by byte, and texts that a grammar itself writes."""

from __future__ import annotations

import random

from llguidance import LLMatcher, LLTokenizer

from headrace.structured_outputs.grammar import Grammar
from headrace.structured_outputs.limits import LIMITS
from headrace.structured_outputs.vocabulary import byte_vocabulary

BYTES = byte_vocabulary({})


def matcher_of(grammar: Grammar, vocabulary: LLTokenizer = BYTES) -> LLMatcher:
    matcher = LLMatcher(vocabulary, grammar.to_text(), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a text is an answer that a grammar allows. The matcher stays where it is."""
    here, data = matcher.deep_copy(), [*text.encode()]
    return here.try_consume_tokens(data) == len(data) and here.is_accepting()


def write(matcher: LLMatcher, rng: random.Random, most: int = 300) -> str | None:
    """A text that a grammar allows, made of bytes drawn at random; None if it takes more than so many."""
    here, data = matcher.deep_copy(), bytearray()
    while len(data) < most:
        mask = here.compute_bitmask()
        allowed = [value for value in range(256) if mask[value // 8] >> value % 8 & 1]
        if not allowed or (here.is_accepting() and rng.random() < 0.5):
            return data.decode()
        short = [value for value in allowed if value in b'"}],0123456789'] or allowed
        plain = [value for value in allowed if 0x20 <= value < 0x7F] or allowed
        chosen = rng.choice(rng.choices([short, plain, allowed], [4, 5, 1])[0])
        data.append(chosen)
        assert here.consume_token(chosen), here.get_error()
    return None
