"""A scripted OpenAI-compatible server: streams as many tokens as asked for, and remembers what it was sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """`fault`: status (answer 400), error (an error event in the stream), cut (close in the middle)."""

    port: int = 0
    fault: str = ""
    chunk_delay: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    most_at_once: int = 0
    now_open: int = 0
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.headers.append(head)
                fields = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                if head.startswith("GET"):
                    card = {"id": "fake", "root": None, "max_model_len": 4096}
                    self._plain(writer, 200, {"object": "list", "data": [card]})
                elif self.fault == "status":
                    self._plain(writer, 400, {"error": {"message": "max_tokens is too large"}})
                else:
                    await self._stream(writer, json.loads(body), "chat" in head.split("\r\n")[0])
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def _plain(self, writer: asyncio.StreamWriter, status: int, record: dict[str, Any]) -> None:
        text = json.dumps(record).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        self.bodies.append(body)
        self.now_open += 1
        self.most_at_once = max(self.most_at_once, self.now_open)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        def send(payload: str) -> None:
            data = f"data: {payload}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        count = body["max_completion_tokens" if chat else "max_tokens"]
        if chat:
            send('{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}')
        piece = '"delta":{"content":" word"}' if chat else '"text":" word","logprobs":null'
        event = '{"id":"cmpl-1","object":"text_completion","created":1,"model":"fake","choices":[{"index":0,' + piece
        for i in range(count):
            if self.fault and i == count // 2:
                if self.fault == "error":
                    send('{"error":{"message":"the engine died"}}')
                writer.close()
                break
            send(event + ',"finish_reason":null}],"usage":null}')
            if self.chunk_delay:
                await asyncio.sleep(self.chunk_delay)
            elif i % 64 == 63:
                await writer.drain()
        else:
            prompt = body.get("prompt")
            usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 7, "completion_tokens": count}
            send(json.dumps({"choices": [], "usage": usage}))
            send("[DONE]")
            writer.write(b"0\r\n\r\n")
        self.now_open -= 1


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Serves from a thread of its own on a free port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.handle, "127.0.0.1", 0))
    fake.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
