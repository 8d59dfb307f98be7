"""Grammars put together: text with triggers, reasoning before an answer, marks among characters."""

import json
import re

import pytest

from headrace.structured_outputs.grammar import (
    Grammar,
    after_reasoning,
    any_text,
    either,
    lazily,
    literal,
    of_choice,
    of_lark,
    of_regex,
    of_schema,
    of_text,
    repeated,
    sequence,
    up_to,
)
from headrace.structured_outputs.vocabulary import byte_vocabulary
from tests.structured_outputs.support import accepts, matcher_of

MARKS = {"<think>": 1000, "</think>": 1001, "<tool_call>": 1002, "</tool_call>": 1003}
WITH_MARKS = byte_vocabulary(MARKS)
A = of_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
B = of_schema({"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]})


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
    assert allows(of_text(text), text)
    assert not allows(of_text(text), text + " ")
    assert allows(of_text(""), "")
    choice = of_choice(["yes", "no", "", text])
    assert all(allows(choice, one) for one in ("yes", "no", "", text))
    assert not allows(choice, "yesno")


def test_marks_are_tokens_in_markup_and_characters_in_text() -> None:
    assert allows_marked(literal("<think>\nx", MARKS), "<think>\nx")
    assert not allows(literal("<think>\nx", {}), "x")
    assert not allows_marked(of_text("<think>"), "<think>")
    assert allows(of_text("<think>"), "<think>")
    assert not allows_marked(any_text(), "a<think>b")


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


def test_triggers_bind_what_follows_and_leave_other_text_free() -> None:
    calls = [("<f", sequence(of_text("=a>"), A, of_text("</f>"))), ("<f", sequence(of_text("=b>"), B, of_text("</f>")))]
    grammar = lazily(calls, {})
    for text in ("", "hello", "< f {", 'hi <f=a>{"a": 1}</f> and <f=b>{"b":2}</f>.'):
        assert allows(grammar, text), text
    for text in ("x <f", "x <fa", '<f=a>{"b":1}</f>', '<f=c>{"a":1}</f>'):
        assert not allows(grammar, text), text


@pytest.mark.parametrize(
    ("least", "most", "after", "fit", "unfit"),
    [
        (1, None, True, ["<f1;", "x<f1;y<f2;z"], ["", "x"]),
        (1, 1, False, ["<f1;", "x<f1;"], ["x", "<f1;y", "<f1;<f2;"]),
        (0, 1, False, ["", "x", "x<f1;"], ["<f1;y", "x<f"]),
        (0, 1, True, ["x", "x<f1;y"], ["x<f1;y<f2;", "x<f"]),
    ],
)
def test_triggers_may_be_counted(least: int, most: int | None, after: bool, fit: list[str], unfit: list[str]) -> None:
    grammar = lazily([("<f", of_regex("[0-9];"))], {}, at_least=least, at_most=most, text_after=after)
    assert [text for text in fit if not allows(grammar, text)] == []
    assert [text for text in unfit if allows(grammar, text)] == []


def test_a_mark_as_trigger_is_not_its_characters() -> None:
    grammar = lazily([("<tool_call>", sequence(A, literal("</tool_call>", MARKS)))], MARKS)
    assert allows_marked(grammar, 'x<tool_call>{"a":1}</tool_call>y')
    assert not allows_marked(grammar, 'x<tool_call>{"b":1}</tool_call>y')
    assert accepts(matcher_of(grammar, WITH_MARKS), "x<tool_call>anything")


def test_parts_are_named_by_content_so_that_nothing_clashes() -> None:
    numbers = [of_lark(f'start: x\nx: "{i}"') for i in range(20)]
    grammar = repeated(either(*numbers, A, B, A), 1, 3)
    assert len(grammar.parts) == 22
    assert allows(grammar, '7{"a":1}{"b":1}')
    assert not allows(grammar, '7{"a":1}{"b":1}8')
    assert json.loads(grammar.to_text())["grammars"][0]["lark_grammar"]


def test_text_may_be_kept_free_of_others() -> None:
    grammar = any_text(["ab", "<x>"])
    assert allows(grammar, "a b <x")
    assert not allows(grammar, "xaby")
    assert allows(sequence(up_to("END", {}), of_text("!")), "text END!")
    assert not allows(sequence(up_to("END", {}), of_text("!")), "END END!")


def test_forced_text_that_spells_a_mark_is_written_in_characters() -> None:
    """llguidance forces text in tokens of its own choice unless told not to, and would take the end mark here."""
    matcher = matcher_of(of_schema({"const": "a <think> b"}), WITH_MARKS).inner
    for value in b'"a <think> b"':
        mask = matcher.compute_bitmask()
        assert mask[value // 8] >> value % 8 & 1
        assert not mask[1000 // 8] >> 1000 % 8 & 1
        assert matcher.consume_token(value)
    assert matcher.is_accepting()
