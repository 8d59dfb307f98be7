"""What a chat request says about tools: which the model is shown and may call, whether it must, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.server.fields import IGNORED_HEADER
from headrace.server.tool_use import MAX_TOOLS
from tests.server.fake_engine import FakeEngine, chat, error_of, make_app, make_tokenizer


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


TOOLS = [function("look"), function("go"), function("stay")]
SHOWS = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[-1].content }}"


def shown(**fields: Any) -> str:
    """The prompt: names of the tools that the model is shown, and the message."""
    engine = FakeEngine(tokenizer=make_tokenizer(SHOWS))
    answer = chat(make_app(engine, tool_call_parser="hermes"), **{"tools": TOOLS, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    prompt = engine.requests[0]["prompt"]
    assert isinstance(prompt, str)
    return prompt


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "prompt"),
    [
        (None, "[look][go][stay]Hello"),
        ("auto", "[look][go][stay]Hello"),
        ("required", "[look][go][stay]Hello"),
        ("none", "Hello"),
        ({"type": "function", "function": {"name": "go"}}, "[look][go][stay]Hello"),
        ({"type": "function", "name": "go"}, "[look][go][stay]Hello"),
        (allowed("required", "look"), "[look]Hello"),
        (allowed("auto", "go", "stay"), "[go][stay]Hello"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "go"}]}, "[go]Hello"),
    ],
    ids=str,
)
def test_the_model_is_shown_the_tools_that_it_may_call(choice: Any, prompt: str) -> None:
    assert shown(tool_choice=choice) == prompt


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_without_tools_there_is_no_choice(tools: Any, choice: str | None) -> None:
    assert shown(tools=tools, tool_choice=choice) == "Hello"


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("always", "'auto', 'required', 'none', or"),
        (3, "got 3"),
        (["auto"], "got ['auto']"),
        ({}, "must be {'type': 'function', ...}, got {}"),
        ({"type": "function"}, "tool_choice.function.name must be the name of a tool"),
        ({"type": "function", "function": "go"}, "tool_choice.function.name must be the name of a tool"),
        ({"type": "function", "function": {"name": 3}}, "got 3"),
        ({"type": "function", "function": {"name": "fly"}}, "names 'fly', but the request has the tools 'look', 'go'"),
        (allowed("auto", "look", "fly"), "tool_choice.allowed_tools.tools names 'fly'"),
        (allowed("always", "look"), "mode must be 'auto' or 'required', got 'always'"),
        (allowed("auto"), "tools must be a list of tools, got []"),
        ({"type": "allowed_tools", "allowed_tools": 3}, "mode must be"),
    ],
    ids=str,
)
def test_choices_that_are_not_possible(choice: Any, words: str) -> None:
    error = error_of(chat(make_app(), tools=TOOLS, tool_choice=choice), 400)
    assert error["param"] == "tool_choice"
    assert words in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}, allowed("auto", "a")])
@pytest.mark.parametrize("tools", [None, []])
def test_a_choice_needs_tools(choice: Any, tools: Any) -> None:
    error = error_of(chat(make_app(), tools=tools, tool_choice=choice), 400)
    assert error["param"] == "tool_choice"
    assert "the request has no tools" in error["message"]


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search", "function": {"name": "f"}}, "tools[0].type must be 'function'"),
        ({"type": "custom", "custom": {"name": "f"}}, "got 'custom': models write calls of functions; give one"),
        ({"type": "function", "name": "f"}, "tools[0].function is required, with the function's name"),
        ({"type": "function", "function": {}}, "tools[0].function.name is required"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name is required"),
        (function("f" * 300), "tools[0].function.name may have at most 256 characters"),
        (function("f", parameters=[]), "tools[0].function.parameters must be a JSON Schema (an object), got []"),
        (function("f", strict="yes"), "tools[0].function.strict must be true or false, got 'yes'"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_that_are_no_functions(tool: Any, words: str, choice: str) -> None:
    error = error_of(chat(make_app(), tools=[tool], tool_choice=choice), 400)
    assert error["param"] == "tools"
    assert words in error["message"]


def test_tools_are_bounded() -> None:
    error = error_of(chat(make_app(), tools=[function("f")] * (MAX_TOOLS + 1)), 400)
    assert str(MAX_TOOLS) in error["message"]


def test_tools_of_a_model_without_a_format_are_named_as_without_effect() -> None:
    assert chat(make_app(), tools=TOOLS, max_tokens=1).headers[IGNORED_HEADER] == "tools"
    assert IGNORED_HEADER not in chat(make_app(tool_call_parser="hermes"), tools=TOOLS, max_tokens=1).headers
