"""Starting, stopping and dying: real processes, a fake executor."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import ConfigError, PortInUseError
from headrace.server.run import listen_on, run_server, warn_if_open
from tests.engine.fakes import SLOW_TOKEN
from tests.server.live import KEY, Live, gone
from tests.speed import PATIENCE, slowness

AUTH = {"authorization": f"Bearer {KEY}"}
SLOW: dict[str, Any] = {"prompt": [SLOW_TOKEN, 80, 81], "max_tokens": 200, "ignore_eos": True}
"""Ten seconds of work."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    server = Live(tmp_path)
    yield server
    server.close()


class Reader:
    """Reads one stream in a thread."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.started = threading.Event()
        self.lines: list[str] = []
        self.status = 0
        self.thread = threading.Thread(target=self._read, args=(url, {**SLOW, "stream": True, **fields}), daemon=True)
        self.thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=AUTH, timeout=PATIENCE) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.lines.append(line)
                    self.started.set()
        except httpx.RemoteProtocolError:
            self.lines.append("broken off")
        finally:
            self.started.set()

    def error(self) -> dict[str, Any]:
        self.thread.join(PATIENCE)
        assert "data: [DONE]" not in self.lines
        last = [line for line in self.lines if line][-1]
        error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
        return error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_start_and_clean_stop(live: Live, number: int) -> None:
    text = "\n".join(live.lines)
    assert "Application startup complete" in text
    assert "at most 64 requests at once (given)" in text
    assert len(live.lines) <= 15
    assert httpx.get(f"{live.url}/health").status_code == 200
    reader = Reader(live.url)
    assert reader.started.wait(PATIENCE)
    started = time.monotonic()
    assert live.stop(number) == 0
    assert time.monotonic() - started < 5 * slowness()
    assert reader.error()["code"] == "server_stopping"
    assert "Traceback" not in "\n".join(live.lines)


def test_a_body_that_is_still_coming_is_answered_while_stopping(live: Live) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"Authorization: Bearer " + KEY.encode() + b'\r\n\r\n{"prompt"')
        time.sleep(0.2)
        assert live.stop() == 0
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"server_stopping"' in answer
    assert "Traceback" not in "\n".join(live.lines)


def test_short_requests_finish_while_stopping(live: Live) -> None:
    reader = Reader(live.url, max_tokens=6)
    assert reader.started.wait(PATIENCE)
    assert live.stop() == 0
    reader.thread.join(PATIENCE)
    assert reader.lines[-2] == "data: [DONE]"


def test_second_signal_is_immediate(live: Live) -> None:
    reader = Reader(live.url)
    assert reader.started.wait(PATIENCE)
    children = live.children()
    live.process.send_signal(signal.SIGINT)
    live.wait_for("stopping")
    live.process.send_signal(signal.SIGINT)
    assert live.process.wait(PATIENCE) == 130
    gone(children)
    reader.thread.join(PATIENCE)
    assert reader.lines[-1] == "broken off"


def test_signal_while_loading(tmp_path: Path) -> None:
    server = Live(tmp_path, "make_slow_start", wait=False)
    server.wait_for("loading")
    assert server.stop() == 0


def test_death_of_the_core(live: Live) -> None:
    """/health turns red, open requests end, the server stays up and says so."""
    reader = Reader(live.url)
    assert reader.started.wait(PATIENCE)
    for child in live.children():
        child.kill()
    assert reader.error()["code"] == "engine_dead"
    assert reader.status == 200
    assert httpx.get(f"{live.url}/health").status_code == 503
    for stream in (False, True):
        answer = httpx.post(f"{live.url}/v1/completions", json={**SLOW, "stream": stream}, headers=AUTH)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
    assert httpx.get(f"{live.url}/v1/models", headers=AUTH).status_code == 200
    assert live.stop() == 0


def test_death_of_the_server_takes_the_core_along(live: Live) -> None:
    children = live.children()
    assert children
    for child in children:  # which could not end by itself
        child.suspend()
    live.process.kill()
    live.process.wait()
    gone(children)


def test_failed_start_is_an_error_of_the_user(tmp_path: Path) -> None:
    server = Live(tmp_path, "make_broken", wait=False)
    server.wait_for("model.safetensors lacks `model.norm.weight`")
    assert server.process.wait(PATIENCE) != 0


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


def held(live: Live) -> float:
    """Requests in the engine, and the share of its cache that they hold."""
    text = httpx.get(f"{live.url}/metrics", headers=AUTH).text
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)]
    assert len(values) == 3
    return sum(values)


def test_clients_that_vanish_free_their_requests(live: Live) -> None:
    async def vanish(client: httpx.AsyncClient, stream: bool) -> None:
        body = {**SLOW, "stream": stream, "n": 2}
        try:
            async with asyncio.timeout(0.5), client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
        except TimeoutError:
            pass

    async def go() -> None:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=live.url, headers=AUTH, limits=limits, timeout=PATIENCE) as client:
            await asyncio.gather(*(vanish(client, index % 2 == 0) for index in range(16)))

    asyncio.run(go())
    deadline = time.monotonic() + PATIENCE
    while held(live) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held(live) == 0
    answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}, headers=AUTH)
    assert answer.json()["choices"][0]["text"] == "abc"
    assert "Traceback" not in "\n".join(live.lines)
