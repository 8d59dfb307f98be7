"""What goes over the wire: every chunk of a stream, its order and shape, and the whole answer that it adds up to."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.tasks import TOOLS, Task
from tests.published import tokenizer_folder
from tests.sampled import some_of
from tests.scripted.engine import Scripted, ScriptedServers
from tests.scripted.families import FAMILIES, Call, Said
from tests.server.fake_engine import events
from tests.server.test_chat_parsing import put_together
from tests.speed import PATIENCE

IDS = {"kimi-k2": r"functions\.\w+:\d+", "mistral": r"[A-Za-z0-9]{9}"}
"""How ids of tool calls look where the family has a way of its own."""


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
        yield client


def whole(http: httpx.Client, scripted: Scripted, **fields: Any) -> dict[str, Any]:
    """The first choice of an answer that is not streamed, its shape checked."""
    answer = http.post(f"{scripted.url}/v1/chat/completions", json=fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message.get("reasoning") == message.get("reasoning_content")
    assert message.get("tool_calls") != []
    return choice


def streamed(http: httpx.Client, scripted: Scripted, **fields: Any) -> dict[str, Any]:
    """The choice that a stream's chunks add up to, in the shape of a whole one. Every chunk is checked."""
    fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(f"{scripted.url}/v1/chat/completions", json=fields)
    assert answer.status_code == 200, answer.text
    *chunks, usage, done = events(answer)
    assert (done, usage["choices"]) == ("[DONE]", [])
    assert usage["usage"]["completion_tokens"] > 0
    assert {chunk["object"] for chunk in (*chunks, usage)} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in (*chunks, usage)}) == 1
    found = put_together(chunks)
    message = {"role": "assistant", "content": found["content"], "reasoning": found["reasoning"]}
    calls = {"tool_calls": found["calls"]} if found["calls"] else {}
    return {"index": 0, "message": message | calls, "finish_reason": found["finish"]}


