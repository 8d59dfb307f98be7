"""Answers of gpt-oss, in channels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.parsers.events import Arguments, CallStart, Content, Reasoning
from headrace.parsers.output_parser import Answer, OutputParser
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from tests.parsers.reading import answer, called, read
from tests.published import tokenizer_folder

HARMONY = TOOL_FORMATS["openai"]


def harmony(text: str, *, cut: bool = False) -> Answer:
    """The answer of a text, the same with the reasoning format of its name."""
    found = answer("openai", text, cut=cut)
    assert read([text], HARMONY, REASONING_FORMATS["openai_gptoss"], cut=cut) == found
    return found


def message(channel: str, text: str, end: str = "<|end|>", header: str = "") -> str:
    return f"<|channel|>{channel}{header}<|message|>{text}{end}"


def test_reasoning_preamble_calls_and_content() -> None:
    text = (
        message("analysis", "We need the weather.")
        + "<|start|>assistant"
        + message("commentary", "I look. ")
        + "<|start|>assistant"
        + message("commentary", '{"a": 1}', "<|call|>", " to=functions.f <|constrain|>json")
        + "<|start|>assistant to=functions.g-h"
        + message("commentary", "{}", "<|call|>", " json")
        + "<|start|>assistant"
        + message("final", "It is warm.", "<|return|>")
    )
    found = harmony(text)
    assert (found.reasoning, found.content) == ("We need the weather.", "I look. It is warm.")
    assert called(found) == [("f", {"a": 1}), ("g-h", {})]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.f json<|message|>",
        "to=functions.f<|channel|>commentary json<|message|>",
        "assistant<|channel|>commentary to=functions.f<|message|>",
        "<|constrain|>json to=functions.f<|message|>",
    ],
)
def test_headers_of_calls(header: str) -> None:
    """The recipient makes the call, on either side of the channel. An answer begins within the header."""
    assert called(harmony(header + '{"a": "<x>"}<|call|>')) == [("f", {"a": "<x>"})]


@pytest.mark.parametrize(
    ("recipient", "name"),
    [("functions.f", "f"), ("math.sum", "math.sum"), ("python", "python"), ("browser.open", "browser.open")],
)
def test_recipients(recipient: str, name: str) -> None:
    assert called(harmony(message("commentary", "{}", "<|call|>", f" to={recipient}"))) == [(name, {})]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>final<|message|>Hello<|return|>", None, "Hello"),
        ("<|message|>Hello<|end|>", None, "Hello"),
        ("<|channel|>unknown<|message|>Hello", None, "Hello"),
        ("Hello", None, "Hello"),
        ("Hello<|return|>", None, "Hello"),
        ("a <| b", None, "a <| b"),
        ("assistant is here", None, "assistant is here"),
        ("", None, None),
        ("<|channel|>analysis<|message|><|end|>", None, None),
        ("<|channel|>analysis<|message|> x ", " x ", None),
        ("<|channel|>analysis<|message|>x<|start|>assistant<|channel|>final<|message|>y", "x", "y"),
        ("<|channel|>analysis<|message|>x<|channel|>final<|message|>y", "x", "y"),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>y", "xy", None),
        ("<|channel|>final<|message|>x<|end|><|start|>user<|message|>and?<|end|>", None, "x"),
        (
            "<|channel|>final<|message|>x<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>r",
            None,
            "x",
        ),
        ("Some text <|channel|>final<|message|>x<|return|> more", None, "Some text x more"),
        ("commentary<|channel|>final<|message|>x<|call|>commentary<|channel|>final<|message|>y", None, "xy"),
        ("<|channel|>final", None, None),
        ("<|channel|>final<|mess", None, None),
    ],
)
def test_channels(text: str, reasoning: str | None, content: str | None) -> None:
    found = harmony(text)
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("written", "read_as"), [("", {}), (" \n", {}), ('{"a": "x\ny"}', {"a": "x\ny"}), ("{}\n", {})]
)
def test_arguments_are_json(written: str, read_as: Any) -> None:
    """A call without arguments has an empty object; raw line breaks in strings are escaped."""
    assert called(harmony(message("commentary", written, "<|call|>", " to=functions.f"))) == [("f", read_as)]


def test_arguments_that_are_none_are_passed_on() -> None:
    assert harmony(message("commentary", "print(1)", "<|call|>", " to=python code")).calls[0].arguments == "print(1)"


def test_everything_is_handed_on_as_it_comes() -> None:
    parser = OutputParser(HARMONY, None)
    assert parser.feed("<|channel|>analysis<|message|>Let") == [Reasoning("Let")]
    assert parser.feed(" me") == [Reasoning(" me")]
    assert parser.feed("<|end|><|start|>assistant<|channel|>final<|message|>Hi") == [Content("Hi")]
    assert parser.feed("<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>") == [
        CallStart(0, "f", None)
    ]
    assert parser.feed('{"a": "x') == [Arguments(0, '{"a": "x')]
    assert parser.feed("y") == [Arguments(0, "y")]
    assert parser.feed('"}<|call|>') == [Arguments(0, '"}')]


def test_without_tools_calls_are_left_out() -> None:
    text = message("analysis", "x") + "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>"
    assert read([text], None, REASONING_FORMATS["openai_gptoss"]) == Answer(reasoning="x")


def test_an_answer_that_was_cut_short() -> None:
    """No part of a header becomes content, and of arguments stays what came."""
    text = (
        message("analysis", "x") + "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>" + '{"a": 1}'
    )
    for end in range(len(text)):
        found = read([text[:end]], HARMONY, cut=True)
        assert found.content is None
        assert all('{"a": 1}'.startswith(call.arguments) for call in found.calls)


PIECES = [
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
    "analysis",
    "commentary",
    "final",
    "assistant",
    "user",
    " to=functions.f",
    "json",
    '{"a": "',
    '"}',
    "\n",
    " ",
    "words",
]


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.sampled_from(PIECES), max_size=16).map("".join), st.booleans(), st.integers(0, 200))
def test_a_stream_says_what_the_whole_text_says(text: str, cut: bool, at: int) -> None:
    whole = read([text], HARMONY, cut=cut)
    assert read(list(text), HARMONY, cut=cut) == whole
    assert read([text[:at], text[at:]], HARMONY, cut=cut) == whole


def test_what_the_template_renders_is_read_back() -> None:
    """A prompt ends within a header, with which a completion goes on.

    What the template writes for an assistant's turn, less the end of the prompt before it, is what the model wrote.
    """
    folder = tokenizer_folder("gpt-oss")
    environment = pytest.importorskip("jinja2").Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(strftime_now=lambda form: "2026-01-01", raise_exception=ValueError)
    template = environment.from_string((folder / "chat_template.jinja").read_text())
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    tool = {"name": "get_weather", "arguments": {"city": "Paris"}}
    turns = {
        "call": ({"role": "assistant", "content": "We need it.", "tool_calls": [tool]}, "We need it.", None),
        "words": ({"role": "assistant", "content": "It is warm."}, None, "It is warm."),
        "final": ({"role": "assistant", "content": "Warm.", "thinking": "Hm."}, None, "Warm."),
    }
    prompt = template.render(messages=asked, add_generation_prompt=True)
    assert prompt.endswith("<|start|>assistant")
    for turn, reasoning, content in turns.values():
        whole = template.render(messages=[*asked, turn], add_generation_prompt=False)
        assert whole.startswith(prompt)
        found = harmony(whole.removeprefix(prompt))
        assert (found.reasoning, found.content) == (reasoning, content)
        expected = [(tool["name"], tool["arguments"])] if "tool_calls" in turn else []
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == expected
