"""The bytes of tokens as llguidance sees them equal those of its own reader, and marks are not text."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError
from headrace.hub import DEMO_FOLDER
from headrace.structured_outputs.vocabulary import marks, vocabulary
from tests.published import each_tokenizer

PIECE = 16
"""Tokens whose bytes are compared together"""
NO_FORCING = '%llguidance {"no_forcing": true}\n'


def allowed(tokens: LLTokenizer, grammar: str) -> set[int]:
    """The tokens that may come first."""
    matcher = LLMatcher(tokens, NO_FORCING + grammar, log_level=0)
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    return {token_id for token_id in range(tokens.vocab_size) if mask[token_id // 8] >> token_id % 8 & 1}


@each_tokenizer
def test_bytes_equal_those_of_llguidances_own_reader(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    eos = [tokenizer.eos_token_id or 0]
    ours = vocabulary(tokenizer, tokenizer.vocab_size, eos)
    theirs = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=eos)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.eos_tokens == eos
    every = range(tokenizer.vocab_size)
    for start in every[::PIECE]:
        some = [*every[start : start + PIECE]]
        assert ours.decode_bytes(some) == theirs.decode_bytes(some)
        assert [*map(ours.is_special_token, some)] == [*map(theirs.is_special_token, some)]


@pytest.mark.parametrize("bounded", [True, False])
def test_kinds_of_tokens_allowed_as_a_whole_are_those_that_a_walk_through_each_allows(bounded: bool) -> None:
    tokenizer, rng = Tokenizer.from_folder(DEMO_FOLDER), random.Random()
    tokens = vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    text = {"type": "string"} | ({"maxLength": rng.randint(1, 40)} if bounded else {})
    grammar = f"{NO_FORCING}start: %json {json.dumps(text)}"
    by_kind, by_walk = (LLMatcher(each, grammar, log_level=0) for each in (tokens, tokens.with_slices([])))
    for _ in range(60):
        mask = by_kind.compute_bitmask()
        assert mask == by_walk.compute_bitmask()
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        assert by_kind.consume_token(token)
        assert by_walk.consume_token(token)
        if by_kind.is_stopped():
            return
    assert not bounded


def with_added(*tokens: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    tokenizer.backend.add_tokens(list(tokens))
    return Tokenizer(tokenizer.backend, tokenizer.special_tokens, {})


def test_marks_are_not_text_and_other_added_tokens_are() -> None:
    tokenizer = with_added(
        AddedToken("<think>", special=False), AddedToken("[END]", special=True), AddedToken("\n\n\n\n", special=False)
    )
    think, end, breaks = (tokenizer.backend.token_to_id(text) for text in ("<think>", "[END]", "\n\n\n\n"))
    found = marks(tokenizer)
    assert found["<think>"] == think
    assert found["[END]"] == end
    assert "\n\n\n\n" not in found
    tokens = vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    text = allowed(tokens, r"start: /(.|\n)+/")
    assert breaks in text
    assert not text & {*found.values()}
    assert allowed(tokens, f"start: <[{think}]>") == {think}
    assert think not in allowed(tokens, 'start: "<think>"')  # the characters, not the mark


@pytest.mark.parametrize("difference", [-100, 0, 61])
def test_model_may_have_fewer_or_more_rows_than_the_tokenizer_has_tokens(difference: int) -> None:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    size = tokenizer.vocab_size + difference
    tokens = vocabulary(tokenizer, size, [tokenizer.eos_token_id, size + 5])
    assert tokens.vocab_size == size
    text = allowed(tokens, r"start: /(.|\n)*/")
    assert max(text) < tokenizer.vocab_size
    assert text >= {tokenizer.eos_token_id, *tokenizer.encode("x", add_special_tokens=False)}


def test_every_end_token_ends_a_grammar() -> None:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    other = tokenizer.encode("a", add_special_tokens=False)[0]
    tokens = vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id, other])
    assert {tokenizer.eos_token_id, other} <= allowed(tokens, "start: /[0-9]*/")


def test_models_without_end_token_or_with_an_unknown_decoder_are_refused() -> None:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    with pytest.raises(ConfigError, match="eos_token"):
        vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size])
    unknown = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), {}, {})
    with pytest.raises(ConfigError, match="decoder"):
        vocabulary(unknown, 2, [1])
