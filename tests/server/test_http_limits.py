"""What a client may take, in time and bytes, for each part of an exchange; and heads that are refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time

from tests.server.raw_http import HEALTH, POST, error_code, request, serving
from tests.speed import until


def assert_408(answer: bytes) -> None:
    """Of a client that goes on sending, whose last bytes may reset the connection before it has read the answer."""
    assert not answer or error_code(answer) == (b"408", "request_timeout")


async def half_a_head_is_answered_408() -> None:
    async with serving(header_timeout=0.3) as server:
        client = await server.connect(b"GET /health HTTP/1.1\r\nHo")
        assert error_code(await client.rest()) == (b"408", "request_timeout")


async def a_head_that_trickles_is_answered_408() -> None:
    async with serving(header_timeout=0.3) as server:
        client = await server.connect(b"GET /health HTTP/1.1\r\n")
        answer = asyncio.create_task(client.rest())
        while not answer.done():
            client.say(b"a: b\r\n")
            await asyncio.wait((answer,), timeout=0.05)
        assert_408(await answer)


async def who_says_nothing_is_closed_without_a_word(first: bytes) -> None:
    async with serving(header_timeout=0.3) as server:
        assert await (await server.connect(first)).rest() == b""


async def empty_lines_between_requests_do_not_keep_a_connection() -> None:
    async with serving(header_timeout=0.3) as server:
        client = await server.connect(HEALTH)
        assert b" 200 " in await client.answer()
        client.say(b"\r\n")  # ends uvicorn's own timer and begins no request
        assert await client.rest() == b""


async def a_body_that_stalls_or_trickles_is_answered_408(pause: float) -> None:
    async with serving(body_timeout=0.4) as server:
        client = await server.connect(POST + b'Content-Length: 9999\r\n\r\n{"prompt')
        answer = asyncio.create_task(client.rest())
        while pause and not answer.done():
            client.say(b" ")
            await asyncio.wait((answer,), timeout=pause)
        assert_408(await answer)
        assert not server.engine.requests


async def a_long_body_at_a_fair_rate_takes_its_time() -> None:
    async with serving(body_timeout=0.3) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 2, "user": "a" * 20_000}).encode()
        client = await server.connect(POST + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1000):
            client.say(body[start : start + 1000])
            await asyncio.sleep(0.05)
        assert b" 200 " in await client.answer()


async def a_body_that_nobody_waits_for_any_more_ends_too() -> None:
    """The answer (415) is there at once; the client goes on with its body, fast enough for any rate."""
    async with serving(body_timeout=0.3) as server:
        client = await server.connect(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        answer = asyncio.create_task(client.rest())
        while not answer.done():
            client.say(b" " * 1000)
            await asyncio.wait((answer,), timeout=0.02)
        assert not server.server.num_connections


async def a_request_that_waits_for_its_answer_is_not_idle(following: bytes) -> None:
    """Nor does half a request behind it end it; that one's time begins with the answer to the first."""
    async with serving(header_timeout=0.2, body_timeout=0.2, send_timeout=0.2) as server:
        server.engine.delay = 0.1
        client = await server.connect(request(max_tokens=12) + following)
        assert b" 200 " in await client.answer()
        assert error_code(await client.rest()) == (b"408", "request_timeout")


async def idle_connections_are_closed() -> None:
    async with serving(timeout_keep_alive=1) as server:
        client = await server.connect(HEALTH)
        assert b" 200 " in await client.answer()
        started = time.monotonic()
        assert await client.rest() == b""
        assert time.monotonic() - started > 0.5


LONG = {"stream": True, "n": 64, "max_tokens": 200, "ignore_eos": True}
"""Some megabytes."""


async def a_client_that_never_reads_loses_its_request() -> None:
    async with serving(send_timeout=0.4) as server:
        server.engine.delay = 0.001
        client = await server.connect(request(**LONG), receive_buffer=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: bool(server.engine.active))
        await until(lambda: not server.engine.active)
        assert server.engine.aborted
        await until(lambda: not server.server.num_connections)


async def an_answer_that_is_complete_and_never_read_is_let_go() -> None:
    """Nothing of it is left to be made, but it does not fit into the kernel's buffers."""
    async with serving(send_timeout=0.4, timeout_keep_alive=0) as server:
        fields = {"n": 8, "max_tokens": 200, "ignore_eos": True, "logprobs": 2}
        client = await server.connect(request(**fields), receive_buffer=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: bool(server.engine.requests))
        await until(lambda: not server.server.num_connections)


