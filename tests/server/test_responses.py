"""Shapes of /v1/responses: what items become, the order of a stream's events, what is kept and for whom, errors."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from headrace.errors import NotFoundError, RequestError
from headrace.server.body import convert
from headrace.server.protocol import ChatMessage
from headrace.server.response_items import chat_request, conversation
from headrace.server.response_shapes import ResponseObject, ResponsesRequest
from headrace.server.response_store import ResponseStore
from tests.server.fake_engine import MODEL, TEXT, FakeEngine, error_of, make_app, named_events, post, send
from tests.server.test_auth import KEYS


def ask(app: Any = None, **fields: Any) -> Any:
    return post(app or make_app(), "/v1/responses", {"model": MODEL, "input": "Hello"} | fields)


def chat_of(**fields: Any) -> dict[str, Any]:
    """Return what a request becomes, without what it leaves out."""
    request = convert({"input": "Hello"} | fields, ResponsesRequest)
    found = msgspec.to_builtins(chat_request(request, conversation(request, [])))
    return {name: value for name, value in found.items() if value is not None}


def stream_of(answer: httpx.Response) -> list[dict[str, Any]]:
    found = named_events(answer)
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def test_a_whole_answer() -> None:
    engine = FakeEngine()
    engine.cached = 3
    body = ask(make_app(engine), max_output_tokens=4, temperature=0.5, metadata={"a": "b"}, instructions="Hm.").json()
    assert engine.requests[0]["prompt"] == "<|system|>Hm.</s><|user|>Hello</s><|assistant|>"
    assert (body["object"], body["status"], body["metadata"], body["temperature"]) == (
        "response", "incomplete", {"a": "b"}, 0.5,
    )  # fmt: skip
    (message,) = body["output"]
    assert message["content"] == [{"type": "output_text", "text": "Once", "annotations": [], "logprobs": []}]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "incomplete")
    usage = body["usage"]
    assert (usage["input_tokens_details"], usage["output_tokens"]) == ({"cached_tokens": 3, "cache_write_tokens": 0}, 4)
    assert usage["total_tokens"] == usage["input_tokens"] + 4


def test_the_order_of_events() -> None:
    events = stream_of(ask(stream=True))
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert names == [*begin, *["output_text.delta"] * len(deltas), *end]
    assert (events[0]["response"]["status"], events[-1]["response"]["status"]) == ("in_progress", "completed")
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {events[-2]["item"]["id"]}


def test_an_error_within_a_stream_is_a_failed_response() -> None:
    engine = FakeEngine()
    engine.fail_at = 2
    last = stream_of(ask(make_app(engine), stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"].startswith("the engine is dead")


def test_items_become_messages() -> None:
    messages = chat_of(instructions="Be brief.", input=[
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "g", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
    ])["messages"]  # fmt: skip
    shown = [(one["role"], one["content"], one["reasoning"]) for one in messages]
    assert shown == [
        ("system", "Be brief.\n\nBe kind.", None), ("user", "Hi", None), ("assistant", "Well.", "Hm."),
        ("tool", "1", None), ("tool", "2", None), ("assistant", None, "So."),
    ]  # fmt: skip
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c", "d"]


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "response_format", {"type": "json_object"}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": True}}}, "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}},
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning_effort", "low"),
        ({"max_output_tokens": 5}, "max_completion_tokens", 5),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}]}, "tools",
            [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        ),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", {"type": "function", "name": "f"}),
    ],
)  # fmt: skip
def test_what_a_field_becomes(fields: dict[str, Any], name: str, value: Any) -> None:
    assert chat_of(**fields)[name] == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "much"}, "truncation"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        chat_of(**fields)
    assert found.value.param == param
    assert error_of(ask(**fields), 400)["param"] == param


def test_logprobs_are_those_of_the_text() -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 9}
    whole = ask(**asked).json()
    (part,) = whole["output"][0]["content"]
    assert whole["top_logprobs"] == 2
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"] == TEXT[:9]
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [2] * 9
    events = stream_of(ask(**asked, stream=True))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    for event in deltas:
        assert "".join(one["token"] for one in event["logprobs"]) == event["delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert [one for event in deltas for one in event["logprobs"]] == done["logprobs"] == part["logprobs"]


def test_functions_of_a_namespace_have_its_name_before_theirs() -> None:
    function = {"type": "function", "name": "close", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "agents", "description": "x", "tools": [function]}, function]
    call = {"type": "function_call", "call_id": "c", "name": "close", "namespace": "agents", "arguments": "{}"}
    asked = chat_of(tools=tools, input=[{"role": "user", "content": "Hi"}, call])
    assert [one["function"]["name"] for one in asked["tools"]] == ["agents__close", "close"]
    assert asked["messages"][1]["tool_calls"][0]["function"]["name"] == "agents__close"
    for written, namespace in (("agents__close", "agents"), ("close", None)):
        engine = FakeEngine(text=f'<tool_call>\n{{"name": "{written}", "arguments": {{}}}}\n</tool_call>')
        app = make_app(engine, tool_call_parser="hermes")
        body = ask(app, tools=tools, max_output_tokens=99).json()
        (item,) = body["output"]
        assert (item["name"], item.get("namespace")) == ("close", namespace)
        (again,) = send(app, "GET", f"/v1/responses/{body['id']}").json()["output"]
        assert again == item


def test_background_needs_the_store() -> None:
    assert error_of(ask(background=True, store=False), 400)["param"] == "background"
    assert error_of(ask(background=True, stream=True), 400)["param"] == "background"
    assert error_of(ask(make_app(response_store_bytes=0), background=True), 400)["param"] == "background"


def test_a_conversation_goes_on_without_the_instructions_of_before() -> None:
    engine = FakeEngine(max_model_len=1024)
    app = make_app(engine)
    first = ask(app, instructions="Be brief.", max_output_tokens=4).json()
    second = ask(app, input="And?", previous_response_id=first["id"], max_output_tokens=4).json()
    ask(app, input="So?", previous_response_id=second["id"])
    assert engine.requests[2]["prompt"] == (
        "<|user|>Hello</s><|assistant|>Once</s><|user|>And?</s><|assistant|>Once</s><|user|>So?</s><|assistant|>"
    )


def test_nobody_sees_another_client_s_answers() -> None:
    app = make_app(api_key=KEYS)
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
    made = post(app, "/v1/responses", body, headers=mine).json()["id"]
    assert send(app, "GET", f"/v1/responses/{made}", headers=mine).status_code == 200
    for method in ("GET", "DELETE"):
        error_of(send(app, method, f"/v1/responses/{made}", headers=other), 404)
    error_of(post(app, "/v1/responses", body | {"previous_response_id": made}, headers=other), 404)


def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    store = ResponseStore(3000, 10.0, lambda: now[0])
    for place in range(9):
        shown = ResponseObject(id=f"r{place}", created_at=0, model="m", status="completed")
        store.put("me", shown, [ChatMessage("user", "x" * 500)])
        assert store.size <= 3000
    kept = [place for place in range(9) if store.has("me", f"r{place}")]
    assert kept == [*range(9 - len(kept), 9)]
    assert len(kept) >= 2
    now[0] = 11.0
    with pytest.raises(NotFoundError):
        store.response("me", "r8")
    store.put("me", ResponseObject(id="new", created_at=0, model="m", status="completed"), [])
    assert store.has("me", "new")
    assert not store.has("me", "r8")
    store.delete("me", "new")
    assert store.size == 0
