"""Slow clients and many: time limits on every part of an exchange, a bound on connections, and /health within reach.

A server in this process, on a port of its own, with a fake engine behind it. Times are fractions of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server import http_server
from headrace.server.http_server import OWN_DESCRIPTORS, RESERVE, HttpServer, connection_bound
from headrace.server.run import take_port
from tests.server.fake_engine import FakeEngine, make_app
from tests.server.live import KEY, Live

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
MODELS = HEALTH.replace(b"/health", b"/v1/models")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SECONDS = 20
"""What a slow machine may take for anything."""


def request(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "a", **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Client:
    """A connection to the server, and no HTTP library in between."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        """One answer of known length."""
        async with asyncio.timeout(SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return head + await self.reader.readexactly(int(length))

    async def rest(self) -> bytes:
        """All until the server closes; what it says to a client that it cuts off may be lost on the way."""
        async with asyncio.timeout(SECONDS):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""


class Server:
    def __init__(self, server: HttpServer, engine: FakeEngine, address: tuple[str, int]) -> None:
        self.server, self.engine, self.address = server, engine, address
        self.clients: list[Client] = []

    async def connect(self, data: bytes = b"", receive_buffer: int = 0) -> Client:
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self.address)
        client = Client(*await asyncio.open_connection(sock=connection, limit=max(receive_buffer, 2**10)))
        client.say(data)
        self.clients.append(client)
        return client

    async def fill(self, number: int, data: bytes = b"") -> list[Client]:
        """That many more connections, which the server has taken."""
        wanted = min(self.server.num_connections + number, self.server.bound + RESERVE)
        clients = [await self.connect(data) for _ in range(number)]
        await until(lambda: self.server.num_connections >= wanted)
        return clients


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[Server]:
    engine = FakeEngine()
    settings = {"max_connections": 100, **config}
    listener = take_port("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that little waits in the kernel
    server = HttpServer(make_app(engine, **settings), ServerConfig(**settings), 1)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    found = Server(server, engine, listener.getsockname())
    try:
        await until(lambda: server.started)
        yield found
        assert not task.done()
    finally:
        for client in found.clients:
            client.writer.transport.abort()
        server.should_exit = True
        await asyncio.wait_for(task, SECONDS)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    uvloop.run(test())


def error_code(answer: bytes) -> tuple[bytes, str]:
    status, body = answer.split(b" ", 2)[1], answer.partition(b"\r\n\r\n")[2]
    return status, json.loads(body)["error"]["code"]


def test_half_a_head_is_answered_408() -> None:
    async def go() -> None:
        async with serving(header_timeout=0.3) as server:
            client = await server.connect(b"GET /health HTTP/1.1\r\nHo")
            assert error_code(await client.rest()) == (b"408", "request_timeout")

    run(go)


def test_a_head_that_trickles_is_answered_408() -> None:
    async def go() -> None:
        async with serving(header_timeout=0.3) as server:
            client = await server.connect(b"GET /health HTTP/1.1\r\n")
            answer = asyncio.create_task(client.rest())
            while not answer.done():
                client.say(b"a: b\r\n")
                await asyncio.wait((answer,), timeout=0.05)
            assert error_code(await answer) == (b"408", "request_timeout")

    run(go)


@pytest.mark.parametrize("first", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_who_says_nothing_is_closed_without_a_word(first: bytes) -> None:
    async def go() -> None:
        async with serving(header_timeout=0.3) as server:
            assert await (await server.connect(first)).rest() == b""

    run(go)


def test_empty_lines_between_requests_do_not_keep_a_connection() -> None:
    async def go() -> None:
        async with serving(header_timeout=0.3) as server:
            client = await server.connect(HEALTH)
            assert b" 200 " in await client.answer()
            client.say(b"\r\n")  # ends uvicorn's own timer and begins no request
            assert await client.rest() == b""

    run(go)


@pytest.mark.parametrize("pause", [0, 0.02], ids=["stalls", "trickles"])
def test_a_body_that_stalls_or_trickles_is_answered_408(pause: float) -> None:
    async def go() -> None:
        async with serving(body_timeout=0.4) as server:
            client = await server.connect(POST + b'Content-Length: 9999\r\n\r\n{"prompt')
            answer = asyncio.create_task(client.rest())
            while pause and not answer.done():
                client.say(b" ")
                await asyncio.wait((answer,), timeout=pause)
            assert error_code(await answer) == (b"408", "request_timeout")
            assert not server.engine.requests

    run(go)


def test_a_long_body_at_a_fair_rate_takes_its_time() -> None:
    async def go() -> None:
        async with serving(body_timeout=0.3) as server:
            body = json.dumps({"prompt": "a", "max_tokens": 2, "user": "a" * 20_000}).encode()
            client = await server.connect(POST + b"Content-Length: %d\r\n\r\n" % len(body))
            for start in range(0, len(body), 1000):
                client.say(body[start : start + 1000])
                await asyncio.sleep(0.05)
            assert b" 200 " in await client.answer()

    run(go)


def test_a_body_that_nobody_waits_for_any_more_ends_too() -> None:
    """The answer (415) is there at once; the client goes on with its body, fast enough for any rate."""

    async def go() -> None:
        async with serving(body_timeout=0.3) as server:
            client = await server.connect(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
            )
            answer = asyncio.create_task(client.rest())
            while not answer.done():
                client.say(b" " * 1000)
                await asyncio.wait((answer,), timeout=0.02)
            assert not server.server.num_connections

    run(go)


def test_a_request_that_waits_for_its_answer_is_not_idle() -> None:
    async def go() -> None:
        async with serving(header_timeout=0.2, body_timeout=0.2, send_timeout=0.2) as server:
            server.engine.delay = 0.1
            client = await server.connect(request(max_tokens=12))
            client.say(b"GET /heal")  # the next request may wait as long
            assert b" 200 " in await client.answer()
            assert b" 408 " in await client.rest()

    run(go)


def test_idle_connections_are_closed() -> None:
    async def go() -> None:
        async with serving(timeout_keep_alive=1) as server:
            client = await server.connect(HEALTH)
            assert b" 200 " in await client.answer()
            started = time.monotonic()
            assert await client.rest() == b""
            assert time.monotonic() - started > 0.5

    run(go)


LONG = {"stream": True, "n": 64, "max_tokens": 200, "ignore_eos": True}
"""Some megabytes."""


def test_a_client_that_never_reads_loses_its_request() -> None:
    async def go() -> None:
        async with serving(send_timeout=0.4) as server:
            server.engine.delay = 0.001
            client = await server.connect(request(**LONG), receive_buffer=4096)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(server.engine.active))
            await until(lambda: not server.engine.active)
            assert server.engine.aborted
            await until(lambda: not server.server.num_connections)

    run(go)


def test_an_answer_that_is_complete_and_never_read_is_let_go() -> None:
    """Nothing of it is left to be made, but it does not fit into the kernel's buffers."""

    async def go() -> None:
        async with serving(send_timeout=0.4, timeout_keep_alive=0) as server:
            fields = {"n": 8, "max_tokens": 200, "ignore_eos": True, "logprobs": 2}
            client = await server.connect(request(**fields), receive_buffer=4096)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(server.engine.requests))
            await until(lambda: not server.server.num_connections)

    run(go)


