"""Measures how many streamed tokens a second the HTTP processes of a server carry (`--api-server-count`).

    python bench/front_door.py [--processes 1,2,4] [--engines 4] [--streams 640] [--tokens 1000] [--json FILE]

The engines are fake: a core, a scheduler and scripted tokens, a step each 5 ms, so that they offer 200 tokens a second
to each stream and take no more than a core of the machine each. All streams begin at once; each must come whole.
Reported are tokens a second from the first request to the last answer's end, and tokens for a second of processor time
of the busiest HTTP process: what they carry at most where every one has a core of its own. On a machine with fewer
cores than processes only the latter says something; a process that falls behind writes several tokens as one event,
for which it needs less.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from server_process import running

ROOT = Path(__file__).parents[1]

START_SECONDS = 240.0
TICKS = os.sysconf("SC_CLK_TCK")
DONE = b"data: [DONE]\n\n"
TAIL = 1024
"""Bytes at the end of a stream that are looked at."""


def serve(folder: str, engines: int, processes: int) -> int:
    """Serve fake engines until a signal comes."""
    from headrace.config import EngineConfig, ServerConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.server.run import run_server

    config = EngineConfig(
        model=folder, device="cpu", num_gpu_blocks_override=1 << 16, served_model_name=["fake"], max_num_seqs=1024,
        data_parallel_size=engines, disable_log_stats=True,
    )  # fmt: skip
    start = functools.partial(AsyncEngine.start, executor="tests.engine.fakes:make_delayed")
    return run_server(config, ServerConfig(port=0, api_server_count=processes), start)


class Stream(asyncio.Protocol):
    """Sends one request when it is connected, and notes how its answer ends."""

    def __init__(self, request: bytes) -> None:
        self.request, self.tail, self.events = request, b"", 0
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]  # uvloop's are none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self.tail = (self.tail + data)[-TAIL:]
        if DONE in self.tail and not self.ended.done():
            self.ended.set_result(time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"a stream broke off: {self.tail!r}"))


def client(address: tuple[str, int, int, int]) -> tuple[float, float, int]:
    """Read so many streams of so many tokens each from (host, port, streams, tokens); return when the first began and
    the last ended (time.monotonic()), and the events that came. Raises RuntimeError for one that is not whole."""
    host, port, streams, tokens = address
    body = json.dumps(
        {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
         "stream_options": {"include_usage": True}}
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def read_all() -> tuple[float, float, int]:
        began, loop = time.monotonic(), asyncio.get_running_loop()
        opened = [await loop.create_connection(lambda: Stream(request), host, port) for _ in range(streams)]
        ended = await asyncio.gather(*(stream.ended for _, stream in opened))
        for transport, stream in opened:
            transport.abort()
            if f'"completion_tokens":{tokens}'.encode() not in stream.tail:
                raise RuntimeError(f"a stream is not whole: {stream.tail!r}")
        return began, max(ended), sum(stream.events for _, stream in opened)

    return uvloop.run(read_all())


def processor_seconds(server: int) -> list[float]:
    """Return the processor time that each HTTP process has taken; `server`: the process of the first one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        if int(path.name) == server or (int(fields[1]) == server and "headrace.server.http_process" in command):
            found.append((int(fields[11]) + int(fields[12])) / TICKS)
    return found


def measure(processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start a server with so many HTTP processes, and return what it carried."""
    sys.path.insert(0, str(ROOT))
    from tests.engine.fakes import model_folder

    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder)) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8192}))
        command = [sys.executable, __file__, "--serve", folder, str(options.engines), str(processes)]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        with running(command, environment) as server:
            host, _, port = server.wait_for_url(START_SECONDS).rpartition("/")[2].rpartition(":")
            each = (host, int(port), options.streams // options.clients, options.tokens)
            with multiprocessing.get_context("spawn").Pool(options.clients) as pool:
                pool.map(client, [(host, int(port), 1, 2)] * options.clients, 1)
                before = processor_seconds(server.process.pid)
                found = pool.map(client, [each] * options.clients, 1)
            used = [b - a for a, b in zip(before, processor_seconds(server.process.pid), strict=True)]
    tokens = each[2] * options.clients * options.tokens
    seconds = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
    return {
        "processes": processes, "engines": options.engines, "streams": each[2] * options.clients, "tokens": tokens,
        "seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds),
        "tokens_per_event": round(tokens / sum(events for _, _, events in found), 2),
        "processor_seconds": [round(one, 2) for one in used],
        "tokens_per_processor_second": round(tokens / max(used)),
        "cores": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4", help="HTTP processes, one run for each number")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--streams", type=int, default=640, help="at once, in all")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--clients", type=int, default=4, help="processes that read the streams")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder, engines, processes = options.serve
        sys.exit(serve(folder, int(engines), int(processes)))
    found = []
    for processes in map(int, options.processes.split(",")):
        found.append(measure(processes, options))
        print(json.dumps(found[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
