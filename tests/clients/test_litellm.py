"""Agents written with litellm, as provider `hosted_vllm`: tools, streams, response_format, reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.tasks import FOUR, TOOLS, Person, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.speed import PATIENCE

imported_where_used("litellm")


@pytest.fixture(autouse=True)
def _stay_home(monkeypatch: pytest.MonkeyPatch) -> None:
    import litellm

    monkeypatch.setattr(litellm, "telemetry", False, raising=False)
    monkeypatch.setattr(litellm, "suppress_debug_info", True, raising=False)


def ask(scripted: Scripted, stream: bool, **fields: Any) -> Any:
    """The first choice, its chunks joined by litellm if they came as a stream."""
    import litellm

    answer = litellm.completion(
        model=f"hosted_vllm/{scripted.name}", api_base=f"{scripted.url}/v1", api_key="none", stream=stream,
        num_retries=0, timeout=PATIENCE, **fields,
    )  # fmt: skip
    if stream:
        answer = litellm.stream_chunk_builder([*answer], messages=fields["messages"])
    return answer.choices[0]


@FOUR
def test_agent(scripted: Scripted, task: Task, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for turn in range(3):
        choice = ask(scripted, stream, messages=messages, tools=TOOLS)
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
