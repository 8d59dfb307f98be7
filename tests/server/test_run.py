"""Starting, stopping and dying: real processes, a fake executor."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError, PortInUseError
from headrace.server.run import listen_on, run_server, warn_if_open
from tests.engine.fakes import SLOW_TOKEN
from tests.server.live import KEY, Live
from tests.serving import Reader, gone
from tests.speed import PATIENCE

SLOW: dict[str, Any] = {"prompt": [SLOW_TOKEN, 80, 81], "max_tokens": 200}
"""Ten seconds of work."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server of this file's tests, of which the last one stops it."""
    with Live(tmp_path_factory.mktemp("model")) as server:
        yield server


def test_second_signal_is_immediate(tmp_path: Path) -> None:
    with Live(tmp_path) as live:
        reader = Reader(live, **SLOW)
        children = live.children()
        live.process.send_signal(signal.SIGINT)
        live.wait_for("stopping")
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(PATIENCE) == 130
        gone(children)
        reader.thread.join(PATIENCE)
        assert reader.lines[-1].startswith("broken off")


def test_a_killed_core_ends_open_requests_and_turns_health_red(tmp_path: Path) -> None:
    with Live(tmp_path) as live:
        readers = [Reader(live, **SLOW), Reader(live, **SLOW, n=2)]
        live.core().kill()
        for reader in readers:
            assert reader.status == 200
            assert reader.error()["code"] == "engine_dead"
        assert live.health() == 503
        for stream in (False, True):
            answer = live.post("/v1/completions", {"prompt": "a", "stream": stream})
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("service_unavailable_error", "engine_dead")
        assert httpx.get(f"{live.url}/v1/models", headers=live.headers).status_code == 200
        assert live.stop() == 0


def test_port_in_use_is_found_before_the_engine_starts() -> None:
    async def never(config: EngineConfig) -> Any:
        raise AssertionError("the engine was started")

    with listen_on("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"cannot listen on 127.0.0.1:{port}.*--port"):
            run_server(EngineConfig(), ServerConfig(port=port), never)


def test_host_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        listen_on("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("127.0.0.1", [], False), ("localhost", [], False), ("0.0.0.0", [], True), ("0.0.0.0", ["a"], False)],
)
def test_a_server_without_key_beyond_this_machine_is_warned_of(
    host: str, keys: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with listen_on(host, 0) as listener:
        warn_if_open(listener, ServerConfig(host=host, api_key=keys))
    assert (["0.0.0.0 is open to the network without a key: set --api-key, or --host 127.0.0.1"] if warned else []) == [
        record.getMessage() for record in caplog.records
    ]


def test_port_is_free_again_at_once() -> None:
    with listen_on("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            server_side = listener.accept()[0]
            server_side.close()  # this side goes through TIME_WAIT
            client.recv(1)
    listen_on(*address).close()


def raw(live: Live, data: bytes, more: bytes = b"", times: int = 0) -> bytes:
    """What the server says to these bytes before it closes the connection."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
        try:
            connection.sendall(data)
            for _ in range(times):
                connection.sendall(more)
            connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def test_limits_of_the_real_protocol(live: Live) -> None:
    """CVE-2025-48956: heads without end. And bodies that lie about their length, or are too long."""
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    assert b" 200 " in raw(live, get + b"\r\n")
    assert b" 200 " in raw(live, get + b"A: " + b"a" * 30_000 + b"\r\n\r\n")
    too_much = [
        raw(live, get + b"A: " + b"a" * 100_000 + b"\r\n\r\n"),
        raw(live, get + b"A: ", b"a" * 65536, 64),
        raw(live, get, b"A: aaaaaaaaaaaaaaaa\r\n", 5000),
        raw(live, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"),
        raw(live, b"GET /", b"a" * 65536, 64),
        raw(live, get + b"".join(b"A%d: 1\r\n" % i for i in range(200)) + b"\r\n"),
    ]
    for answer in too_much:
        assert b" 400 " in answer or answer == b"", answer[:100]  # a reset may overtake the answer
        assert not answer or json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    key = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
    assert b" 413 " in raw(live, post + key + b"Content-Length: 99999999\r\n\r\n{")
    assert b" 401 " in raw(live, post + b"Content-Length: 99999999\r\n\r\n{")
    chunked = post + key + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in raw(live, chunked, b"10000\r\n" + b"a" * 65536 + b"\r\n", 32)
    assert b" 400 " in raw(live, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_clients_that_vanish_free_their_requests(live: Live) -> None:
    async def vanish(client: httpx.AsyncClient, stream: bool) -> None:
        body = {**SLOW, "ignore_eos": True, "stream": stream, "n": 2}
        try:
            async with asyncio.timeout(0.5), client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            pass

    async def go() -> None:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(
            base_url=live.url, headers=live.headers, limits=limits, timeout=PATIENCE
        ) as client:
            await asyncio.gather(*(vanish(client, index % 2 == 0) for index in range(16)))

    asyncio.run(go())
    live.wait_until_free()
    assert live.complete(prompt="abc", max_tokens=3) == "abc"


def test_a_clean_stop(live: Live) -> None:
    """Short requests finish, long ones end with an event, and a body that is still coming is answered."""
    start, complete, _ = live.text.partition("Application startup complete")
    assert complete
    assert "at most 64 requests at once (given)" in start
    assert len(start.splitlines()) <= 14
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"Authorization: Bearer " + KEY.encode() + b'\r\n\r\n{"prompt"')
        short, long = Reader(live, **{**SLOW, "max_tokens": 6}), Reader(live, **SLOW)  # which come behind that one
        assert live.stop() == 0
        answer = connection.recv(65536)
    short.thread.join(PATIENCE)
    assert short.lines[-1] == "data: [DONE]"
    assert long.error()["code"] == "server_stopping"
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"server_stopping"' in answer
    assert "Traceback" not in live.text
