"""Arrays whose items must differ: what is written is valid to the jsonschema library, what is valid can be written, and
no answer is led to where nothing may follow."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from headrace.structured_outputs.call_grammar import calls_grammar
from headrace.structured_outputs.conversion import of_params, of_response_format
from headrace.structured_outputs.grammar import (
    Grammar,
    after_reasoning,
    any_text,
    either,
    of_text,
    repeated,
    sequence,
)  # fmt: skip
from headrace.structured_outputs.matcher import GrammarCompiler, Matcher, Wanted
from headrace.structured_outputs.schema import grammar_of_schema
from headrace.structured_outputs.vocabulary import byte_vocabulary
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

LONG = [
    *(b'","', b'", "', b'",', b'"]', b'",\n  "', b',"', b', "', b',"a', b'"a', b'"a"', b' "a"', b'a"', b"ab"),
    *(b'"a","b"', b',"a",', b"1,", b",1", b"12", b"10", b"1,1", b",1,1", b".0", b".0,", b"e0", b"e0]", b"[1"),
    *(b"[1,1]", b'["a","a"]'),
    *(b"[[", b"]]", b"],[", b"[],[]", b"true", b"true,", b",true,", b"se,", b"{}", b"},{", b'"}', b'"},', b'"},{"a":'),
    *(b'{"a"', b'{"a":1}', b'":', b'":"', b"\\u00", b"\\n", "é".encode(), b"\n\n", b"   ", b" 1", b"\n1", b"null"),
    *(b",null", b"ull,", b"1.0", b"-0", b"}]", b'":{"a":', b"1}", b"1},"),
]  # fmt: skip
"""Tokens of which many end an item, or several."""
TEXT = {"type": "string"}
U: dict[str, Any] = {"type": "array", "uniqueItems": True}
SCHEMAS: dict[str, dict[str, Any]] = {
    "texts": {**U, "items": {"type": "string"}, "minItems": 3},
    "short texts": {**U, "items": {"type": "string", "maxLength": 1}, "minItems": 3},
    "a pattern": {**U, "items": {"type": "string", "pattern": "^[ab]{1,2}$"}, "minItems": 4},
    "integers": {**U, "items": {"type": "integer"}, "minItems": 3},
    "a few integers": {**U, "items": {"type": "integer", "minimum": 0, "maximum": 4}, "minItems": 3},
    "numbers": {**U, "items": {"type": "number", "minimum": 0, "maximum": 3}, "minItems": 4},
    "words": {**U, "items": {"type": ["boolean", "null"]}},
    "an enum": {**U, "items": {"enum": ["ab", "abc", "a", 1, None, [1], {"a": 1}]}, "minItems": 3},
    "anything": U,
    "arrays": {**U, "items": {**U, "items": {"enum": ["a", 1]}}, "minItems": 2},
    "objects": {
        **U,
        "items": {
            "type": "object",
            "properties": {"a": {"enum": ["a", "ab"]}, "b": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "minItems": 3,
    },
    "free objects": {**U, "items": {"type": "object", "additionalProperties": {"enum": [1, "a"]}}, "minItems": 2},
    "one of two": {
        "type": "object",
        "properties": {"t": {"anyOf": [TEXT, {**U, "items": {"type": "integer"}}]}, "x": {"type": "array"}},
        "required": ["t"],
        "additionalProperties": False,
    },
}  # fmt: skip


class _Source:
    eos_token_id = 256 + len(LONG)
    bos_token_id = None
    tokens = (*(bytes((byte,)) for byte in range(256)), *LONG, b"</s>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: str | bytes) -> list[int]:
        raise TypeError("tests never let llguidance encode")


def nasty_vocabulary() -> LLTokenizer:
    size = len(_Source.tokens)
    return LLTokenizer(TokenizerWrapper(_Source()), n_vocab=size, eos_token=[_Source.eos_token_id])


def of(schema: dict[str, Any]) -> Grammar:
    return of_params(StructuredOutputsParams(json=schema), {})


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(nasty_vocabulary, threads=2)
    yield made
    made.shutdown()


def started(compiler: GrammarCompiler, schema: dict[str, Any]) -> Matcher:
    return compiler.start(of(schema).to_text()).result(timeout=20).copy()


def masks(compiler: GrammarCompiler, *wanted: Wanted) -> list[set[int]]:
    num_words, lines = compiler.fill(wanted)
    bits = np.unpackbits(np.frombuffer(lines, np.uint8).reshape(-1, 4 * num_words), axis=1, bitorder="little")
    return [{*np.flatnonzero(line).tolist()} - {_Source.eos_token_id} for line in bits]


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(_Source.tokens[token] for token in tokens)


def chosen(allowed: set[int], rng: random.Random) -> int:
    """A token: rather one of those that make items alike."""
    likely = [token for token in allowed if token > 255 or token in b'"ab],01}{tn']
    return rng.choice(sorted(likely if likely and rng.random() < 0.95 else allowed))


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_masks_allow_is_valid_and_goes_on(compiler: GrammarCompiler, name: str) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    judge = jsonschema.Draft202012Validator(SCHEMAS[name])
    for _ in range(12):
        matcher, tokens, finished = started(compiler, SCHEMAS[name]), list[int](), False
        while len(tokens) < 40 and not finished:
            drafts = tokens[-rng.randint(1, 3) :] if rng.random() < 0.2 else []
            allowed, *behind = masks(compiler, Wanted(matcher, drafts))
            finished = matcher.inner.is_accepting() and (not allowed or rng.random() < 0.3)
            if finished:
                value = json.loads(text_of(tokens))
                assert judge.is_valid(value), (value, seed)
                continue
            assert allowed, (text_of(tokens), seed)
            ahead = matcher.copy()
            for draft, mask in zip(drafts, behind, strict=True):
                if not ahead.advance([draft]) or ahead.finished:
                    break
                assert [mask] == masks(compiler, Wanted(ahead)), (text_of(tokens), drafts, seed)
            token = chosen(allowed, rng)
            assert matcher.advance([token]) == 1, (text_of(tokens), token, matcher.error, seed)
            tokens.append(token)


def test_only_tokens_that_make_items_equal_are_forbidden(compiler: GrammarCompiler) -> None:
    """Held against all tokens that llguidance allows, each taken by itself. Where items have no end, none is a dead
    end."""
    rng = random.Random(seed := random.randrange(2**32))
    for items in (
        {"type": "string"},
        {"type": ["array", "string"], "items": TEXT},
        {"type": "object", "additionalProperties": TEXT},
    ):
        matcher, tokens = started(compiler, {**U, "items": items}), list[int]()
        for _ in range(60):
            [allowed] = masks(compiler, Wanted(matcher))
            bits = np.unpackbits(np.frombuffer(matcher.inner.compute_bitmask(), np.uint8), bitorder="little")
            by_grammar = {*np.flatnonzero(bits).tolist()} - {_Source.eos_token_id}
            assert allowed == {token for token in by_grammar if matcher.copy().advance([token])}, (
                text_of(tokens), seed,
            )  # fmt: skip
            if not allowed:
                break
            token = chosen(allowed, rng)
            matcher.advance([token])
            tokens.append(token)


def spelled(value: Any, rng: random.Random) -> str:
    """JSON of a value, written in one of many ways."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        return rng.choice([f"{value}", f"{value}.0", f"{value}.00", f"{value * 10}e-1", f"{value}E0"])
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=rng.random() < 0.5)
    space = rng.choice(["", " ", "\n"])
    if isinstance(value, list):
        return "[" + f"{space},{space}".join(spelled(item, rng) for item in value) + "]"
    names = rng.sample(sorted(value), len(value))
    return "{" + f",{space}".join(f'"{name}":{space}{spelled(value[name], rng)}' for name in names) + "}"


