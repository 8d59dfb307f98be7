"""Grammars put together: text up to others, reasoning before an answer, marks among characters."""

import json
import re
from typing import Any

import pytest

from headrace.structured_outputs.conversion import of_params
from headrace.structured_outputs.grammar import TEXT, Grammar, Rules, after_reasoning, either, without
from headrace.structured_outputs.vocabulary import byte_vocabulary
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

MARKS = {"<think>": 1000, "</think>": 1001, "<tool_call>": 1002, "</tool_call>": 1003}
WITH_MARKS = byte_vocabulary(MARKS)


def of_json(schema: dict[str, Any]) -> Grammar:
    rules = Rules()
    return rules.grammar(rules.json(schema))


def markup(text: str, special: dict[str, int]) -> Grammar:
    rules = Rules(special)
    return rules.grammar(rules.literal(text))


A = of_json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
B = of_json({"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]})


def allows(grammar: Grammar, text: str) -> bool:
    return accepts(matcher_of(grammar), text)


def allows_marked(grammar: Grammar, text: str) -> bool:
    """Whether a grammar allows a text in which marks are tokens of their own."""
    matcher = matcher_of(grammar, WITH_MARKS).inner
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(MARKS)})", text):
        ids += [MARKS[piece]] if piece in MARKS else [*piece.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_texts_stand_for_themselves_whatever_is_in_them() -> None:
    text = 'a"b\\c\n\t\x00\x7fé😀/<|im_end|> start: @x <[5]> %json {}'
    assert allows(markup(text, {}), text)
    assert not allows(markup(text, {}), text + " ")
    assert allows(markup("", {}), "")
    choice = of_params(StructuredOutputsParams(choice=["yes", "no", "", text]), {})
    assert all(allows(choice, one) for one in ("yes", "no", "", text))
    assert not allows(choice, "yesno")


def test_marks_are_tokens_in_markup_and_characters_in_text() -> None:
    assert allows_marked(markup("<think>\nx", MARKS), "<think>\nx")
    assert not allows(markup("<think>\nx", {}), "x")
    assert not allows_marked(markup("<think>", {}), "<think>")
    assert allows(markup("<think>", {}), "<think>")
    assert not allows_marked(Grammar(TEXT), "a<think>b")


@pytest.mark.parametrize("marks", [MARKS, {}], ids=["marks", "characters"])
def test_reasoning_comes_before_the_grammar_unless_the_prompt_closed_it(marks: dict[str, int]) -> None:
    fits = allows_marked if marks else allows

    def whole(is_open: bool | None) -> Grammar:
        return after_reasoning(A, opener="<think>", closers=["</think>"], is_open=is_open, special=marks)

    assert fits(whole(False), '{"a": 1}')
    assert not fits(whole(False), 'hm</think>{"a": 1}')
    assert fits(whole(True), 'hm {"b" </think>{"a": 1}')
    assert not fits(whole(True), '{"a": 1}')
    assert not fits(whole(True), 'hm</think>{"b": 1}')
    assert fits(whole(None), '{"a": 1}')
    assert fits(whole(None), '<think>hm</think>{"a": 1}')
    assert not fits(whole(None), 'hm</think>{"a": 1}')
    assert not fits(whole(None), '<think>{"a": 1}')


def test_reasoning_ends_at_its_most_tokens() -> None:
    rules = Rules(MARKS)
    free = rules.grammar(rules.anything(but=["<think>"]))

    def whole(is_open: bool | None, most: int, grammar: Grammar = free) -> Grammar:
        options: Any = {"opener": "<think>", "closers": ["\n</think>", "</think>"], "special": MARKS}
        return after_reasoning(grammar, is_open=is_open, most=most, **options)

    for most in (0, 1, 5):
        thought = "x" * most
        assert allows_marked(whole(True, most), f"{thought}</think>An answer.<tool_call>x</tool_call>")
        assert not allows_marked(whole(True, most), f"{thought}x</think>")
        assert not allows_marked(whole(True, most), f"{thought}</think>And <think>again")
        assert allows_marked(whole(None, most), f"<think>{thought}</think>")
        assert allows_marked(whole(None, most), "An answer that is longer")
        assert not allows_marked(whole(None, most), f"<think>{thought}x</think>")
        assert allows_marked(whole(True, most, A), f'{thought}</think>{{"a": 1}}')
        matcher = matcher_of(whole(True, most), WITH_MARKS).inner
        assert matcher.try_consume_tokens([*thought.encode()]) == most
        masked = {i for i in range(1100) if matcher.compute_bitmask()[i // 8] >> i % 8 & 1}
        assert masked & {*MARKS.values()} == {MARKS["</think>"]}
        assert not masked & {*b"abcx "}
    assert allows_marked(Rules().grammar(Rules().anything()), "a<think>b")
    neither = rules.grammar(rules.anything(but=["<think>", "<tool_call>"]))
    assert allows_marked(neither, "a</think>b")
    assert not allows_marked(neither, "a<tool_call>b")
    assert not allows_marked(neither, "<think>b")


def test_parts_are_named_by_content_so_that_nothing_clashes() -> None:
    rules = Rules()
    numbers = [rules.lark(f'start: x\nx: "{i}"') for i in range(20)]
    some = rules.one_of([*numbers, *map(rules.placed, (A, B, either(A, B)))])
    grammar = rules.grammar(rules.repeated(some, 1, 3))
    assert len(grammar.parts) == 22
    assert allows(grammar, '7{"a":1}{"b":1}')
    assert not allows(grammar, '7{"a":1}{"b":1}8')
    assert json.loads(grammar.to_text())["grammars"][0]["lark_grammar"]


def test_text_may_be_kept_free_of_others() -> None:
    rules = Rules()
    grammar = rules.grammar(rules.terminal(without(["ab", "<x>"])))
    assert allows(grammar, "a b <x")
    assert not allows(grammar, "xaby")
    until = rules.grammar(f"{rules.until(TEXT, 'END')} {rules.literal('!')}")
    assert allows(until, "text END!")
    assert not allows(until, "END END!")


def test_text_up_to_a_mark_has_no_such_mark() -> None:
    rules = Rules(MARKS)
    grammar = rules.grammar(f"{rules.until(TEXT, 'to <think>')} {rules.literal('!')}")
    assert allows_marked(grammar, "x to <think>!")
    assert not allows_marked(grammar, "x <think>!")
    assert not accepts(matcher_of(grammar, WITH_MARKS), "to <think>!")


def test_forced_text_that_spells_a_mark_is_written_in_characters() -> None:
    """llguidance forces text in tokens of its own choice unless told not to, and would take the end mark here."""
    matcher = matcher_of(of_json({"const": "a <think> b"}), WITH_MARKS).inner
    for value in b'"a <think> b"':
        mask = matcher.compute_bitmask()
        assert mask[value // 8] >> value % 8 & 1
        assert not mask[1000 // 8] >> 1000 % 8 & 1
        assert matcher.consume_token(value)
    assert matcher.is_accepting()
