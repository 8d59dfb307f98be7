"""Calls written as JSON objects, by format: with text around, cut short, malformed, and with markup in strings."""

from __future__ import annotations

import json

import pytest

from headrace.parsers.events import Arguments, CallStart
from headrace.parsers.output_parser import Answer, OutputParser
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import answer, called

WEATHER = ("get_weather", {"city": "Paris"})
TIME = ("get_time", {"zone": {"name": "CET", "offsets": [1, -2.5e0, None, True]}})
WEATHER_TEXT = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TIME_TEXT = '{"name": "get_time", "arguments": {"zone": {"name": "CET", "offsets": [1, -2.5e0, null, true]}}}'
LLAMA_TEXT = WEATHER_TEXT.replace("arguments", "parameters")


BOTH = {
    "hermes": f"<tool_call>\n{WEATHER_TEXT}\n</tool_call>\n<tool_call>\n{TIME_TEXT}\n</tool_call>",
    "granite": f"<|tool_call|> [{WEATHER_TEXT}, {TIME_TEXT}]",
    "granite4": f"<tool_call>{WEATHER_TEXT}</tool_call><tool_call>{TIME_TEXT}</tool_call>",
    "granite-20b-fc": f"<function_call> {WEATHER_TEXT}\n<function_call> {TIME_TEXT}",
    "llama3_json": f"<|python_tag|>{WEATHER_TEXT}; {TIME_TEXT}",
    "llama4_json": f"{WEATHER_TEXT}\n{TIME_TEXT}<|eom_id|>",
    "phi4_mini_json": f"functools[{WEATHER_TEXT},\n {TIME_TEXT}]",
    "internlm": f"<|action_start|> <|plugin|>\n{WEATHER_TEXT}<|action_end|>\n"
    f"<|action_start|><|plugin|>{TIME_TEXT}<|action_end|>",
    "jamba": f"<tool_calls>[\n    {WEATHER_TEXT},\n    {TIME_TEXT}\n]</tool_calls>",
    "minimax": f"<tool_calls>\n{WEATHER_TEXT}\n{TIME_TEXT}\n</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>[{WEATHER_TEXT},{TIME_TEXT}]</tool_calls>",
    "xlam": f"[{WEATHER_TEXT}, {TIME_TEXT}]",
    "ernie45": f"<tool_call>\n{WEATHER_TEXT}\n</tool_call>\n<tool_call>\n{TIME_TEXT}\n</tool_call>\n",
    "longcat": f"<longcat_tool_call>{WEATHER_TEXT}</longcat_tool_call>"
    f"<longcat_tool_call>{TIME_TEXT}</longcat_tool_call>",
    "gigachat3": f"<|function_call|>{WEATHER_TEXT}<|message_sep|>\n\nfunction call<|role_sep|>\n{TIME_TEXT}</s>",
    "mistral": f"[TOOL_CALLS] [{WEATHER_TEXT}, {TIME_TEXT}]",
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"get_time": '
    '{"zone": {"name": "CET", "offsets": [1, -2.5e0, null, true]}}}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    '{"city": "Paris"}},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": '
    '{"zone": {"name": "CET", "offsets": [1, -2.5e0, null, true]}}}\n]<|END_ACTION|>',
}  # fmt: skip


def test_arguments_come_before_the_text_ends() -> None:
    parser = OutputParser(TOOL_FORMATS["hermes"], None)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"te') == [
        CallStart(0, "f", None), Arguments(0, "{"), Arguments(0, '"te')]  # fmt: skip
    assert parser.feed('xt": "a}\\"</tool_') == [Arguments(0, 'xt": "a}\\"</tool_')]
    assert parser.feed('call>"}}') == [Arguments(0, 'call>"}')]
    assert parser.feed("</tool_call>") == []
    assert parser.finish(cut=False) == []


def test_strings_may_hold_closing_markup_escapes_and_any_letters() -> None:
    for value in ("</tool_call>", '"}]</tool_call>', "a\\", '\\"{[', "héé 🎉 \u2028", "line\nline\ttab", "\\u0041"):
        for dumped in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            text = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {dumped}, "y": [{dumped}]}}}}\n</tool_call>'
            assert called(answer("hermes", text)) == [("f", {"x": value, "y": [value]})]


