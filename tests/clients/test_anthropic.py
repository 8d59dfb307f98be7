"""Agents written with anthropic's SDK: tools, streams, thinking, formats, counts and errors of /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.tasks import FOUR, ONE, TOOLS, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.speed import PATIENCE

imported_where_used("anthropic")

HERE = [
    {"name": one["function"]["name"], "description": one["function"]["description"],
     "input_schema": one["function"]["parameters"]}
    for one in TOOLS
]  # fmt: skip


@pytest.fixture
def client(scripted: Scripted) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=PATIENCE) as sdk:
        yield sdk


def ask(client: Any, scripted: Scripted, stream: bool, **fields: Any) -> Any:
    """Return the whole message, put together by the SDK if it came as a stream."""
    fields = {"model": scripted.name, "max_tokens": 2000, **fields}
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        return events.get_final_message()


@FOUR
def test_agent(client: Any, scripted: Scripted, task: Task, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for turn in range(3):
        answer = ask(client, scripted, stream, messages=messages, tools=HERE)
        thoughts = [block.thinking.strip() for block in answer.content if block.type == "thinking"]
        assert thoughts == ([task.thoughts[turn]] if scripted.family.thinks else [])
        assert answer.stop_reason == ("end_turn" if turn == 2 else "tool_use")
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": task.run(block.name, block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    task.check(scripted, answer.content[-1].text.strip())
    assert answer.usage.input_tokens > 0 < answer.usage.output_tokens


@ONE
def test_forced_calls(client: Any, scripted: Scripted, stream: bool) -> None:
    task = Task.fresh(scripted.family)
    scripted.play(*task.turns())
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        answer = ask(
            client, scripted, stream, messages=[{"role": "user", "content": task.question}], tools=HERE,
            tool_choice=choice,
        )  # fmt: skip
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert (call.name, call.input) == (task.calls[0].name, task.calls[0].arguments)
        assert answer.stop_reason == "tool_use"


@ONE
def test_format_system_and_count(client: Any, scripted: Scripted, stream: bool) -> None:
    scripted.answer('{"name": "Zoë"}')
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    asked: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
    }
    answer = ask(client, scripted, stream, **asked, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[-1].text) == {"name": "Zoë"}
    assert "Be brief." in scripted.prompts[0]
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert client.messages.count_tokens(model=scripted.name, **asked).input_tokens == total


@ONE
def test_errors_have_the_sdk_s_classes(client: Any, scripted: Scripted) -> None:
    import anthropic

    user = [{"role": "user", "content": "Hi"}]
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="nobody", max_tokens=4, messages=user)
    picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]") as found:
        client.messages.create(model=scripted.name, max_tokens=4, messages=[{"role": "user", "content": [picture]}])
    assert found.value.body["error"]["type"] == "invalid_request_error"
