"""Agents written with the openai SDK: messages by hand, and its helpers for pydantic models and streams."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.tasks import TOOLS, Task
from tests.scripted.engine import Scripted, ScriptedServers
from tests.scripted.families import FAMILIES, Call, Said
from tests.speed import PATIENCE


class get_weather(pydantic.BaseModel):
    """The temperature in a city."""

    city: str
    days: int
    exact: bool


class add(pydantic.BaseModel):
    """Adds numbers."""

    numbers: list[float]
    note: str | None


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Leg(pydantic.BaseModel):
    to: str
    km: float = pydantic.Field(ge=0)


class Journey(pydantic.BaseModel):
    color: Color
    legs: list[Leg]
    note: str | None


JOURNEY = '{"color": "blue", "legs": [{"to": "Zürich", "km": 12.5}, {"to": "\\"A\\"", "km": 3}], "note": null}'


@pytest.fixture
def client(scripted: Scripted) -> Iterator[openai.OpenAI]:
    with client_of(scripted) as sdk:
        yield sdk


def client_of(scripted: Scripted) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def test_agent_with_the_helpers(client: openai.OpenAI, scripted: Scripted, task: Task, stream: bool) -> None:
    """`parse` and `stream` take pydantic models as strict tools, and give their instances back."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    tools = [openai.pydantic_function_tool(get_weather), openai.pydantic_function_tool(add)]
    message: Any = None
    while message is None or message.tool_calls:
        if stream:
            with client.chat.completions.stream(model=scripted.name, messages=messages, tools=tools) as events:
                done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
                message = events.get_final_completion().choices[0].message
            assert len(done) == len(message.tool_calls or [])
        else:
            message = client.chat.completions.parse(model=scripted.name, messages=messages, tools=tools)
            message = message.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            parsed = call.function.parsed_arguments
            result = task.run(type(parsed).__name__, parsed.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    task.check(scripted, message.content.strip())


def test_parse(client: openai.OpenAI, scripted: Scripted, stream: bool) -> None:
    scripted.answer(JOURNEY)
    fields: dict[str, Any] = {
        "model": scripted.name, "messages": [{"role": "user", "content": "Plan."}], "response_format": Journey,
    }  # fmt: skip
    if stream:
        with client.chat.completions.stream(**fields) as events:
            content = "".join(event.delta for event in events if event.type == "content.delta")
            message: Any = events.get_final_completion().choices[0].message
        assert content == message.content
    else:
        message = client.chat.completions.parse(**fields).choices[0].message
    assert message.parsed == Journey.model_validate_json(JOURNEY)
    assert (message.model_extra.get("reasoning") or "").strip() == ("A thought." if scripted.family.thinks else "")


def test_many_agents_at_once(servers: ScriptedServers) -> None:
    """Each with an answer of its own, streamed and not; none gets a piece of another's."""
    scripted = servers(FAMILIES["qwen3"])
    count = 24
    scripted.play(
        *((f"agent {i}.", Said(calls=(Call("get_weather", {"city": f"City {i}", "days": i}),))) for i in range(count)),
        *((f"result {i}.", Said(f"Done, {i}.", reasoning=f"thought {i}")) for i in range(count)),
    )

    async def one(client: openai.AsyncOpenAI, i: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am agent {i}."}]
        first = await client.chat.completions.create(model=scripted.name, messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        (call,) = first.choices[0].message.tool_calls
        assert call.function.arguments == f'{{"city": "City {i}", "days": {i}}}'
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": f"result {i}."}]
        said: dict[str, str] = {"content": "", "reasoning": ""}
        stream = await client.chat.completions.create(model=scripted.name, messages=messages, tools=TOOLS, stream=True)  # type: ignore[call-overload]
        async for chunk in stream:
            for name in said:
                said[name] += getattr(chunk.choices[0].delta, name, None) or ""
        assert {name: text.strip() for name, text in said.items()} == {
            "content": f"Done, {i}.",
            "reasoning": f"thought {i}",
        }

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", timeout=PATIENCE) as client:
            await asyncio.gather(*(one(client, i) for i in range(count)))

    asyncio.run(go())
