"""/parse_function_call and /separate_reasoning: what a parser makes of a text, without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.server.parse_text import MAX_TEXT_CHARS
from tests.server.fake_engine import error_of, make_app, post

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "é"}}\n</tool_call>'


def parsed(text: str, **fields: Any) -> dict[str, Any]:
    answer = post(make_app(), "/parse_function_call", {"text": text, "tool_call_parser": "hermes", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("tools", [TOOLS, [], None])
def test_calls_and_the_text_around_them(tools: Any) -> None:
    found = parsed("I see. " + CALL, tools=tools)
    assert set(found) == {"normal_text", "calls"}
    assert found["normal_text"].strip() == "I see."
    assert [(call["name"], json.loads(call["parameters"])) for call in found["calls"]] == [("look", {"x": "é"})]


def test_a_text_without_calls() -> None:
    assert parsed("a < b") == {"normal_text": "a < b", "calls": []}
    assert parsed("") == {"normal_text": "", "calls": []}


def test_reasoning_and_the_rest() -> None:
    answer = post(
        make_app(), "/separate_reasoning", {"text": "<think>hm</think>Yes.", "reasoning_parser": "deepseek-r1"}
    )
    assert answer.json() == {"reasoning_text": "hm", "text": "Yes."}


def test_the_served_models_parser_is_the_default() -> None:
    app = make_app(tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    assert post(app, "/parse_function_call", {"text": CALL}).json()["calls"][0]["name"] == "look"
    assert post(app, "/separate_reasoning", {"text": "hm</think>Yes."}).json()["reasoning_text"] == "hm"


@pytest.mark.parametrize(
    ("path", "field"), [("/parse_function_call", "tool_call_parser"), ("/separate_reasoning", "reasoning_parser")]
)
@pytest.mark.parametrize("name", [None, "no_such", "auto", ""])
def test_an_unknown_parser_is_refused_with_the_names_there_are(path: str, field: str, name: str | None) -> None:
    error = error_of(post(make_app(), path, {"text": "a", field: name}), 400)
    assert error["param"] == field
    assert ("hermes" if field == "tool_call_parser" else "qwen3") in error["message"]


@pytest.mark.parametrize("path", ["/parse_function_call", "/separate_reasoning"])
def test_bad_bodies(path: str) -> None:
    names = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    assert error_of(post(make_app(), path, names), 400)["param"] == "text"
    assert error_of(post(make_app(), path, {"text": 3, **names}), 400)["param"] == "text"
    assert error_of(post(make_app(), path, {"text": "a" * (MAX_TEXT_CHARS + 1), **names}), 400)["param"] == "text"
    assert error_of(post(make_app(), "/parse_function_call", {"text": "", "tools": [{"function": {}}], **names}), 400)


def test_long_texts_are_parsed_beside_the_loop() -> None:
    found = parsed(CALL + "x" * 100_000 + CALL)
    assert [call["name"] for call in found["calls"]] in (["look"], ["look", "look"])
