"""The one grammar that a chat answer is held to: calls that a request forces, functions that are strict, a format of
the answer, and reasoning before all of these."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.server import chat_grammar as chat_grammar_module
from tests.server.fake_engine import FakeEngine, accepts, chat, error_of, make_app, make_tokenizer

COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
PROMPT = "{{ messages[-1].content }}"


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": COUNT, **more}}


TOOLS = [function("look"), function("go")]
STRICT = [function("look", strict=True), function("go")]


def call(name: str, n: Any = 1) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'n': n}})}\n</tool_call>"


class Asked:
    """A request, and what its answer may be."""

    def __init__(
        self, *, template: str = PROMPT, special: tuple[str, ...] = (), flags: Any = None, **fields: Any
    ) -> None:
        self.engine = FakeEngine(tokenizer=make_tokenizer(template, special), max_model_len=8192)
        flags = {"tool_call_parser": "hermes", "reasoning_parser": "none"} | (flags or {})
        answer = chat(make_app(self.engine, **flags), **fields, max_tokens=1)
        assert answer.status_code == 200, answer.text
        self.grammar = self.engine.requests[0]["grammar"]

    def takes(self, text: str) -> bool:
        return accepts(self.engine, self.grammar, text)


NAMED = {"type": "function", "function": {"name": "go"}}


def test_required_is_calls_and_nothing_else() -> None:
    asked = Asked(tools=TOOLS, tool_choice="required")
    assert asked.takes(call("look"))
    assert asked.takes(call("look") + "\n" + call("go", 2))
    assert not asked.takes("Hello")
    assert not asked.takes(call("look", "one"))
    assert not asked.takes(call("fly"))


def test_the_grammar_of_tools_that_come_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same name another function is another grammar."""
    Asked(tools=TOOLS, tool_choice="required")
    other = function("look", parameters={"type": "object", "properties": {"n": {"type": "boolean"}}})
    assert Asked(tools=[other], tool_choice="required").takes(call("look", True))
    assert not Asked(tools=[other], tool_choice="required", parallel_tool_calls=False).takes(
        call("look") + call("look")
    )
    monkeypatch.delattr(chat_grammar_module, "calls_grammar")
    assert Asked(tools=TOOLS, tool_choice="required").takes(call("look"))
    assert not Asked(tools=[other], tool_choice="required").takes(call("look"))


def test_a_named_function_is_called_once() -> None:
    asked = Asked(tools=TOOLS, tool_choice=NAMED)
    assert asked.takes(call("go"))
    assert not asked.takes(call("look"))
    assert not asked.takes(call("go") + "\n" + call("go"))


def test_without_parallel_calls_there_is_one() -> None:
    asked = Asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert asked.takes(call("look"))
    assert not asked.takes(call("look") + "\n" + call("go"))


def test_of_allowed_tools_others_cannot_be_called() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    asked = Asked(tools=TOOLS, tool_choice=choice)
    assert asked.takes(call("go"))
    assert not asked.takes(call("look"))


def test_auto_is_free_but_for_strict_functions() -> None:
    assert Asked(tools=TOOLS).grammar == ""
    asked = Asked(tools=STRICT)
    assert asked.takes("Hello, 1 < 2.")
    assert asked.takes("I look. " + call("look"))
    assert not asked.takes("I look. " + call("look", "one"))
    assert asked.takes("I go. " + call("go", "home"))


def test_a_model_without_a_format_of_calls_is_held_to_hermess() -> None:
    asked = Asked(tools=TOOLS, tool_choice="required", flags={"tool_call_parser": "auto"})
    assert asked.takes(call("go"))
    assert Asked(tools=STRICT, flags={"tool_call_parser": "auto"}).grammar == ""


def test_a_format_of_the_answer_beside_tools() -> None:
    """The answer has the format, or calls."""
    asked = Asked(tools=TOOLS, response_format=NUMBER)
    assert asked.takes("12")
    assert asked.takes(call("go"))
    assert not asked.takes("twelve")
    forced = Asked(tools=TOOLS, tool_choice="required", response_format=NUMBER)
    assert forced.takes(call("go"))
    assert not forced.takes("12")


THINKS = {"reasoning_parser": "deepseek_r1"}


@pytest.mark.parametrize("special", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": NUMBER}, "12", "twelve"),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "abc", "d"),
        ({"tools": TOOLS, "tool_choice": "required"}, call("go"), "no"),
        ({"tools": TOOLS, "tool_choice": NAMED}, call("go"), call("look")),
    ],
    ids=["json", "regex", "required", "named"],
)
def test_grammars_begin_where_reasoning_ends(
    special: tuple[str, ...], fields: dict[str, Any], right: str, wrong: str
) -> None:
    opened = Asked(template=PROMPT + "<think>\n", special=special, flags=THINKS, **fields)
    assert opened.takes(f"hm, {{</think>{right}")
    assert not opened.takes(f"hm</think>{wrong}")
    assert not opened.takes(right)
    closed = Asked(template=PROMPT + "<think>\n\n</think>\n\n", special=special, flags=THINKS, **fields)
    assert closed.takes(right)
    assert not closed.takes(wrong)
    assert not closed.takes(f"hm</think>{right}")


def test_a_model_that_opens_its_thoughts_itself_may() -> None:
    asked = Asked(special=("<think>", "</think>"), flags={"reasoning_parser": "mistral"}, response_format=NUMBER)
    assert asked.takes("12")
    assert asked.takes("[THINK]hm[/THINK]12")
    must = Asked(special=("<think>", "</think>"), flags=THINKS, response_format=NUMBER)
    assert must.takes("<think>hm</think>12")
    assert must.takes("hm</think>12")


def test_answers_in_channels() -> None:
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    flags = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    asked = Asked(special=special, flags=flags, response_format=NUMBER)
    assert asked.takes(thought + "<|channel|>final<|message|>12")
    assert not asked.takes(thought + "<|channel|>final<|message|>x")
    forced = Asked(special=special, flags=flags, tools=TOOLS, tool_choice="required")
    header = "<|channel|>commentary to=functions.go <|constrain|>json<|message|>"
    assert forced.takes(thought + header + '{"n": 1}<|call|>')
    assert not forced.takes(thought + header + '{"n": "one"}<|call|>')


def test_a_schema_that_cannot_be_held_is_named() -> None:
    wrong = function("go") | {"function": {"name": "go", "parameters": {"type": "whatever"}}}
    error = error_of(chat(make_app(), tools=[TOOLS[0], wrong], tool_choice="required"), 400)
    assert error["param"].startswith("tools")
    assert "tools[1].function.parameters" in error["message"]
    assert chat(make_app(), tools=[wrong], max_tokens=1).status_code == 200
