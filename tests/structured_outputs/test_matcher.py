"""Masks allow what the grammar allows, for the next token and behind drafts; compiling is bounded, shared and off the
caller's thread."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait

import pytest
from llguidance import LLParserLimits, LLTokenizer

from headrace.errors import ConfigError, RequestError
from headrace.structured_outputs import matcher as matcher_module
from headrace.structured_outputs.matcher import OUTPUTS_A_LEXER, GrammarCompiler, Wanted
from tests.speed import PATIENCE
from tests.structured_outputs.grammars import (
    EOS,
    allowed,
    byte_vocabulary,
    choice,
    compiled,
    decode,
    encode,
    lark,
    regex,
    schema,
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_vocabulary, threads=2)
    yield made
    made.shutdown()


def random_words() -> list[str]:
    rng = random.Random()
    return ["".join(rng.choices("abc", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 12))]


def follow(words: list[str], begun: str) -> set[int]:
    """What may come next in a text that is to be one of `words`, by their letters alone."""
    after = {encode(word[len(begun)])[0] for word in words if word.startswith(begun) and word != begun}
    return after | ({EOS} if begun in words else set())


def test_masks_of_a_batch_allow_what_each_grammar_does(compiler: GrammarCompiler) -> None:
    batch = [(words := random_words(), compiled(compiler, choice(words)), [""]) for _ in range(8)]
    rng = random.Random()
    for _ in range(7):
        masks = allowed(compiler, *(Wanted(matcher) for _, matcher, _ in batch))
        for (words, matcher, text), mask in zip(batch, masks, strict=True):
            assert mask == follow(words, text[0])
            going_on = sorted(mask - {EOS})
            if going_on:
                token = rng.choice(going_on)
                assert matcher.advance([token]) == 1
                text[0] += decode([token])
            assert matcher.finished == (follow(words, text[0]) == {EOS})
            assert not matcher.error


def test_a_grammar_of_many_outputs_is_compiled_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, grammar = GrammarCompiler(byte_vocabulary, threads=3), choice(["one", "two"])
    first = compiler.start(grammar).result()
    outputs = []
    for _ in range(4 * OUTPUTS_A_LEXER):
        while (output := compiler.copy(grammar, first, crowded=False)) is None:
            compiler.make_room(grammar, outputs=1)
            wait(compiler._cache[grammar])
        outputs.append(output)
    shared = Counter(id(output.compiled) for output in outputs)
    assert len(shared) == 3
    assert OUTPUTS_A_LEXER <= min(shared.values()) <= max(shared.values()) <= min(shared.values()) + 1
    assert len({frozenset(mask) for mask in allowed(compiler, *map(Wanted, outputs))}) == 1
    del outputs, output
    assert compiler.copy(grammar, first, crowded=False) is not None
    monkeypatch.setattr(matcher_module, "FURTHER_SECONDS", 0.0)
    slow = choice(["a", "b"])
    first = compiler.start(slow).result()
    assert all(compiler.copy(slow, first, crowded=False) for _ in range(3 * OUTPUTS_A_LEXER))
    compiler.shutdown()


def test_masks_behind_drafts_are_those_of_a_matcher_that_took_them(compiler: GrammarCompiler) -> None:
    words = random_words()
    text = max(words, key=len)
    matcher = compiled(compiler, choice(words))
    drafts = encode(text)
    masks = allowed(compiler, Wanted(matcher, drafts), Wanted(matcher.copy()))
    assert len(masks) == len(drafts) + 2
    assert masks[:-1] == [follow(words, text[:place]) for place in range(len(text) + 1)]
    assert masks[-1] == follow(words, "")  # and the walk along the drafts was taken back
    assert allowed(compiler, Wanted(matcher)) == masks[-1:]


def test_behind_a_draft_that_the_grammar_forbids_anything_goes(compiler: GrammarCompiler) -> None:
    """What is sampled there is dropped, since the draft is wrong."""
    matcher = compiled(compiler, choice(["abc"]))
    first, second, third = allowed(compiler, Wanted(matcher, encode("ax")))
    assert (first, second) == ({encode("a")[0]}, {encode("b")[0]})
    assert len(third) >= EOS
    assert not matcher.error


def test_a_batch_finds_nothing_of_those_before_it(compiler: GrammarCompiler) -> None:
    """All are made in the same memory, which grows with the largest."""
    (a, b), large = encode("ab"), [compiled(compiler, choice(["b"])) for _ in range(9)]
    assert allowed(compiler, *(Wanted(matcher) for matcher in large)) == [{b}] * 9
    first, second, third, last = allowed(
        compiler, Wanted(compiled(compiler, choice(["ab"])), encode("xb")), Wanted(large[0])
    )
    assert (first, last) == ({a}, {b})
    assert min(len(second), len(third)) >= EOS


def test_advance_stops_where_the_output_is_complete(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, choice(["ab"]))
    assert matcher.advance(encode("abab")) == 2
    assert matcher.finished
    assert matcher.advance(encode("a")) == 0
    assert not matcher.error


def test_a_token_against_the_grammar_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, regex("[0-9]+"))
    assert matcher.advance(encode("12x4")) == 2
    assert "cannot follow its grammar" in matcher.error
    assert not matcher.finished


def test_copies_go_on_by_themselves(compiler: GrammarCompiler) -> None:
    one = compiled(compiler, choice(["ab", "cd"]))
    other = one.copy()
    one.advance(encode("a"))
    assert allowed(compiler, Wanted(one), Wanted(other)) == [{encode("b")[0]}, {encode("a")[0], encode("c")[0]}]
    late = one.copy()
    assert late.advance(encode("b")) == 1
    assert late.finished
    assert not one.finished


def test_reluctant_tokens_are_allowed_only_where_nothing_else_is(compiler: GrammarCompiler) -> None:
    matcher, (zero, *_) = compiled(compiler, regex("[0-9]{1,2}")), encode("0")
    digits = set(range(zero, zero + 10))
    drafts = encode("12")
    masks = allowed(compiler, Wanted(matcher, drafts, [frozenset((EOS, 10**6))] * 3))
    assert masks == [digits, digits, {EOS}]
    assert allowed(compiler, Wanted(matcher, drafts)) == [digits, digits | {EOS}, {EOS}]


def test_a_schema_is_followed_to_its_end(compiler: GrammarCompiler) -> None:
    number = random.Random().randrange(10**6)
    matcher = compiled(compiler, schema({"type": "object", "properties": {"a": {"const": number}}, "required": ["a"]}))
    begun = f'{{"a":{number}'
    assert matcher.advance(encode(begun)) == len(begun)
    assert matcher.error == ""


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    grammar = choice(["once", str(random.random())[2:]])
    before = compiler.num_compiled
    futures = [compiler.start(grammar) for _ in range(5)]
    assert all(future is futures[0] for future in futures)
    futures[0].result(timeout=PATIENCE)
    assert compiler.num_compiled == before + 1


def test_the_oldest_grammars_are_forgotten(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "MAX_CACHED", 3)
    first, *_ = [compiler.start(choice([f"w{number}"])) for number in range(3)]
    assert compiler.start(choice(["w0"])) is first
    for number in range(3, 6):
        compiler.start(choice([f"w{number}"]))
    assert compiler.start(choice(["w0"])) is not first


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("start: (", "cannot be compiled"),
        ('{"grammars": 5}', "cannot be compiled"),
        (lark("(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
    ],
    ids=["no grammar", "no list", "too deep"],
)
def test_what_cannot_be_compiled_is_an_error_of_one_line(compiler: GrammarCompiler, grammar: str, said: str) -> None:
    error = compiler.start(grammar).exception(timeout=PATIENCE)
    assert isinstance(error, RequestError)
    assert said in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 300


def test_a_grammar_beyond_the_limits_is_an_error(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = lark("x x\nx: " + " | ".join(f'"{word}" x' for word in "abcdefgh"))
    monkeypatch.setattr(matcher_module, "LIMITS", LLParserLimits(max_grammar_size=10))
    assert "size" in str(compiler.start(grammar).exception(timeout=PATIENCE))


def test_a_grammar_whose_lexer_has_ended_is_compiled_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "LIMITS", LLParserLimits(initial_lexer_fuel=20_000, step_lexer_fuel=20_000))
    grammar = lark("W\nW: /([a-f]+ +){0,49}[a-f]+/ & /(?s:.{1,500})/")
    first, matcher = compiler.start(grammar), compiled(compiler, grammar)
    for _ in range(100):
        matcher.advance(encode("ab "))
        compiler.fill([Wanted(matcher)])
    assert matcher.error
    assert compiler.start(grammar) is not first
    assert compiled(compiler, grammar).advance(encode("a")) == 1


@pytest.mark.parametrize("error", [ConfigError("it names no eos"), OSError("a secret path")])
def test_without_a_vocabulary_every_grammar_says_why(error: Exception) -> None:
    def broken() -> LLTokenizer:
        raise error

    compiler = GrammarCompiler(broken, threads=1)
    found = compiler.start(choice(["a"])).exception(timeout=PATIENCE)
    assert isinstance(found, ConfigError)
    assert "secret" not in str(found)
    compiler.shutdown()