def test_raw_control_characters_in_strings_are_escaped() -> None:
    result = answer("hermes", '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb",\n "n": 1}}</tool_call>')
    assert result.calls[0].arguments == '{"code": "a\\n\\tb",\n "n": 1}'


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ('"name": "f", "arguments": {}', {}),
        ('"name": "f", "arguments": { }', {}),
        ('"name": "f"', {}),
        ('"name": "f", "arguments": null', {}),
        ('"name": "f", "arguments": ""', {}),
        ('"name": "f", "arguments": "{\\"a\\": 1}"', {"a": 1}),
        ('"name": "f", "arguments": "Paris"', "Paris"),
        ('"name": "f", "arguments": [1, {"a": 2}]', [1, {"a": 2}]),
        ('"arguments": {"a": 1}, "name": "f"', {"a": 1}),
        ('"arguments": "{\\"a\\": 1}", "name": "f"', {"a": 1}),
        ('"name": "f", "parameters": {"a": 1}', {"a": 1}),
        ('"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": 7', {"a": 1}),
        ('"type": "function", "function": "f", "arguments": {"a": 1}', {"a": 1}),
        ('"thought": {"name": "no"}, "name": "f", "arguments": {"name": "a", "arguments": {}}, "z": [1]',
         {"name": "a", "arguments": {}}),
    ],
)  # fmt: skip
def test_spellings_of_an_object(members: str, arguments: object) -> None:
    for text in (f"{{{members}}}", f"[{{{members}}}]"):
        assert called(answer("hermes", f"<tool_call>{text}</tool_call>")) == [("f", arguments)]


def test_a_call_behind_a_malformed_one_is_found() -> None:
    result = answer("hermes", f"<tool_call>oops</tool_call><tool_call>{WEATHER_TEXT}</tool_call>")
    assert (result.content, called(result)) == ("<tool_call>oops</tool_call>", [WEATHER])


def test_a_bare_object_that_names_an_unknown_tool_is_content() -> None:
    tool = FunctionTool("get_weather")
    other = '{"name": "Bob", "parameters": {"age": 3}}'
    assert answer("llama3_json", other, tool) == Answer(None, other)
    assert called(answer("llama3_json", other)) == [("Bob", {"age": 3})]
    assert called(answer("llama3_json", LLAMA_TEXT, tool)) == [WEATHER]


def test_bare_objects_may_stand_behind_text() -> None:
    tool = FunctionTool("get_weather")
    result = answer("llama3_json", f'In {{"x": 1}}: {LLAMA_TEXT} I hope.', tool)
    assert (result.content, called(result)) == ('In {"x": 1}: ', [WEATHER])


def test_a_bare_object_cut_by_max_tokens_is_content_unless_it_names_a_tool() -> None:
    tool = FunctionTool("get_weather")
    assert answer("llama3_json", 'See {"name": "get_weather", "para', tool, cut=True) == Answer(None, "See ")
    assert answer("llama3_json", '{"name": "Bo', tool, cut=True) == Answer(None, '{"name": "Bo')


@pytest.mark.parametrize(
    "text",
    [f"[{WEATHER_TEXT}]", f"```json\n[{WEATHER_TEXT}]\n```", f"```\n{WEATHER_TEXT}```", f" \n{WEATHER_TEXT}",
     f"<tool_call>{WEATHER_TEXT}</tool_call>", f"[TOOL_CALLS][{WEATHER_TEXT}]"],
)  # fmt: skip
def test_spellings_of_xlam(text: str) -> None:
    result = answer("xlam", text)
    assert (result.content, called(result)) == (None, [WEATHER])


def test_xlam_calls_behind_a_thought_that_stays_content() -> None:
    thought = "<think>Let me [see].</think>"
    for text in (f"{thought}[{WEATHER_TEXT}]", f"{thought}\n\n{WEATHER_TEXT}"):
        result = answer("xlam", text)
        assert (result.content, called(result)) == (thought, [WEATHER])
    assert answer("xlam", f"{thought} [1]") == Answer(None, f"{thought} [1]")
