"""Agents written with openai-agents, over Responses and over chat completions: its runner calls the tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.tasks import FOUR, ONE, Person, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.speed import PATIENCE

imported_where_used("agents")


@pytest.fixture(params=["OpenAIResponsesModel", "OpenAIChatCompletionsModel"], ids=["responses", "chat"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(scripted: Scripted, api: str, question: str, stream: bool, **fields: Any) -> Any:
    """Return the result of an agent's run, which has read all events if it is streamed."""
    import agents
    import openai

    async def go() -> Any:
        url = f"{scripted.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
            model = getattr(agents, api)(scripted.name, client)
            settings = agents.ModelSettings(include_usage=True)  # its chat streams ask for it of OpenAI alone
            agent = agents.Agent(
                "agent", model=model, model_settings=settings, instructions="Use your tools.", **fields
            )
            config = agents.RunConfig(tracing_disabled=True)
            if not stream:
                return await agents.Runner.run(agent, question, run_config=config)
            result = agents.Runner.run_streamed(agent, question, run_config=config)
            async for _ in result.stream_events():
                pass
            return result

    return asyncio.run(go())


@FOUR
def test_agent(scripted: Scripted, task: Task, stream: bool, api: str) -> None:
    import agents

    tools = [agents.function_tool(one, strict_mode=False) for one in task.functions()]
    result = run(scripted, api, task.question, stream, tools=tools)
    task.check(scripted, result.final_output.strip())
    assert "Use your tools." in scripted.prompts[0]
    if api == "OpenAIResponsesModel" and scripted.family.thinks:
        for thought in task.thoughts[:-1]:  # the model sees what it thought before its calls
            assert thought in scripted.prompts[-1]
    assert result.context_wrapper.usage.requests == 3
    assert result.context_wrapper.usage.output_tokens > 0


@ONE
def test_typed_output(scripted: Scripted, stream: bool, api: str) -> None:
    scripted.answer('{"name": "Zoë", "age": 41}')
    assert run(scripted, api, "Who?", stream, output_type=Person).final_output == Person(name="Zoë", age=41)
