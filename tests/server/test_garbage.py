"""No request leaves reference cycles: Python finds those by looking at every object while all streams wait."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.fake_engine import FakeEngine, make_app
from tests.server.test_disconnect import Client, until
from tests.speed import PATIENCE


@contextmanager
def no_garbage() -> Iterator[None]:
    """Fails if what runs within leaves cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(thing).__qualname__ for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 4, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **fields}


LONG = {"max_tokens": 200, "ignore_eos": True}


async def test_no_request_leaves_garbage() -> None:
    whole = [completion(), completion(n=2, logprobs=2, echo=True), chat(), chat(logprobs=True, top_logprobs=1)]
    streams = [completion(stream=True, stop=["up"]), chat(stream=True, stream_options={"include_usage": True})]
    refused = [completion(max_tokens=-1), completion(prompt="a" * 999), chat(messages=[])]
    left = [completion(**LONG), completion(**LONG, stream=True, n=2), chat(**LONG), chat(**LONG, stream=True)]
    engine = FakeEngine()
    app = make_app(engine)

    async def run(requests: list[tuple[str, dict[str, Any]]], leaves: bool = False) -> None:
        engine.delay = 0.01 if leaves else 0.0
        clients = [Client(app, body, path) for path, body in requests]
        if leaves:
            await until(lambda: len(engine.active) == len(clients))
            await until(lambda: all(client.sent for client in clients if client.body.find(b'"stream"') > 0))
            for client in clients:
                client.left.set()
        for client in clients:
            await asyncio.wait_for(client.task, PATIENCE)

    every = ((whole, False), (streams, False), (refused, False), (left, True))
    for requests, leaves in every:  # what is made once stays
        await run(requests, leaves)
    await asyncio.sleep(0.01)
    with no_garbage():
        for requests, leaves in every:
            await run(requests, leaves)
        await asyncio.sleep(0.01)