def ask(http: httpx.Client, scripted: Scripted, stream: bool, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Well?"}]
    return (streamed if stream else whole)(http, scripted, **{"messages": messages, **fields})


def calls_of(choice: dict[str, Any]) -> list[Call]:
    return [
        Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"].get("tool_calls") or []
    ]


def test_an_agent_by_hand(http: httpx.Client, scripted: Scripted, task: Task, stream: bool) -> None:
    """Messages go back as they came, reasoning included."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    finish, turn = "", 0
    while finish != "stop":
        choice = ask(http, scripted, stream, messages=messages, tools=TOOLS)
        message, finish = choice["message"], choice["finish_reason"]
        if scripted.family.thinks:
            assert message["reasoning"].strip() == task.thoughts[turn]
        else:
            assert not message.get("reasoning")
        turn += 1
        messages.append(message)
        for call in message.get("tool_calls") or []:
            assert finish == "tool_calls"
            assert not message["content"]
            assert re.fullmatch(IDS.get(scripted.name, r"chatcmpl-tool-[0-9a-f]+"), call["id"])
            result = task.run_json(**call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    task.check(scripted, messages[-1]["content"].strip())


@pytest.mark.parametrize("name", some_of(["qwen3", "gpt-oss"], 1))
def test_with_a_real_tokenizer_and_template(
    http: httpx.Client, servers: ScriptedServers, name: str, stream: bool
) -> None:
    scripted = servers(dataclasses.replace(FAMILIES[name], real=tokenizer_folder(name)))
    task = Task.fresh(scripted.family)
    scripted.play(*task.turns())
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    for choices in ("required", "auto", "auto"):
        message = ask(http, scripted, stream, messages=messages, tools=TOOLS, tool_choice=choices)["message"]
        messages.append(message)
        for call in message.get("tool_calls") or []:
            result = task.run_json(**call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    assert message["content"].strip() == task.answer
    assert message["reasoning"].strip() == task.thoughts[2]
    assert task.done == task.calls


def test_stream_and_answer_are_the_same(http: httpx.Client, scripted: Scripted) -> None:
    """Of a turn with all that the family can say in one: a thought, an answer and several calls."""
    first, second = Task.fresh(scripted.family).calls
    family = scripted.family
    said = Said(
        "" if family.name == "pythonic" else "Let me see.",
        (first, second) if family.parallel else (first,),
        "Both tools." if family.thinks else None,
    )
    scripted.play(("", said))
    one, other = (ask(http, scripted, stream, tools=TOOLS) for stream in (False, True))
    for choice in (one, other):
        for call in choice["message"]["tool_calls"]:
            assert call.pop("id")
        assert choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["content"] or "").strip() == said.content
        assert (choice["message"].get("reasoning") or "").strip() == (said.reasoning or "")
        assert calls_of(choice) == [*said.calls]
    assert one["message"]["tool_calls"] == other["message"]["tool_calls"]
    assert (one["message"]["content"] or "") == (other["message"]["content"] or "")


def test_arguments_stream_as_they_come(http: httpx.Client, scripted: Scripted) -> None:
    """A long argument does not arrive in one lump at the end."""
    forced(scripted, Call("get_weather", {"city": "far away " * 40, "days": 1}))
    lines = []
    fields = {"messages": [{"role": "user", "content": "Well?"}], "tools": TOOLS, "stream": True}
    with scripted.pace(0.001), http.stream("POST", f"{scripted.url}/v1/chat/completions", json=fields) as answer:
        lines = [line for line in answer.iter_lines() if '"tool_calls":[' in line]
    assert len(lines) > 20


def test_a_cut_call_leaks_no_markup(http: httpx.Client, scripted: Scripted, stream: bool) -> None:
    """Wherever max_tokens cuts: the reason is `length`, and what is there of the call is no text of the answer."""
    call = Task.fresh(scripted.family).calls[0]
    said = Said(calls=(call,), reasoning="Hm." if scripted.family.thinks else None)
    scripted.play(("", said))
    written = json.dumps(call.arguments, ensure_ascii=False)
    text = scripted.family.write(said, 0)
    total = len(scripted.transcript.tokenizer.encode(text, add_special_tokens=False))
    for max_tokens in range(1, total - 1, 4):
        choice = ask(http, scripted, stream, tools=TOOLS, max_tokens=max_tokens)
        if choice["finish_reason"] == "tool_calls":  # all but the end of the turn is there
            assert calls_of(choice) == [call]
            continue
        assert choice["finish_reason"] == "length"
        content = (choice["message"]["content"] or "").strip()
        # what has no marker, and might still be text, is all that a Python list has before its first value
        assert not content or (scripted.name == "pythonic" and "[get_weather(city".startswith(content))
        for found in choice["message"].get("tool_calls") or []:
            assert found["function"]["name"] == call.name
            begun = found["function"]["arguments"].rstrip("\ufffd")  # a character may be cut too
            assert written.startswith(begun)


@pytest.mark.parametrize("fields", [{"enable_thinking": False}, {"reasoning_effort": "none"}], ids=str)
def test_thinking_off(http: httpx.Client, servers: ScriptedServers, fields: dict[str, Any], stream: bool) -> None:
    """The prompt closes the thought, and all that comes is the answer."""
    for name in ("qwen3", "glm45"):
        scripted = servers(FAMILIES[name])
        scripted.say("Just this.")
        choice = ask(http, scripted, stream, **fields)
        assert choice["message"]["content"].strip() == "Just this."
        assert not choice["message"].get("reasoning")
        assert "</think>" in scripted.prompts[0].rpartition("Well?")[2]


@pytest.mark.parametrize("name", ["qwen3", "glm45", "gpt-oss"])
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_a_thought_ends_with_its_budget(http: httpx.Client, servers: ScriptedServers, name: str, api: str) -> None:
    """What the model would still think is said after it. Where nothing can end a thought, the header tells."""
    scripted = servers(FAMILIES[name])
    scripted.say("So.", reasoning="one two three four five six seven eight nine")
    field: dict[str, Any] = {"thinking_token_budget": 4}
    if api == "messages":
        field = {"thinking": {"type": "enabled", "budget_tokens": 4}, "max_tokens": 999}
    path = "/v1/messages" if api == "messages" else "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "Well?"}], **field}
    scripted.transcript.obeys = True
    answer = http.post(f"{scripted.url}{path}", json=body)
    scripted.transcript.obeys = False
    if api == "messages":
        thought, text = (block.get("thinking") or block["text"] for block in answer.json()["content"])
    else:
        message = answer.json()["choices"][0]["message"]
        thought, text = message["reasoning"], message["content"]
    if name == "gpt-oss":
        assert next(iter(field)) in answer.headers["x-headrace-ignored"]
        assert (thought, text.strip()) == ("one two three four five six seven eight nine", "So.")
        return
    assert len(scripted.transcript.tokenizer.encode(thought, add_special_tokens=False)) <= 4
    assert thought.strip().startswith("one")
    assert "seven" not in thought
    assert "eight nine" in text
    assert text.strip().endswith("So.")


def test_a_call_within_a_thought_is_a_thought(http: httpx.Client, servers: ScriptedServers, stream: bool) -> None:
    """Calls are parsed from the answer alone."""
    scripted = servers(FAMILIES["gpt-oss"])
    scripted.say("No call.", reasoning='I could write {"name": "get_weather", "arguments": {}} to=functions.add')
    choice = ask(http, scripted, stream, tools=TOOLS)
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "stop"
    assert "to=functions.add" in choice["message"]["reasoning"]


def forced(scripted: Scripted, *calls: Call) -> None:
    """The model calls at once, after a thought if it has them."""
    scripted.answer("", *calls)


@pytest.mark.parametrize("strict", [None, True])
def test_required(http: httpx.Client, scripted: Scripted, stream: bool, strict: bool | None) -> None:
    """What the model writes in its own format, the grammar allows."""
    call = Task.fresh(scripted.family).calls[0]
    forced(scripted, call)
    tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    choice = ask(http, scripted, stream, tools=tools, tool_choice="required")
    assert calls_of(choice) == [call]
    assert choice["finish_reason"] == "tool_calls"


def test_named(http: httpx.Client, scripted: Scripted, stream: bool) -> None:
    call = Task.fresh(scripted.family).calls[0]
    forced(scripted, call)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(http, scripted, stream, tools=TOOLS, tool_choice=named)
    assert calls_of(choice) == [call]
    assert choice["finish_reason"] == "stop"


def test_what_the_grammar_forbids_the_model_cannot_say(http: httpx.Client, servers: ScriptedServers) -> None:
    """The transcript breaks the grammar, so it is no answer of a model: the request fails, and no other one."""
    scripted = servers(FAMILIES["qwen3-coder"])
    scripted.say("I would rather not call.")
    fields = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    assert http.post(f"{scripted.url}/v1/chat/completions", json=fields).status_code == 400
    fields["tool_choice"] = "auto"
    assert http.post(f"{scripted.url}/v1/chat/completions", json=fields).status_code == 200


def test_one_call_where_parallel_calls_are_off(http: httpx.Client, servers: ScriptedServers, stream: bool) -> None:
    scripted = servers(FAMILIES["qwen3"])
    calls = Task.fresh(scripted.family).calls
    forced(scripted, *calls)
    choice = ask(http, scripted, stream, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == calls[:1]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "kind",
    [
        "json_schema",
        "json_object",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("structured_outputs", "guided_json")),
    ],
)
def test_schema(http: httpx.Client, scripted: Scripted, stream: bool, kind: str) -> None:
    """The grammar begins where the thought ends, in every family's way. Other spellings become the same grammar:
    tests/server/test_constraints.py."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: dict[str, Any] = {
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "json_object": {"response_format": {"type": "json_object"}},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "guided_json": {"guided_json": schema},
    }[kind]
    off = {"enable_thinking": False}
    for reasoning, fields in [("A number.", {}), (None, off)] if scripted.family.thinks else [(None, {})]:
        scripted.say('{"a": 21}', reasoning=reasoning, held=True)
        choice = ask(http, scripted, stream, **asked, **fields)
        assert json.loads(choice["message"]["content"]) == {"a": 21}
        assert (choice["message"].get("reasoning") or "").strip() == (reasoning or "")
        assert choice["finish_reason"] == "stop"
