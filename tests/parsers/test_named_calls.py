"""Calls written as a name and JSON arguments: DeepSeek, Kimi, Mistral."""

from __future__ import annotations

import json

from headrace.parsers.output_parser import Answer
from tests.parsers.reading import answer, called
from tests.parsers.writing import deepseek, kimi, kimi_section, v3, v31

F, G = ("f", {"a": 1}), ("g.h-i", {"b": {"c": ["}", "]"]}})
G_TEXT = '{"b": {"c": ["}", "]"]}}'


BOTH = [
    ("deepseek_v3", deepseek(v3("f", '{"a": 1}') + "\n" + v3("g.h-i", G_TEXT))),
    ("deepseek_v3", v3("f", '{"a": 1}') + v3("g.h-i", G_TEXT)),
    ("deepseek_v31", deepseek(v31("f", '{"a": 1}') + v31("g.h-i", G_TEXT))),
    ("deepseek_v31", deepseek(v31(" f ", '\n{"a": 1}\n') + "\n" + v31("g.h-i", G_TEXT)) + "<｜end▁of▁sentence｜>"),
    ("kimi_k2", kimi_section(kimi("functions.f:0", '{"a": 1}') + kimi("functions.g.h-i:1", G_TEXT))),
    ("kimi_k2", kimi(" functions.f:0 ", ' {"a": 1} ') + "\n" + kimi("functions.g.h-i:1", G_TEXT)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h-i[ARGS]' + G_TEXT),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS] g.h-i ' + G_TEXT),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdEF123[ARGS]{"a": 1}[TOOL_CALLS]g.h-i[CALL_ID]abcdEF124[ARGS]' + G_TEXT),
]


def test_ids_are_those_of_the_text() -> None:
    heads = ["functions.f:0", "functions.f:11", "f:2", "functions.f", "f"]
    calls = answer("kimi_k2", kimi_section("".join(kimi(head, "{}") for head in heads))).calls
    assert [call.name for call in calls] == ["f"] * 5
    assert [call.id for call in calls] == ["functions.f:0", "functions.f:11", None, None, None]
    calls = answer("mistral", "[TOOL_CALLS]f[CALL_ID]abcdEF123[ARGS]{}").calls
    assert [call.id for call in calls] == ["abcdEF123"]


def test_calls_without_arguments() -> None:
    for name, text in (
        ("deepseek_v3", deepseek(v3("f", "{}"))),
        ("deepseek_v31", deepseek(v31("f", ""))),
        ("kimi_k2", kimi_section(kimi("functions.f:0", "") + kimi("functions.f:1", "{}"))),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
    ):
        result = answer(name, text)
        assert {(call.name, call.arguments) for call in result.calls} == {("f", "{}")}


def test_strings_may_hold_any_markup() -> None:
    value = '<｜tool▁call▁end｜>```</think><|tool_call_end|>[TOOL_CALLS]"\\'
    arguments = json.dumps({"x": value}, ensure_ascii=False)
    for name, text in (
        ("deepseek_v3", deepseek(v3("f", arguments))),
        ("deepseek_v31", deepseek(v31("f", arguments))),
        ("kimi_k2", kimi_section(kimi("functions.f:0", arguments))),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{arguments}"),
    ):
        assert called(answer(name, text)) == [("f", {"x": value})]


def test_an_empty_section_says_nothing() -> None:
    assert answer("kimi_k2", "Hi" + kimi_section("")) == Answer(None, "Hi")
    assert answer("deepseek_v31", deepseek(" ")) == Answer()
