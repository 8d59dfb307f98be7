"""Agents written with litellm, as providers `hosted_vllm` and `anthropic`, and over its bridge from Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.tasks import FOUR, ONE, TOOLS, Person, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.speed import PATIENCE

imported_where_used("litellm")


@pytest.fixture(autouse=True)
def _stay_home(monkeypatch: pytest.MonkeyPatch) -> None:
    import litellm

    monkeypatch.setattr(litellm, "telemetry", False, raising=False)
    monkeypatch.setattr(litellm, "suppress_debug_info", True, raising=False)


def ask(scripted: Scripted, stream: bool, provider: str = "hosted_vllm", **fields: Any) -> Any:
    """The first choice, its chunks joined by litellm if they came as a stream."""
    import litellm

    base = scripted.url if provider == "anthropic" else f"{scripted.url}/v1"
    answer = litellm.completion(
        model=f"{provider}/{scripted.name}", api_base=base, api_key="none", stream=stream,
        num_retries=0, timeout=PATIENCE, **fields,
    )  # fmt: skip
    if stream:
        answer = litellm.stream_chunk_builder([*answer], messages=fields["messages"])
    return answer.choices[0]


@FOUR
@pytest.mark.parametrize("provider", ["hosted_vllm", "anthropic"])
def test_agent(scripted: Scripted, task: Task, stream: bool, provider: str) -> None:
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for turn in range(3):
        choice = ask(scripted, stream, provider, messages=messages, tools=TOOLS)
        message = choice.message
        thought = (getattr(message, "reasoning_content", None) or "").strip()
        assert thought == (task.thoughts[turn] if scripted.family.thinks else "")
        messages.append(message.model_dump(exclude_none=True))
        assert choice.finish_reason == ("stop" if turn == 2 else "tool_calls")
        for call in message.tool_calls or []:
            result = task.run_json(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    task.check(scripted, message.content.strip())


@FOUR
def test_response_format(scripted: Scripted, stream: bool) -> None:
    scripted.answer('{"name": "Zoë", "age": 41}')
    asked = [{"role": "user", "content": "Who?"}]
    choice = ask(scripted, stream, messages=asked, response_format=Person)
    assert Person.model_validate_json(choice.message.content) == Person(name="Zoë", age=41)


@ONE
def test_the_bridge_from_messages(scripted: Scripted, task: Task, stream: bool) -> None:
    """What speaks Anthropic's API to litellm reaches a server that litellm asks for chat completions."""

    async def turn(messages: list[Any]) -> list[dict[str, Any]]:
        """Return the blocks of an answer."""
        from litellm.anthropic_interface import messages as bridge

        answer = await bridge.acreate(
            model=f"hosted_vllm/{scripted.name}", api_base=f"{scripted.url}/v1", api_key="none", max_tokens=2000,
            messages=messages, stream=stream, timeout=PATIENCE,
            tools=[{"name": one["name"], "input_schema": one["parameters"]} for one in (t["function"] for t in TOOLS)],
        )  # fmt: skip
        if not stream:
            return [block if isinstance(block, dict) else block.model_dump() for block in answer["content"]]
        lines = b"".join([chunk async for chunk in answer]).decode().splitlines()
        return blocks_of([json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")])

    messages: list[Any] = [{"role": "user", "content": task.question}]
    for _ in range(3):
        blocks = asyncio.run(turn(messages))
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": task.run(block["name"], block["input"])}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    (text,) = [block["text"] for block in blocks if block["type"] == "text"]
    task.check(scripted, text.strip())


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that the events of a stream add up to."""
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name in ("text", "thinking"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
    kept = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("id", "name", "input")}
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return [
        {"type": block["type"]} | {name: block.get(name) for name in kept[block["type"]]} for block in blocks.values()
    ]
