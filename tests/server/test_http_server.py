"""Many connections: the bound on them, /health within reach beyond it, and a server without descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.server import http_server
from headrace.server.http_server import OWN_DESCRIPTORS, RESERVE, HttpServer, Shares, connection_bound
from headrace.server.run import listen_on
from tests.server.fake_engine import make_app
from tests.server.live import Live
from tests.server.raw_http import HEALTH, MODELS, error_code, request, run, serving
from tests.speed import PATIENCE, until


async def test_beyond_the_bound_health_and_metrics_are_answered() -> None:
    async with serving(max_connections=20) as server:
        await server.fill(20, b"GET /he")
        assert b" 200 " in await (await server.connect(HEALTH)).rest(), "answered and closed"
        answer = await (await server.connect(HEALTH.replace(b"health", b"metrics"))).rest()
        assert b"vllm:num_requests_running" in answer
        refused = await (await server.connect(MODELS)).rest()
        assert error_code(refused) == (b"503", "too_many_connections")
        assert b"retry-after: 1\r\n" in refused
        assert b"connection: close\r\n" in refused


async def test_the_oldest_silent_connection_makes_room_in_the_reserve() -> None:
    async with serving(max_connections=20) as server:
        await server.fill(20)
        oldest, *others = await server.fill(RESERVE)
        assert server.server.num_connections == 20 + RESERVE
        for _ in range(3):
            assert b" 200 " in await (await server.connect(HEALTH)).rest()
        assert await oldest.rest() == b""
        assert not others[-1].reader.at_eof()


def test_hundreds_of_silent_connections_leave_health_within_reach() -> None:
    """All in one burst, and /health last, behind them."""

    async def go() -> None:
        async with serving(max_connections=20) as server:

            def attack() -> bytes:
                flood.extend(socket.create_connection(server.address) for _ in range(300))
                with socket.create_connection(server.address, timeout=PATIENCE) as probe:
                    probe.sendall(HEALTH)
                    return probe.recv(100)

            flood: list[socket.socket] = []
            assert b" 200 " in await asyncio.to_thread(attack)
            assert server.server.num_connections <= 20 + RESERVE
            for connection in flood:
                connection.close()
            await until(lambda: not server.server.num_connections)

    run(go)


async def test_a_place_that_becomes_free_is_for_who_waits_in_the_reserve() -> None:
    async with serving(max_connections=2) as server:
        first, _ = await server.fill(2)
        (waiting,) = await server.fill(1)
        first.writer.close()
        await until(lambda: server.server.num_connections == 2)
        waiting.say(MODELS)
        assert b" 200 " in await waiting.answer()
        waiting.say(MODELS)
        assert b" 200 " in await waiting.answer(), "and it stays open"


async def test_running_requests_do_not_notice_a_flood() -> None:
    async with serving(max_connections=4, header_timeout=0.2) as server:
        server.engine.delay = 0.05
        client = await server.connect(request(max_tokens=20))
        await until(lambda: bool(server.engine.active))
        await server.fill(60, b"POST /")
        assert b" 200 " in await client.answer()


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
    with Live(tmp_path) as live:
        process = psutil.Process(live.process.pid)
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # 0, 1 and 2 are open
        with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as waiting:
            waiting.sendall(HEALTH)
            live.wait_for("no connection can be accepted")
            started, spent = time.monotonic(), sum(process.cpu_times()[:2])
            waiting.settimeout(1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            assert sum(process.cpu_times()[:2]) - spent < 0.15 * (time.monotonic() - started)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            waiting.settimeout(PATIENCE)
            assert b" 200 " in waiting.recv(100)
        metrics = httpx.get(f"{live.url}/metrics", headers=live.headers).text
        assert "headrace:http_connections{" in metrics
        assert live.stop() == 0


def test_two_that_listen_on_one_socket_share_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of two processes, of which each sees how many connections the other has."""
    monkeypatch.setattr(http_server, "TURN_SECONDS", PATIENCE)
    counts = os.memfd_create("connections")
    os.ftruncate(counts, 8)

    async def go() -> None:
        with contextlib.closing(listen_on("127.0.0.1", 0)) as listener:
            config = ServerConfig(max_connections=100)
            servers = [HttpServer(make_app(), config, 1, Shares(counts, number)) for number in range(2)]
            tasks = [asyncio.create_task(server.serve(sockets=[listener.dup()])) for server in servers]
            await until(lambda: all(server.started for server in servers))
            address, clients = listener.getsockname(), []
            for total in range(1, 17):
                clients.append(await asyncio.open_connection(*address))
                while sum(server.num_connections for server in servers) < total:
                    await asyncio.sleep(0.001)
            assert [server.num_connections for server in servers] == [8, 8]
            for _, writer in clients:
                writer.transport.abort()
            await until(lambda: not any(server.num_connections for server in servers))
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks)

    run(go)
    os.close(counts)
