"""Shapes of /v1/messages: what a request becomes, the order of a stream's events, ends, and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from headrace.errors import RequestError
from headrace.server.body import convert
from headrace.server.message_shapes import MessagesRequest
from headrace.server.messages import CHANGES_EVERY_TIME, INVALID_JSON, chat_request
from tests.server.fake_engine import MODEL, TEXT, FakeEngine, make_app, named_events, send
from tests.server.test_auth import KEYS

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def ask(app: Any = None, path: str = "/v1/messages", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 4, "messages": HELLO} | fields
    found = {"content-type": "application/json"} | (headers or {})
    return send(app or make_app(), "POST", path, content=json.dumps(body).encode(), headers=found)


def error(answer: httpx.Response, status: int) -> dict[str, str]:
    """Return Anthropic's error object, its shape checked."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert (body["type"], sorted(body["error"])) == ("error", ["message", "type"])
    found: dict[str, str] = body["error"]
    return found


def chat_of(**fields: Any) -> dict[str, Any]:
    """Return what a request becomes, without what it leaves out."""
    request = convert({"max_tokens": 4, "messages": HELLO} | fields, MessagesRequest)
    found = msgspec.to_builtins(chat_request(request)[0])
    return {name: value for name, value in found.items() if value is not None}


def test_a_whole_answer() -> None:
    engine = FakeEngine()
    engine.cached = 3
    answer = ask(make_app(engine), stop_sequences=["zzz"], temperature=0.5, top_k=3, system="Be brief.")
    prompt = "<|system|>Be brief.</s><|user|>Hello</s><|assistant|>"
    assert engine.requests[0]["prompt"] == prompt
    params = engine.requests[0]["params"]
    assert (params.max_tokens, params.stop, params.temperature, params.top_k) == (4, ["zzz"], 0.5, 3)
    body = answer.json()
    assert body.pop("id").startswith("msg-")
    assert answer.headers["request-id"].startswith("msg-")
    usage = body.pop("usage")
    assert usage == {
        "input_tokens": len(engine.requests[0]["ids"]) - 3, "output_tokens": 4, "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
    }  # fmt: skip
    assert body == {
        "type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": "Once"}],
        "stop_reason": "max_tokens", "stop_sequence": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 99}, "end_turn", None, TEXT),
        ({"max_tokens": 99, "stop_sequences": [" time"]}, "stop_sequence", " time", "Once upon a"),
        ({"max_tokens": 4}, "max_tokens", None, "Once"),
        ({"max_tokens": 128_000, "system": "x" * 214}, "model_context_window_exceeded", None, "Once"),
    ],
)
def test_ends(fields: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    whole = ask(**fields).json()
    assert (whole["stop_reason"], whole["stop_sequence"], whole["content"][0]["text"]) == (reason, sequence, text)
    events = named_events(ask(**fields, stream=True))
    names = [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {*names[2:-3]} == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == text
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert events[-2]["usage"] == whole["usage"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_a_message_that_is_continued() -> None:
    engine = FakeEngine()
    ask(make_app(engine), messages=[*HELLO, {"role": "assistant", "content": "Well,"}])
    assert engine.requests[0]["prompt"] == "<|user|>Hello</s><|assistant|>Well,"


def test_turns_with_tools_become_messages_of_a_chat() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]},
        {"type": "text", "text": "And?"},
    ]
    found = chat_of(messages=[*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}])
    said, result, asked = found["messages"][1:]
    assert (said["content"], said["reasoning"]) == ("Let me see.", "Hm.")
    assert said["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "1", "a")
    assert (asked["role"], asked["content"]) == ("user", [{"type": "text", "text": "And?"}])


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice", "required"),
        ({"tool_choice": {"type": "none"}}, "tool_choice", "none"),
        (
            {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice",
            {"type": "function", "function": {"name": "f"}},
        ),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel_tool_calls", False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking_token_budget", 1024),
        ({"thinking": {"type": "disabled"}}, "thinking", False),
        ({"output_config": {"effort": "low"}}, "reasoning_effort", "low"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "response_format",
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}},
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {}}]}, "tools",
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        ),
    ],
)  # fmt: skip
def test_what_a_field_becomes(fields: dict[str, Any], name: str, value: Any) -> None:
    assert chat_of(**fields)[name] == value


def test_an_agent_s_changing_line_is_left_out() -> None:
    changing = {"type": "text", "text": f"{CHANGES_EVERY_TIME} cch=12ab;"}
    rules = {"type": "text", "text": "Be brief."}
    assert chat_of(system=[changing, rules])["messages"][0]["content"] == "Be brief."
    assert chat_of(system=[changing])["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}]}]},
         "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools"),
        ({"tools": [{"name": "f", "input_schema": 1}]}, "tools"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        chat_of(**fields)
    assert found.value.param == param
    assert error(ask(**fields), 400)["type"] == "invalid_request_error"


def test_what_has_no_effect_is_named() -> None:
    answer = ask(
        thinking={"type": "enabled", "budget_tokens": 1024}, context_management={"edits": []}, metadata={},
        output_config={"effort": "low"},
    )  # fmt: skip
    named = "context_management, thinking.budget_tokens, thinking, output_config.effort"
    assert answer.headers["x-headrace-ignored"] == named
    answer = ask(thinking={"type": "disabled", "budget_tokens": 1024})
    assert answer.headers["x-headrace-ignored"] == "thinking.budget_tokens, thinking"


def test_the_system_may_speak_later() -> None:
    late = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]
    messages = [*HELLO, {"role": "system", "content": late}, {"role": "assistant", "content": "Yes."}, *HELLO]
    assert chat_of(messages=messages)["messages"][1] == {
        **chat_of()["messages"][0], "role": "system", "content": "Be\n\nkind.",
    }  # fmt: skip


def test_errors_have_anthropic_s_shape() -> None:
    assert error(ask(model="nobody"), 404)["type"] == "not_found_error"
    assert error(ask(max_tokens=None), 400)["message"].startswith("max_tokens")
    assert error(send(make_app(), "GET", "/v1/messages"), 405)["type"] == "invalid_request_error"
    engine = FakeEngine()
    engine.dead = True
    assert error(ask(make_app(engine)), 503)["type"] == "overloaded_error"


def test_an_error_within_a_stream_is_its_last_event() -> None:
    engine = FakeEngine()
    engine.fail_at = 2
    event = named_events(ask(make_app(engine), stream=True))[-1]
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")


def test_keys_of_both_kinds() -> None:
    app = make_app(api_key=KEYS)
    assert error(ask(app), 401)["type"] == "authentication_error"
    assert ask(app, headers={"x-api-key": KEYS[1]}).status_code == 200
    assert ask(app, headers={"authorization": f"Bearer {KEYS[0]}"}).status_code == 200
    assert ask(app, headers={"authorization": f"Bearer {KEYS[0]}", "x-api-key": "wrong"}).status_code == 401


def test_counting_needs_no_max_tokens() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    ask(app)
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    headers = {"content-type": "application/json"}
    answer = send(app, "POST", "/v1/messages/count_tokens", content=body, headers=headers)
    assert answer.json() == {"input_tokens": len(engine.requests[0]["ids"])}


def test_a_call_that_was_cut_off_keeps_its_text() -> None:
    engine = FakeEngine(text='<tool_call>\n{"name": "f", "arguments": {"x": "abc')
    app = make_app(engine, tool_call_parser="hermes")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = ask(app, tools=tools, max_tokens=46).json()
    (call,) = body["content"]
    assert (call["name"], list(call["input"]), body["stop_reason"]) == ("f", [INVALID_JSON], "max_tokens")