async def a_slow_reader_gets_its_whole_stream() -> None:
    """For longer than the limit the kernel takes nothing from the server, since it waits until a third of its buffer is
    free; but the client does read."""
    async with serving(send_timeout=0.4, send_buffer=2**16) as server:
        client = (await server.connect(request(**{**LONG, "n": 8}), receive_buffer=4096)).writer.transport
        client.pause_reading()  # type: ignore[attr-defined]
        received, pauses = b"", 75
        with socket.socket(fileno=os.dup(client.get_extra_info("socket").fileno())) as connection:
            while b"[DONE]" not in received[-100:]:
                part = await asyncio.get_running_loop().sock_recv(connection, 2048)
                assert part, received[-300:]
                received += part
                if pauses:
                    pauses -= 1
                    await asyncio.sleep(0.04)
        assert not server.engine.aborted


async def test_each_part_of_an_exchange_has_its_time() -> None:
    """All at once, each against a server of its own, since they wait more than they do."""
    async with asyncio.TaskGroup() as group:
        for exchange in (
            half_a_head_is_answered_408(),
            a_head_that_trickles_is_answered_408(),
            who_says_nothing_is_closed_without_a_word(b""),
            who_says_nothing_is_closed_without_a_word(b"\r\n"),
            empty_lines_between_requests_do_not_keep_a_connection(),
            a_body_that_stalls_or_trickles_is_answered_408(0),
            a_body_that_stalls_or_trickles_is_answered_408(0.02),
            a_long_body_at_a_fair_rate_takes_its_time(),
            a_body_that_nobody_waits_for_any_more_ends_too(),
            a_request_that_waits_for_its_answer_is_not_idle(b"GET /heal"),
            a_request_that_waits_for_its_answer_is_not_idle(POST + b'Content-Length: 99\r\n\r\n{"prompt'),
            idle_connections_are_closed(),
            a_client_that_never_reads_loses_its_request(),
            an_answer_that_is_complete_and_never_read_is_let_go(),
            a_slow_reader_gets_its_whole_stream(),
        ):
            group.create_task(exchange)


BAD_HEADS = {
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", "needs one Host header, got none"),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "needs one Host header, got 2"),
    "two hosts in 1.0": (b"GET /health HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n", "needs one Host header, got 2"),
    "no host at all": (b"GET /health HTTP/1.1\r\nHost: a/health?\r\n\r\n", "b'a/health?'"),
    "a host with a space": (b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n", "b'a b'"),
    "another version": (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", "must be 1.0 or 1.1, got 2.0"),
    "no version": (b"GET /health\r\n\r\n", "must be 1.0 or 1.1, got 0.9"),
    "length and chunks": (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "Invalid"),
    "chunks and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n", "Invalid"),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", "Invalid"),
    "two equal lengths": (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", "Invalid"),
    "a signed length": (POST + b"Content-Length: +2\r\n\r\n{}", "Invalid"),
    "an endless length": (POST + b"Content-Length: 99999999999999999999\r\n\r\n{}", "Invalid"),
    "chunked, then not": (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", "Invalid"),
    "never chunked": (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", "Invalid"),
    "chunked twice": (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", "Invalid"),
    "a space before the colon": (POST + b"Content-Length : 2\r\n\r\n{}", "Invalid"),
    "a folded header": (POST + b"A: b\r\n c\r\n\r\n", "Invalid"),
    "bare line feeds": (b"GET /health HTTP/1.1\nHost: a\n\n", "Invalid"),
}


async def test_heads_that_two_servers_could_read_differently() -> None:
    """The end of a request, and whom it is for, are never guessed."""
    async with serving() as server:
        for name, (data, message) in BAD_HEADS.items():
            answer = await (await server.connect(data)).rest()
            assert b" 400 " in answer, name
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["type"] == "invalid_request_error"
            assert message in error["message"], name
        assert not server.engine.requests


HOSTS = (b"", b"localhost", b"127.0.0.1:8000", b"[::1]:8000", b"[fe80::1%25eth0]", b"a-b.c_d.example:80",
         b"xn--bcher-kva.ch")  # fmt: skip


async def test_hosts_that_are_hosts() -> None:
    async with serving() as server:
        for host in HOSTS:
            client = await server.connect(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
            assert b" 200 " in await client.answer(), host


async def test_http_1_0_needs_no_host() -> None:
    async with serving() as server:
        assert b" 200 " in await (await server.connect(b"GET /health HTTP/1.0\r\n\r\n")).rest()


async def test_head_is_get_without_the_body() -> None:
    async with serving() as server:
        for path in (b"/health", b"/ping", b"/metrics", b"/version", b"/v1/models", b"/v1/models/tiny", b"/v1/plan",
                     b"/docs", b"/openapi.json"):  # fmt: skip
            asked = b"GET " + path + b" HTTP/1.0\r\n\r\n"
            whole = await (await server.connect(asked)).rest()
            head = await (await server.connect(asked.replace(b"GET", b"HEAD"))).rest()
            assert whole.startswith(b"HTTP/1.1 200 "), path
            assert head == whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", path
        refused = await (await server.connect(b"HEAD /v1/completions HTTP/1.0\r\n\r\n")).rest()
        assert b" 405 " in refused
        assert refused.endswith(b"\r\n\r\n")
