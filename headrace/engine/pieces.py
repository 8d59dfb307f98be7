"""Tells which bytes each token adds to a running text, in a table that follows from the tokenizer's decoder.

Most decoders work token by token (byte-level BPE, sentencepiece with byte fallback), so a running text costs one
look-up a token. For a decoder that does more there is no such table, and text is decoded in windows (detokenizer.py).
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Piece(NamedTuple):
    """Holds what one token adds to a text."""

    data: bytes
    is_byte: bool
    """Whether it is a single raw byte (byte fallback), which may need its neighbours to become a character."""


class Rule(NamedTuple):
    """Describes how a decoder turns one token into bytes."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)
    """Text that is removed from the beginning of a whole decoded text, and how many times at most."""


class PieceTable:
    """Keeps the piece of each token id. An entry is made when it is first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.rule = _rule(backend)
        """None if the decoder looks at more than one token at a time."""
        self._pieces: dict[int, Piece] = {}

    def get(self, token_id: int) -> Piece | None:
        """Return the piece of a token; None if there is no rule. An id outside the vocabulary is an empty piece."""
        piece = self._pieces.get(token_id)
        if piece is None and self.rule is not None:
            piece = self._pieces[token_id] = _piece(self._backend.id_to_token(token_id), self.rule)
        return piece


def _rule(backend: tokenizers.Tokenizer) -> Rule | None:
    """Return the rule of a tokenizer's decoder, or None if it does not work token by token."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Rule(byte_level=True)
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip = ("", 0)
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not byte_fallback and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not step["stop"] and not strip[1]:
            strip = (step["content"], step["start"])
        else:
            return None
    return Rule(False, tuple(replacements), byte_fallback, strip) if fused else None


def _piece(token: str | None, rule: Rule) -> Piece:
    if token is None:
        return Piece(b"", False)
    if rule.byte_level:
        try:
            return Piece(bytes(_BYTE_OF_CHAR[char] for char in token), False)
        except KeyError:  # an added token stands for its own text
            return Piece(token.encode(), False)
    for old, new in rule.replacements:
        token = token.replace(old, new)
    if rule.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return Piece(bytes((int(match[1], 16),)), True)
    return Piece(token.encode(), False)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (as in GPT-2). Bytes that are printable
    stand for themselves; the others are numbered from character 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
