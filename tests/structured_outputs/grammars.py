"""What tests of grammars share: a vocabulary of single bytes, grammars, and a way to read masks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from headrace.structured_outputs.matcher import GrammarCompiler, Matcher, Wanted
from tests.speed import PATIENCE

TEXT = b'0123456789abcdefghijklmnopqrstuvwxyz"{}[]:,. -ABCDEFGHIJKLMN'
"""The bytes of token 0, 1, ...; the token behind them ends a text."""
EOS = len(TEXT)
VOCAB_SIZE = EOS + 1


class _Bytes:
    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in TEXT), b"</s>")
    special_token_ids = (EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return encode(text.decode() if isinstance(text, bytes) else text)


def byte_vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=VOCAB_SIZE, eos_token=[EOS])


def encode(text: str) -> list[int]:
    return [TEXT.index(byte) for byte in text.encode() if byte in TEXT]


def decode(token_ids: Sequence[int]) -> str:
    return bytes(TEXT[token] for token in token_ids if token != EOS).decode()


def regex(pattern: str) -> str:
    return lark(f"/{pattern}/")


def choice(words: Sequence[str]) -> str:
    return lark(" | ".join(json.dumps(word) for word in words))


def schema(value: dict[str, Any]) -> str:
    return lark("%json " + json.dumps(value | {"x-guidance": {"whitespace_flexible": False}}))


def lark(start: str) -> str:
    lines = f'%llguidance {{"no_forcing": true}}\nstart: {start}\n'
    return json.dumps({"grammars": [{"lark_grammar": lines}]})


def compiled(compiler: GrammarCompiler, grammar: str) -> Matcher:
    return compiler.start(grammar).result(timeout=PATIENCE).copy()


def allowed(compiler: GrammarCompiler, *wanted: Wanted) -> list[set[int]]:
    """The tokens that each mask allows, line after line."""
    num_words, lines = compiler.fill(wanted)
    bits = np.unpackbits(np.frombuffer(lines, np.uint8).reshape(-1, 4 * num_words), axis=1, bitorder="little")
    return [{*np.flatnonzero(line).tolist()} for line in bits]
