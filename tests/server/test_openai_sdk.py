"""The openai SDK, sync and async, against a real server process whose engine echoes the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.live import KEY, Live
from tests.speed import PATIENCE


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("model"), "make_delayed")
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as sdk:
        yield sdk


USER: list[Any] = [{"role": "user", "content": "abc"}]
RENDERED = "<|user|>abc</s><|assistant|>"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0)
    assert answer.choices[0].text == "hellohel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 13


def test_completion_stop_string(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello world", max_tokens=20, stop=[" wo"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_completion_stream_n_and_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt=["abc", "xyz"], n=2, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "abcab", 1: "abcab", 2: "xyzxy", 3: "xyzxy"}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 20)


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    """lm_eval's request."""
    answer = client.completions.create(
        model="tiny", prompt=[[70, 71, 72], [80, 81]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    for choice, length in zip(answer.choices, (3, 2), strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == [-0.5] * length
        assert all(max(top.values()) == -0.5 for top in logprobs.top_logprobs[1:])
        assert len(logprobs.tokens or []) == len(logprobs.text_offset or []) == length + 1


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=11, n=2)
    assert [choice.message.content for choice in answer.choices] == ["<|user|>abc"] * 2
    assert answer.choices[0].message.role == "assistant"


def test_chat_stops_at_the_end_token(client: openai.OpenAI) -> None:
    """The fake model echoes the prompt, whose template has </s> in the middle."""
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("<|user|>abc", "stop")


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "<|use"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=USER) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "<|user|>abc"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=2, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["<", "|"]
    assert [entry.bytes for entry in logprobs.content] == [[60], [124]]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3, 3]


def test_multibyte_text_streams_whole_characters(client: openai.OpenAI) -> None:
    text = "naïve 日本 🎡"
    stream = client.completions.create(
        model="tiny", prompt=text, max_tokens=len(text.encode()), stream=True
    )  # one byte a token
    parts = [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_errors(client: openai.OpenAI, live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        client.completions.create(model="tiny", prompt="a", max_tokens=300)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="a" * 2**20)
    assert large.value.status_code == 413


def test_extra_fields(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=3,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "cache_salt": "s"},
    )  # fmt: skip
    assert answer.choices[0].text == "hel"


def test_async_client_with_many_at_once(live: Live) -> None:
    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as sdk:

            async def one(index: int) -> None:
                text = f"request number {index}: "
                if index % 2:
                    stream = await sdk.completions.create(model="tiny", prompt=text, max_tokens=30, stream=True)
                    parts = [chunk.choices[0].text async for chunk in stream]
                    said = "".join(parts)
                else:
                    said = (await sdk.completions.create(model="tiny", prompt=text, max_tokens=30)).choices[0].text
                assert said == (text * 3)[:30]

            await asyncio.gather(*(one(index) for index in range(32)))
            answer = await sdk.chat.completions.create(model="tiny", messages=USER, max_tokens=3)
            assert answer.choices[0].message.content == RENDERED[:3]

    asyncio.run(go())
