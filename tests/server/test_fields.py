"""Fields that headrace does not act on are refused, or named in a header, or change nothing of an answer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.tokenizer import Tokenizer
from headrace.server.fields import IGNORED_HEADER, MAX_LOGGED
from tests.engine import fakes
from tests.server.fake_engine import FakeEngine, chat, complete, error_of, make_app, post

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
EFFORT_TEMPLATE = "{{ reasoning_effort | default('none given') }}:{{ messages[-1].content }}"


@pytest.fixture
def engine_that_reads_effort(tmp_path: Path) -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = Tokenizer.from_folder(fakes.model_folder(tmp_path), EFFORT_TEMPLATE)
    return engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": []}, None),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"tools": TOOLS, "reasoning_effort": "low", "verbosity": "low"}, "verbosity, tools, reasoning_effort"),
        ({"verbosity": "medium"}, None),
        ({"service_tier": "flex"}, "service_tier"),
        ({"service_tier": "auto", "store": False, "user": "u", "metadata": {"a": "b"}, "unheard_of": None}, None),
        ({"store": True}, "store"),
        ({"functions": [{"name": "f"}], "function_call": "auto"}, "functions"),
        ({"modalities": ["text"]}, None),
        ({"unheard_of": 1}, "unheard_of"),
        ({"bad\r\nname: x": 1, "é": 1}, "..."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_header_names_what_had_no_effect(stream: bool, fields: dict[str, Any], named: str | None) -> None:
    answer = chat(make_app(), **fields, stream=stream, max_tokens=1)
    assert answer.status_code == 200
    assert answer.headers.get(IGNORED_HEADER) == named


def test_header_of_completions() -> None:
    assert complete(make_app(), max_tokens=1, reasoning_effort="low").headers[IGNORED_HEADER] == "reasoning_effort"
    assert IGNORED_HEADER not in complete(make_app(), max_tokens=1).headers


def test_the_older_form_of_a_forced_call_is_refused() -> None:
    error = error_of(chat(make_app(), tools=TOOLS, function_call={"name": "look"}), 400)
    assert error["param"] == "function_call"
    assert "give tools and a tool_choice" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("documents", [{"text": "a"}]),
        ("stop_regex", "a+"),
    ],
)
def test_what_would_give_a_wrong_answer_is_refused(field: str, value: Any) -> None:
    assert error_of(chat(make_app(), **{field: value}), 400)["param"] == field


def test_a_template_that_reads_the_effort_gets_it(engine_that_reads_effort: FakeEngine) -> None:
    app = make_app(engine_that_reads_effort)
    answer = chat(app, reasoning_effort="high", max_tokens=1)
    assert IGNORED_HEADER not in answer.headers
    chat(app, max_tokens=1)
    chat(app, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}, max_tokens=1)
    prompts = [request["prompt"] for request in engine_that_reads_effort.requests]
    assert prompts == ["high:Hello", "none given:Hello", "low:Hello"]
    count = post(
        app, "/tokenize", {"messages": [{"role": "user", "content": "Hello"}], "reasoning_effort": "high"}
    ).json()["count"]
    assert count == len("high:Hello")


def test_each_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    with caplog.at_level(logging.WARNING, logger="headrace.server.fields"):
        for _ in range(3):
            chat(app, tools=TOOLS, reasoning_effort="high", max_tokens=1)
        assert len(caplog.records) == 2
        for number in range(MAX_LOGGED + 10):
            chat(app, **{f"made_up_{number}": 1}, max_tokens=1)
    assert len(caplog.records) == MAX_LOGGED
