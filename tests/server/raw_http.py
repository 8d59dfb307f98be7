"""A server in this process, on a port of its own, with a fake engine behind it; and clients that send raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvloop

from headrace.config import ServerConfig
from headrace.server.http_server import RESERVE, HttpServer
from headrace.server.run import listen_on
from tests.server.fake_engine import FakeEngine, make_app
from tests.speed import PATIENCE, until

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
MODELS = HEALTH.replace(b"/health", b"/v1/models")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


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
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return head + await self.reader.readexactly(int(length))

    async def rest(self) -> bytes:
        """All until the server closes; what it says to a client that it cuts off may be lost on the way."""
        async with asyncio.timeout(PATIENCE):
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


@contextlib.asynccontextmanager
async def serving(send_buffer: int = 4096, **config: Any) -> AsyncIterator[Server]:
    engine = FakeEngine()
    settings = {"max_connections": 100, **config}
    listener = listen_on("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # little: that little waits in the kernel
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
        await asyncio.wait_for(task, PATIENCE)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    uvloop.run(test())


def error_code(answer: bytes) -> tuple[bytes, str]:
    status, body = answer.split(b" ", 2)[1], answer.partition(b"\r\n\r\n")[2]
    return status, json.loads(body)["error"]["code"]
