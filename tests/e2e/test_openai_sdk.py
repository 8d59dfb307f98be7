"""The openai SDK, sync and async, against `headrace serve demo`: the model's own words, not a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import KEY
from tests.serving import Serve
from tests.speed import PATIENCE

USER: list[Any] = [{"role": "user", "content": "Tell me a story about a dog."}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def story(client: openai.OpenAI) -> str:
    """What the model says greedily, 24 tokens of it."""
    return client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_completion(client: openai.OpenAI, story: str) -> None:
    answer = client.completions.create(model="demo", prompt=[PROMPT, PROMPT], max_tokens=24, temperature=0)
    assert [choice.text for choice in answer.choices] == [story, story]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48
    assert len(story.split()) > 10
    assert all(word.strip(".,!?\"'").isalpha() for word in story.split()[1:])


def test_completion_stream_is_the_whole_in_parts(client: openai.OpenAI, story: str) -> None:
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == story
    assert len(chunks) > 5
    assert chunks[-1].usage is not None
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 24)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=24, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert len(choice.message.content.split()) > 5
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes or []).decode() == entry.token
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    again = client.chat.completions.create(model="demo", messages=parts, max_tokens=24, temperature=0)
    assert again.choices[0].message.content == choice.message.content


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.chat.completions.create(model="gpt-4", messages=USER)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=600)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.completions.create(model="demo", prompt="word " * 3000, stream=True)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="demo", prompt="a" * 2**20)
    assert large.value.status_code == 413
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"


def test_async(server: Serve, story: str) -> None:
    """Many at once give what one alone gives."""

    async def one(sdk: openai.AsyncOpenAI) -> str:
        stream = await sdk.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk:
            return await asyncio.gather(*(one(sdk) for _ in range(24)))

    assert set(asyncio.run(go())) == {story}


CITIES = ["Bonn", "Köln"]
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}]


@pytest.mark.parametrize(
    ("choice", "finish", "seed"),
    [("required", "tool_calls", 0), ({"type": "function", "function": {"name": "forecast"}}, "stop", 1)],
    ids=["required", "named"],
)
def test_forced_calls_fit_their_schema_whatever_the_model_would_say(
    client: openai.OpenAI, choice: Any, finish: str, seed: int
) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=USER, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == finish
    assert answer.choices[0].message.content is None
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments)) == ("forecast", {"city", "days"})
    assert arguments["city"] in CITIES
    assert 1 <= arguments["days"] <= 9
