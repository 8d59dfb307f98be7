"""A server that is asked: what it is sent, when it is asked again, and what ends a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.cli import eval_models
from headrace.cli.bench.client import HttpClient
from headrace.cli.eval_models import Asking, ServerModel
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.evaluate.session import Reply

TURNS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Question: 1 + 1?\nAnswer:"}]


@asynccontextmanager
async def serving(answers: Sequence[tuple[int, Any]], asking: Asking) -> AsyncIterator[tuple[ServerModel, list[Any]]]:
    """A model of a server that gives these answers, one after the other, and the paths and bodies it was sent."""
    bodies: list[Any] = []
    script = iter(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""):
            fields = dict(line.split(": ", 1) for line in head.decode().strip().split("\r\n")[1:])
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            bodies.append((head.split()[1].decode(), body))
            status, record = next(script)
            text = json.dumps(record).encode()
            writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpClient(url, {}, 60.0)
    try:
        yield ServerModel(client, "served", 4096, None, asking), bodies
    finally:
        client.close()
        server.close()


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": "stop"}]}


async def test_plain_prompts_are_completions() -> None:
    asking = Asking(generation={"temperature": 0.0, "max_tokens": 5, "stop": ["Question:"]}, chat=False)
    async with serving([(200, completion(" 2"))], asking) as (model, bodies):
        assert await model.complete(TURNS) == Reply(" 2", None, "stop")
    (sent,) = bodies
    assert sent == (
        "/v1/completions",
        {
            "model": "served", "temperature": 0.0, "max_tokens": 5, "stop": ["Question:"],
            "prompt": "Be short.Question: 1 + 1?\nAnswer:",
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parser", "message", "reply"),
    [
        ("auto", {"content": "2", "reasoning_content": "one and one"}, Reply("2", "one and one", "stop")),
        ("auto", {"content": None}, Reply("", None, "stop")),
        ("auto", {"content": "<think>one</think>2"}, Reply("<think>one</think>2", None, "stop")),
        ("qwen3", {"content": "<think>one</think>2"}, Reply("2", "one", "stop")),
        ("none", {"content": "<think>one</think>2"}, Reply("<think>one</think>2", None, "stop")),
    ],
)
async def test_chats_without_reasoning(parser: str, message: dict[str, Any], reply: Reply) -> None:
    asking = Asking(generation={}, chat=True, template_kwargs={"thinking": True}, reasoning_parser=parser)
    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
    async with serving([(200, answer)], asking) as (model, bodies):
        assert await model.complete(TURNS) == reply
    (sent,) = bodies
    assert sent == (
        "/v1/chat/completions", {"model": "served", "messages": TURNS, "chat_template_kwargs": {"thinking": True}}
    )  # fmt: skip


async def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_models, "BUSY_SECONDS", 0.01)
    answers = [(429, {"error": "full"}), (503, {"error": "full"}), (200, completion(" 2"))]
    async with serving(answers, Asking(generation={}, chat=False)) as (model, bodies):
        assert (await model.complete(TURNS)).text == " 2"
    assert len(bodies) == 3
    assert bodies[0] == bodies[2]


@pytest.mark.parametrize(
    ("status", "answer", "error", "said"),
    [
        (400, {"error": {"message": "too long"}}, RequestError, "refuses it (HTTP 400): .*too long"),
        (404, {"error": "no such model"}, HeadraceError, "/v1/completions answers HTTP 404: .*no such model"),
        (500, {"error": "broken"}, HeadraceError, "answers HTTP 500: .*broken"),
        (200, {"choices": []}, HeadraceError, "answers HTTP 200: "),
    ],
)
async def test_answers_that_are_none(status: int, answer: Any, error: type[HeadraceError], said: str) -> None:
    async with serving([(status, answer)], Asking(generation={}, chat=False)) as (model, _):
        with pytest.raises(error, match=said.replace("(", r"\(").replace(")", r"\)")) as raised:
            await model.complete(TURNS)
    assert isinstance(raised.value, RequestError) == (status == 400)


async def test_tokens_are_scored_by_an_echo() -> None:
    answer = {"choices": [{"logprobs": {"token_logprobs": [None, -0.5, -0.25, -9.0]}}]}
    asking = Asking(generation={}, chat=False)
    async with serving([(200, answer), (200, answer)], asking) as (model, bodies):
        assert await model.score([1, 7, 8]) == [-0.5, -0.25]
        with pytest.raises(HeadraceError, match="echoes 3 log-probabilities for 4 tokens"):
            await model.score([1, 7, 8, 9, 10])
        with pytest.raises(ConfigError, match="needs --tokenizer"):
            model.tokenize("text")
    assert bodies[0][1] | {"echo": True, "prompt": [1, 7, 8], "max_tokens": 1} == bodies[0][1]


def test_windows_leave_room() -> None:
    asking = Asking(generation={}, chat=False)
    assert asking.window_length(512) == 510
    assert Asking(generation={}, chat=False, max_length=64).window_length(512) == 64
    with pytest.raises(ConfigError, match="--max-length must be at most 510"):
        Asking(generation={}, chat=False, max_length=511).window_length(512)