def random_item(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randint(0, 5 if depth < 2 else 3)
    if kind == 4:
        return [random_item(rng, depth + 1) for _ in range(rng.randint(0, 2))]
    if kind == 5:
        return {name: random_item(rng, depth + 1) for name in rng.sample("abc", rng.randint(0, 2))}
    return rng.choice([(0, 1, 12, -3), ("", "a", "ab", 'a"\n', "\\"), ("1", "true", "[]"), (True, False, None)][kind])


def test_arrays_are_taken_if_their_items_differ_however_they_are_written(compiler: GrammarCompiler) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    judge, whole = jsonschema.Draft202012Validator(U), started(compiler, U)
    verdicts = set()
    for _ in range(400):
        value = [random_item(rng) for _ in range(rng.randint(1, 4))]
        data, matcher, tokens = spelled(value, rng).encode(), whole.copy(), list[int]()
        while data:
            fitting = [token for token, text in enumerate(_Source.tokens[:-1]) if data.startswith(text)]
            tokens.append(rng.choice(fitting))
            data = data[len(_Source.tokens[tokens[-1]]) :]
        taken = matcher.advance(tokens) == len(tokens)
        assert taken == judge.is_valid(value), (value, text_of(tokens), seed)
        verdicts.add(taken)
    assert verdicts == {True, False}


def test_copies_go_on_by_themselves(compiler: GrammarCompiler) -> None:
    one = started(compiler, SCHEMAS["texts"])
    assert one.advance([*b'["a","b",']) == 9
    other = one.copy()
    assert other.advance([*b'"c","']) == 5
    assert ord("a") in masks(compiler, Wanted(one.copy()), Wanted(other))[1]
    assert one.advance([*b'"c"']) == 3
    assert other.advance([*b'c"']) == 1
    assert "equal to an earlier one" in other.error
    assert not one.error


def test_the_longest_array_can_only_end(compiler: GrammarCompiler) -> None:
    matcher = started(compiler, SCHEMAS["integers"])
    text = json.dumps([*range(1000)], separators=(",", ":")).encode()
    assert matcher.advance([*text[:-1]]) == len(text) - 1
    [allowed] = masks(compiler, Wanted(matcher))
    assert not {ord(","), _Source.tokens.index(b",1")} & allowed
    assert ord("]") in allowed


def test_a_text_without_such_arrays_has_nothing_to_follow(compiler: GrammarCompiler) -> None:
    for schema in ({"type": "array"}, {"uniqueItems": True, "maxItems": 1}, {"type": "string", "uniqueItems": True}):
        assert started(compiler, schema).unique is None


TOOL = {"type": "object", "properties": {"x": {**U, "items": {"type": "string"}}}, "required": ["x"]}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": ["a", "%s"]}}\n</tool_call>'
CODER = '<tool_call>\n<function=f>\n<parameter=x>\n["a", "%s"]\n</parameter>\n</function>\n</tool_call>'
ARRAY = grammar_of_schema(U, "schema")
PLACES: dict[str, tuple[Grammar, str]] = {
    "reasoning": (after_reasoning(ARRAY, opener="<t>", closers=["</t>"], is_open=True, special={}),
                  'x [1, 1]</t>[1, %s]'),
    "no reasoning": (after_reasoning(ARRAY, opener="<t>", closers=["</t>"], is_open=None, special={}), "[1, %s]"),
    "again and again": (repeated(ARRAY), "[1,1.5][1,%s]"),
    "behind what may be empty": (sequence(repeated(of_text("x")), of_text(" "), ARRAY), "x [1, %s]"),
    "behind nothing": (sequence(repeated(of_text("x"), 0, 1), ARRAY), "[1, %s]"),
    "one of several": (either(of_text("no"), sequence(of_text("a: "), ARRAY)), "a: [1, %s]"),
    "before text": (sequence(ARRAY, any_text()), "[1, %s] [1, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_arrays_are_found_where_they_stand_in_an_answer(place: str) -> None:
    grammar, text = PLACES[place]
    matcher = matcher_of(grammar)
    assert accepts(matcher, text % "2"), matcher.error
    assert not accepts(matcher, text % "1.0")


@pytest.mark.parametrize(("name", "text"), [("hermes", HERMES), ("qwen3_coder", CODER)])
def test_arguments_of_calls_have_such_arrays(name: str, text: str) -> None:
    tools = [FunctionTool(tool, TOOL, True) for tool in ("g", "f")]
    marks = {"<tool_call>": 300, "</tool_call>": 301}
    for least, special in itertools.product((0, 1), ({}, marks)):
        grammar = calls_grammar(TOOL_FORMATS[name], tools, at_least=least, at_most=None, special=special)
        matcher = matcher_of(grammar, byte_vocabulary(special))

        def takes(item: str, matcher: Matcher = matcher, special: dict[str, int] = special) -> bool:
            whole, here = (text % "b") + "\n" + text % item, matcher.copy()
            ids = [*whole.encode()]
            if special:
                pieces = whole.replace("</tool_call>", "\0</tool_call>\0").replace("<tool_call>", "\0<tool_call>\0")
                ids = [
                    token
                    for piece in filter(None, pieces.split("\0"))
                    for token in ([special[piece]] if piece in special else piece.encode())
                ]
            return here.advance(ids) == len(ids) and here.inner.is_accepting()

        assert takes("b")
        assert not takes("a")


def test_parts_of_structural_tags_have_such_arrays() -> None:
    content = {"type": "json_schema", "json_schema": U}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    for form, text in (
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]}, "so <a>[1]</a> and <a>[2, %s]</a>."),
        ({"type": "tags_with_separator", "tags": [tag], "separator": ", "}, "<a>[3]</a>, <a>[2, %s]</a>"),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": "x*"}, content]}, "[2, %s]"),
    ):
        grammar = of_response_format({"type": "structural_tag", "format": form}, {})
        assert grammar is not None
        matcher = matcher_of(grammar)
        assert accepts(matcher, text % 1), text
        assert not accepts(matcher, text % "2.0"), text
