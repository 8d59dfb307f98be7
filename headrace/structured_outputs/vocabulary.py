"""Tells llguidance the bytes of each token of a vocabulary.

A token that was added to the vocabulary as a mark (`<|im_end|>`, `<think>`) is not text: no string or pattern of a
grammar matches it, and a grammar that wants it names its id (`literal` in grammar.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from headrace.errors import ConfigError

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{most}}}" for most in (4, 6, 8, 11, 16)),
    f"{_IN_STRING}+",
]
"""Kinds of tokens that llguidance allows as a whole where it can, without a walk through each. Those of up to so many
characters are for strings of bounded length: with llguidance's own (10 and 30), a mask with fewer left takes 2 ms."""


class TokenBytes(Protocol):
    """Describes what this module needs of the engine's Tokenizer."""

    backend: tokenizers.Tokenizer
    vocab_size: int

    @property
    def works_by_token(self) -> bool:
        """Return whether each token adds the same bytes wherever it stands."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""


def marks(tokenizer: TokenBytes) -> dict[str, int]:
    """Return text -> id of the added tokens that are marks: the special ones, and those in angle or square brackets.
    Others, like Gemma's runs of line breaks, are ordinary text."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        token.content: token_id for token_id, token in added.items() if token.special or _in_brackets(token.content)
    }


def _in_brackets(text: str) -> bool:
    return len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))


def vocabulary(tokenizer: TokenBytes, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary of a model whose embedding has `vocab_size` rows; the tokenizer may know fewer or more.
    Takes a second for 150,000 tokens. Raises ConfigError where no grammar can hold the model's output."""
    eos = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
    if not eos:
        raise ConfigError("output cannot be held to a grammar: the model names no token that ends it (eos_token)")
    if not tokenizer.works_by_token:
        return _by_llguidance(tokenizer, vocab_size, eos)
    known = min(vocab_size, tokenizer.vocab_size)
    data = [tokenizer.token_bytes(token_id) for token_id in range(known)] + [b""] * (vocab_size - known)
    special = {token_id for token_id in marks(tokenizer).values() if token_id < vocab_size} | set(eos)
    source = TokenizerWrapper(_Source(data, sorted(special), eos[0]))
    return LLTokenizer(source, n_vocab=vocab_size, eos_token=eos, slices=SLICES)


def byte_vocabulary(special: Mapping[str, int]) -> LLTokenizer:
    """Return a vocabulary of single bytes, and of marks at their ids: grammars are tried on it before a model's is
    there."""
    size = max([*special.values(), 255]) + 258
    marked = {token_id: text.encode() for text, token_id in special.items()}
    free = (token_id for token_id in range(size) if token_id not in marked)
    single = {next(free): bytes([value]) for value in range(256)}
    end = next(free)
    data = [marked.get(token_id) or single.get(token_id) or b"" for token_id in range(size)]
    return LLTokenizer(TokenizerWrapper(_Source(data, sorted([*marked, end]), end)), n_vocab=size, eos_token=[end])


class _Source:
    """Answers what llguidance asks of a tokenizer. It is never asked to encode: grammar.py turns forced tokens off."""

    bos_token_id = None

    def __init__(self, data: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = data
        self.special_token_ids = special
        self.eos_token_id = eos

    def __call__(self, text: str | bytes) -> NoReturn:
        raise TypeError("grammars are matched by bytes alone")


def _by_llguidance(tokenizer: TokenBytes, vocab_size: int, eos: list[int]) -> LLTokenizer:
    """Let llguidance read a tokenizer whose decoder looks at several tokens at a time."""
    try:
        return LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=eos, slices=SLICES)
    except ValueError as error:
        raise ConfigError(f"output cannot be held to a grammar: the tokenizer's decoder: {error}") from None