def test_a_slow_reader_gets_its_whole_stream() -> None:
    async def go() -> None:
        async with serving(send_timeout=0.5) as server:
            client = await server.connect(request(**{**LONG, "n": 2, "max_tokens": 250}), receive_buffer=4096)
            received = b""
            started = time.monotonic()
            while b"[DONE]" not in received[-100:]:
                part = await client.reader.read(4096)
                assert part, received[-300:]
                received += part
                await asyncio.sleep(0.04)
            assert time.monotonic() - started > 1.0
            assert not server.engine.aborted

    run(go)


def test_beyond_the_bound_health_and_metrics_are_answered() -> None:
    async def go() -> None:
        async with serving(max_connections=20) as server:
            await server.fill(20, b"GET /he")
            assert b" 200 " in await (await server.connect(HEALTH)).rest(), "answered and closed"
            answer = await (await server.connect(HEALTH.replace(b"health", b"metrics"))).rest()
            assert b"vllm:num_requests_running" in answer
            refused = await (await server.connect(MODELS)).rest()
            assert error_code(refused) == (b"503", "too_many_connections")
            assert b"retry-after: 1\r\n" in refused
            assert b"connection: close\r\n" in refused

    run(go)


def test_the_oldest_silent_connection_makes_room_in_the_reserve() -> None:
    async def go() -> None:
        async with serving(max_connections=20) as server:
            await server.fill(20)
            oldest, *others = await server.fill(RESERVE)
            assert server.server.num_connections == 20 + RESERVE
            for _ in range(3):
                assert b" 200 " in await (await server.connect(HEALTH)).rest()
            assert await oldest.rest() == b""
            assert not others[-1].reader.at_eof()

    run(go)


