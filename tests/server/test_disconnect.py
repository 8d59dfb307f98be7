"""A client that leaves aborts its requests at once, wherever they are; nobody else's are touched."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.server.fake_engine import FakeEngine, make_app
from tests.speed import PATIENCE, until


class Client:
    """Speaks ASGI: sends one body, then leaves when told to."""

    def __init__(self, app: Starlette, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.body = json.dumps(body).encode()
        self.given = False
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("test", 80),
                 "client": ("1.2.3.4", 5), "root_path": ""}  # fmt: skip
        self.task = asyncio.create_task(app(scope, self.receive, self.send))  # type: ignore[arg-type]

    async def receive(self) -> dict[str, Any]:
        if not self.given:
            self.given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_leaving_aborts(stream: bool, prompt: Any) -> None:
    engine = FakeEngine()
    engine.delay = 0.01
    app = make_app(engine)
    body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": stream}
    leaver, stayer = Client(app, body), Client(app, {"prompt": "x", "max_tokens": 10})
    count = len(prompt)
    await until(lambda: len(engine.active) == count + 1)
    if stream:
        await until(lambda: leaver.sent)
    leaver.left.set()
    await asyncio.wait_for(leaver.task, PATIENCE)
    assert len(engine.aborted) == count
    assert not any(b"[DONE]" in message.get("body", b"") for message in leaver.sent)
    await asyncio.wait_for(stayer.task, PATIENCE)
    assert stayer.sent[0]["status"] == 200
    assert len(engine.aborted) == count
    assert not engine.active


def test_leaving_before_the_body_is_there() -> None:
    async def go() -> None:
        engine = FakeEngine()
        app = make_app(engine)
        client = Client(app, {"prompt": "a"})

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        client.task.cancel()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "root_path": ""}  # fmt: skip
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, gone, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == 499
        assert not engine.requests

    asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_the_server_ends_open_requests(stream: bool) -> None:
    engine = FakeEngine()
    engine.delay = 0.01
    app = make_app(engine)
    client = Client(app, {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": stream})
    await until(lambda: client.sent if stream else engine.active)
    app.state.serving.stop()
    await asyncio.wait_for(client.task, PATIENCE)
    assert len(engine.aborted) == 1
    assert client.sent[0]["status"] == (200 if stream else 503)
    assert b"server_stopping" in client.sent[-1]["body"]
    assert client.sent[-1]["more_body"] is False
    assert not any(b"[DONE]" in message.get("body", b"") for message in client.sent)


async def test_a_request_that_comes_while_stopping() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    app.state.serving.stop()
    client = Client(app, {"prompt": "a"})
    await client.task
    assert client.sent[0]["status"] == 503
    assert not engine.requests


async def test_open_requests_finish_while_new_ones_are_refused() -> None:
    engine = FakeEngine()
    engine.delay = 0.01
    app = make_app(engine)
    client = Client(app, {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True})
    await until(lambda: client.sent)
    draining = asyncio.create_task(app.state.serving.drain(PATIENCE))
    await asyncio.sleep(0)
    late = Client(app, {"prompt": "a"})
    await late.task
    assert late.sent[0]["status"] == 503
    assert (b"retry-after", b"1") in late.sent[0]["headers"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as others:
        assert (await others.get("/health")).status_code == 503
        assert (await others.get("/v1/models")).status_code == 200
    await draining
    assert b"[DONE]" in client.sent[-1]["body"]
    assert not engine.aborted
    await client.task


async def test_a_drain_ends_in_time() -> None:
    engine = FakeEngine()
    engine.delay = 0.05
    app = make_app(engine)
    client = Client(app, {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True})
    await until(lambda: client.sent)
    await app.state.serving.drain(0.1)
    assert not client.task.done()
    app.state.serving.stop()
    await client.task


async def test_tasks_are_not_left_behind() -> None:
    app = make_app()
    clients = [Client(app, {"prompt": ["a", "b"], "stream": index % 2 == 0}) for index in range(4)]
    await asyncio.gather(*(client.task for client in clients))
    assert asyncio.all_tasks() == {asyncio.current_task()}
