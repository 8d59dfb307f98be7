"""Agents of pydantic-ai over its vLLM provider: tools, typed output by each of its ways, thoughts sent back."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pydantic
import pytest

from tests.clients.tasks import FOUR, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.scripted.families import Call

imported_where_used("pydantic_ai")


class Forecast(pydantic.BaseModel):
    city: str
    degrees: int


def model_of(scripted: Scripted) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.vllm import VLLMProvider

    provider = VLLMProvider(base_url=f"{scripted.url}/v1", api_key="none")
    return OpenAIChatModel(scripted.name, provider=provider)


def run(agent: Any, question: str, stream: bool) -> tuple[Any, list[Any]]:
    """The agent's output, and all messages of the run."""

    async def go() -> tuple[Any, list[Any]]:
        if not stream:
            result = await agent.run(question)
            return result.output, result.all_messages()
        async with agent.run_stream(question) as streamed:
            return await streamed.get_output(), streamed.all_messages()

    return asyncio.run(go())


def agent_of(scripted: Scripted, task: Task, **fields: Any) -> Any:
    from pydantic_ai import Agent

    return Agent(model_of(scripted), retries=0, tools=task.functions(), **fields)


@FOUR
def test_agent(scripted: Scripted, task: Task, stream: bool) -> None:
    output, history = run(agent_of(scripted, task), task.question, stream)
    task.check(scripted, output.strip())
    thoughts = [part.content.strip() for message in history for part in message.parts if part.part_kind == "thinking"]
    assert thoughts == (task.thoughts if scripted.family.thinks else [])
    for thought in thoughts[:-1]:  # the model sees what it thought before its calls
        assert thought in scripted.prompts[-1]


@FOUR
def test_agent_with_typed_output(scripted: Scripted, task: Task, stream: bool) -> None:
    """The answer is itself a call, and tool_choice is `required` throughout."""
    final = Call("final_result", {"city": task.city, "degrees": task.temperature + 1})
    turns = task.turns()
    for number, call in enumerate([*task.calls, final]):
        after, said = turns[number]
        turns[number] = after, dataclasses.replace(said, content="", calls=(call,), held=True)
    scripted.play(*turns)
    output, _ = run(agent_of(scripted, task, output_type=Forecast), task.question, stream)
    assert output == Forecast(city=task.city, degrees=task.temperature + 1)
    assert task.done == task.calls


@FOUR
@pytest.mark.parametrize("way", ["NativeOutput", "PromptedOutput"])
def test_output_by_response_format(scripted: Scripted, stream: bool, way: str) -> None:
    import pydantic_ai

    scripted.answer('{"city": "Zürich", "degrees": -4}')
    agent = pydantic_ai.Agent(model_of(scripted), output_type=getattr(pydantic_ai, way)(Forecast), retries=0)
    assert run(agent, "How cold?", stream)[0] == Forecast(city="Zürich", degrees=-4)