def test_hundreds_of_silent_connections_leave_health_within_reach() -> None:
    """All in one burst, and /health last: it waits in the backlog behind them."""

    async def go() -> None:
        async with serving(max_connections=20) as server:
            flood = [socket.create_connection(server.address) for _ in range(300)]
            with socket.create_connection(server.address) as probe:
                probe.sendall(HEALTH)
                answer = await asyncio.to_thread(probe.recv, 100)
            assert b" 200 " in answer
            assert server.server.num_connections <= 20 + RESERVE
            for connection in flood:
                connection.close()
            await until(lambda: not server.server.num_connections)

    run(go)


def test_a_place_that_becomes_free_is_for_who_waits_in_the_reserve() -> None:
    async def go() -> None:
        async with serving(max_connections=2) as server:
            first, _ = await server.fill(2)
            (waiting,) = await server.fill(1)
            first.writer.close()
            await until(lambda: server.server.num_connections == 2)
            waiting.say(MODELS)
            assert b" 200 " in await waiting.answer()
            waiting.say(MODELS)
            assert b" 200 " in await waiting.answer(), "and it stays open"

    run(go)


def test_running_requests_do_not_notice_a_flood() -> None:
    async def go() -> None:
        async with serving(max_connections=4, header_timeout=0.2) as server:
            server.engine.delay = 0.05
            client = await server.connect(request(max_tokens=20))
            await until(lambda: bool(server.engine.active))
            await server.fill(60, b"POST /")
            assert b" 200 " in await client.answer()

    run(go)


def lowered(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is set, while the process seems to have these limits (soft, hard)."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda kind, values: found.append(values))
    return found


@pytest.mark.parametrize(
    ("limits", "wanted", "bound", "raised"),
    [
        ((1024, 1024), None, 1024 - RESERVE - OWN_DESCRIPTORS, [(1024, 1024)]),
        ((1024, 4096), None, 4096 - RESERVE - OWN_DESCRIPTORS, [(4096, 4096)]),
        ((1024, 2**20), None, 16384, [(16384 + RESERVE + OWN_DESCRIPTORS, 2**20)]),
        ((2**20, 2**20), None, 16384, []),
        ((1024, 2**20), 100, 100, []),
        ((1024, 2**20), 50_000, 50_000, [(50_000 + RESERVE + OWN_DESCRIPTORS, 2**20)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 16384, []),
        ((1024, resource.RLIM_INFINITY), None, 16384, [(16384 + RESERVE + OWN_DESCRIPTORS, resource.RLIM_INFINITY)]),
    ],
)
def test_the_bound_follows_from_the_limit_of_open_files(
    limits: tuple[int, int], wanted: int | None, bound: int, raised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lowered(limits, monkeypatch)
    assert connection_bound(wanted) == bound
    assert found == raised


@pytest.mark.parametrize(("wanted", "message"), [(1000, r"max_connections \(1000\) is too many"), (None, "no room")])
def test_a_bound_that_does_not_fit_is_refused(
    wanted: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered((100, 100), monkeypatch)
    with pytest.raises(ConfigError, match=rf"{message}.*100 files.*ulimit -Hn"):
        connection_bound(wanted)


def test_without_descriptors_the_server_waits_for_them(tmp_path: Path) -> None:
    """A real process whose limit falls below what it has open: it neither dies nor spins, and those who wait are served
    once there are descriptors again."""
    live = Live(tmp_path)
    try:
        process = psutil.Process(live.process.pid)
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # 0, 1 and 2 are open
        with socket.create_connection(("127.0.0.1", live.port), timeout=SECONDS) as waiting:
            waiting.sendall(HEALTH)
            live.wait_for("no connection can be accepted")
            started, spent = time.monotonic(), sum(process.cpu_times()[:2])
            waiting.settimeout(1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            assert sum(process.cpu_times()[:2]) - spent < 0.5 * (time.monotonic() - started)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            waiting.settimeout(SECONDS)
            assert b" 200 " in waiting.recv(100)
        metrics = httpx.get(f"{live.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert "headrace:http_connections{" in metrics
        assert live.stop()[0] == 0
    finally:
        live.close()
