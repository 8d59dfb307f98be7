"""A full queue is a 429 that says when to come back; whose a request is goes with it to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from headrace.errors import QueueFullError
from tests.server.fake_engine import MODEL, FakeEngine, chat, complete, error_of, make_app, post


def nearly_full(**bounds: int) -> FakeEngine:
    """Two requests of four tokens in all wait already."""
    engine = FakeEngine(**{"max_queued_requests": 4, "max_queued_tokens": 20, **bounds})
    engine.queue.sent(2, 4, None)
    return engine


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("fields", "words"), [
    ({"prompt": ["a", "b", "c"]}, "2 requests wait, this request adds 3, and 4 may wait (--max-queued-requests)"),
    ({"prompt": "a", "n": 3}, "--max-queued-requests"),
    ({"prompt": "x" * 17}, "4 tokens wait, this request adds 17, and 20 may wait (--max-queued-tokens)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_whole(fields: dict[str, Any], words: str, stream: bool) -> None:
    engine = nearly_full()
    answer = complete(make_app(engine), stream=stream, **fields)
    error = error_of(answer, 429)
    assert words in error["message"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert answer.headers["retry-after"] == "1"
    assert engine.requests == []
    assert (engine.queue.num_requests, engine.queue.num_tokens) == (2, 4)
    assert complete(make_app(engine), prompt=["ab", "cd"]).status_code == 200


def test_a_chat_is_bounded_too() -> None:
    engine = nearly_full(max_queued_requests=2, max_queued_tokens=0)
    answer = chat(make_app(engine))
    assert error_of(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_that_does_not_come_in_the_core_is_a_429_too(stream: bool) -> None:
    engine = FakeEngine()
    engine.fail_at, engine.error = 0, QueueFullError("late", 7)
    answer = complete(make_app(engine), regex="a", stream=stream)
    assert error_of(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "7"


def test_the_openai_sdk_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = nearly_full(max_queued_requests=2)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        """Somebody who waited has begun to run meanwhile."""
        waits.append(seconds)
        engine.queue.sent(-1, -2, None)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)

    async def go() -> str:
        transport = httpx.ASGITransport(make_app(engine))
        async with httpx.AsyncClient(transport=transport) as http:
            sdk = openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http)
            return (await sdk.completions.create(model=MODEL, prompt="Hello", max_tokens=4)).choices[0].text

    assert asyncio.run(go()) == "Once"
    assert waits == [1.0]


def test_a_client_that_leaves_leaves_its_place() -> None:
    engine = FakeEngine(max_queued_requests=4)
    engine.fail_at = 0
    assert complete(make_app(engine), prompt=["a", "b", "c"]).status_code == 503
    assert engine.queue.num_requests == 0


def test_requests_carry_whose_they_are_and_what_they_came_with() -> None:
    engine = FakeEngine()
    app = make_app(engine, api_key=["one", "other"])
    for key in ("one", "other", "one"):
        post(app, "/v1/completions", {"prompt": ["a", "b"]}, headers={"authorization": f"Bearer {key}"})
    clients = [request["client"] for request in engine.requests]
    assert clients[0] == clients[1] == clients[4] != clients[2]
    assert all(len(client) == 16 and "one" not in client for client in clients)
    parents = [request["parent"] for request in engine.requests]
    assert parents[0] == parents[1]
    assert len(set(parents)) == 3


def test_without_keys_everybody_is_one_client() -> None:
    """A key that nobody checked says nothing: with a new one each time a client would never wait."""
    engine = FakeEngine()
    post(make_app(engine), "/v1/completions", {"prompt": "a"}, headers={"authorization": "Bearer made-up"})
    assert [request["client"] for request in engine.requests] == [""]
