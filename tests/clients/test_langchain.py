"""Agents written with langchain-openai: bound tools, its messages, and structured output by each of its methods."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.tasks import FOUR, Person, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.scripted.families import Call
from tests.speed import PATIENCE

imported_where_used("langchain_openai")


def model_of(scripted: Scripted) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=scripted.name,
        base_url=f"{scripted.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=PATIENCE,
        stream_usage=True,
    )


@FOUR
def test_agent(scripted: Scripted, task: Task, stream: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    by_name = {made.name: made for made in map(tool, task.functions())}
    model = model_of(scripted).bind_tools([*by_name.values()])
    history: list[Any] = [HumanMessage(task.question)]
    while isinstance(history[-1], (HumanMessage, ToolMessage)):
        if stream:
            answer = None
            for chunk in model.stream(history):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = model.invoke(history)
        assert not answer.invalid_tool_calls
        history.append(answer)
        history += [by_name[call["name"]].invoke(call) for call in answer.tool_calls]
    task.check(scripted, history[-1].content.strip())
    assert history[-1].usage_metadata["output_tokens"] > 0


@FOUR
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output(scripted: Scripted, stream: bool, method: str) -> None:
    """By response_format, or by a call that tool_choice names."""
    if method == "function_calling":
        scripted.answer("", Call("Person", {"name": "Zoë", "age": 41}))
    else:
        scripted.answer('{"name": "Zoë", "age": 41}')
    model = model_of(scripted).with_structured_output(Person, method=method)
    found = [*model.stream("Who?")][-1] if stream else model.invoke("Who? Answer in JSON.")
    assert found == Person(name="Zoë", age=41)
