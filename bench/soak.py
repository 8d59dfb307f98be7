"""Clients that come and go at random against `headrace serve`, and what is left of them afterwards.

    python bench/soak.py [MODEL] [--clients 64] [--duration 60] [--url URL] [-- FLAGS OF SERVE]

Each client streams completions or chats, some with n, stop strings, penalties or logprobs; two of three leave in the
middle, many before the first byte. Exit code 1 if anything is wrong that was not a client's own doing: an error, a
broken stream, requests or KV blocks still held, memory that has grown by more than --max-growth-mib, open files left
over, a traceback in the log, or a greedy answer that is no longer the same.

Starts a server of its own (and ends it) unless --url names one; memory, files and log are then not looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 600
DRAIN_SECONDS = 10
PROBE = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0}
OPENINGS = ("Once upon a time", "One day, a little girl", "The dog was", "Tom and Sue", "In the garden", "It was late")
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Target:
    url: str
    headers: dict[str, str]

    def client(self) -> httpx.AsyncClient:
        """(verify: loading certificates would hold up all clients.)"""
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=120, verify=False)

    def metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30).text
        return {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)}

    def held(self) -> dict[str, float]:
        return self.metrics(HELD)

    def probe(self) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=PROBE, headers=self.headers, timeout=60)
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text


@dataclass
class Tally:
    """What happened, and what should not have."""

    events: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.events["problems"] += 1
        if len(self.problems) < 20:
            self.problems.append(text)


def random_request(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """(path, body, number of choices). Always streamed."""
    text = rng.choice(OPENINGS) + "".join(
        rng.choice((" and", " then", " the", " big", ".")) for _ in range(rng.randrange(40))
    )
    n = rng.choice((1, 1, 1, 1, 2, 3))
    body: dict[str, Any] = {"max_tokens": rng.randrange(1, 200), "n": n, "stream": True}
    body |= {"temperature": rng.choice((0, 0.7, 1.0)), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.2:
        body["stop"] = [rng.choice((" the", ".", "zebra"))]
    if rng.random() < 0.2:
        body |= {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    if rng.random() < 0.3:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.5:
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}, n
    if rng.random() < 0.2:
        body |= {"logprobs": 3, "echo": rng.random() < 0.5}
    return "/v1/completions", {**body, "prompt": text}, n


async def one_stream(client: httpx.AsyncClient, rng: random.Random, tally: Tally, patience: float) -> None:
    """`patience`: seconds after which the client leaves."""
    path, body, n = random_request(rng)
    ended: set[int] = set()
    done = False
    try:
        async with asyncio.timeout(patience), client.stream("POST", path, json=body) as answer:
            tally.events["started"] += 1
            if answer.status_code != 200:
                tally.problem(f"{path}: status {answer.status_code}: {(await answer.aread())[:300]!r}")
                return
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    tally.problem(f"{path}: error event {event['error']}")
                    return
                ended |= {choice["index"] for choice in event["choices"] if choice["finish_reason"]}
    except TimeoutError:
        tally.events["left"] += 1
        return
    except (httpx.HTTPError, ValueError) as error:
        tally.problem(f"{path}: {type(error).__name__}: {error}")
        return
    tally.events["finished"] += 1
    if not done or len(ended) != n:
        tally.problem(f"{path}: stream ended early: [DONE] {done}, {len(ended)} of {n} choices ended")


async def one_client(target: Target, seed: int, until: float, tally: Tally) -> None:
    """One connection at a time; leaving closes it."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        async with target.client() as client:
            for _ in range(rng.randrange(1, 4)):
                # A third leave almost at once, a third sometime, a third stay to the end.
                patience = rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.1, 5.0), 120.0))
                await one_stream(client, rng, tally, min(patience, max(until - time.monotonic(), 0.1)))
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.uniform(0, 0.2))


async def watch_health(target: Target, until: float, tally: Tally) -> None:
    """The server answers others meanwhile."""
    async with target.client() as client:
        while time.monotonic() < until:
            started = time.monotonic()
            answer = await client.get("/health")
            if answer.status_code != 200:
                tally.problem(f"/health: {answer.status_code}")
            tally.events["slowest health check, ms"] = max(
                tally.events["slowest health check, ms"], round(1000 * (time.monotonic() - started))
            )
            await asyncio.sleep(0.25)


async def crowd(target: Target, clients: int, duration: float, seed: int, tally: Tally) -> None:
    until = time.monotonic() + duration
    async with asyncio.TaskGroup() as group:
        group.create_task(watch_health(target, until, tally))
        for index in range(clients):
            group.create_task(one_client(target, seed + index, until, tally))


def memory_mib(process: psutil.Process) -> dict[str, float]:
    """Private memory of the server and of its children, by what they run."""
    return {
        re.sub(r".*headrace\.", "", " ".join(one.cmdline()[:5])).split()[0]: one.memory_full_info().uss / 2**20
        for one in (process, *process.children(recursive=True))
    }


def check_drained(target: Target, tally: Tally) -> None:
    deadline = time.monotonic() + DRAIN_SECONDS
    while any((now := target.held()).values()):
        if time.monotonic() > deadline:
            tally.problem(f"still held {DRAIN_SECONDS} s after the last client left: {now}")
            return
        time.sleep(0.1)


def soak(target: Target, process: psutil.Process | None, options: argparse.Namespace) -> Tally:
    tally = Tally()
    before = target.probe()
    # What is allocated once, on the first load, is no leak: a short crowd comes first.
    asyncio.run(crowd(target, options.clients, min(options.duration / 4, 15), options.seed + 10_000, Tally()))
    check_drained(target, tally)
    memory = memory_mib(process) if process else {}
    files = process.num_fds() if process else 0
    asyncio.run(crowd(target, options.clients, options.duration, options.seed, tally))
    check_drained(target, tally)
    tally.events["preemptions"] = int(sum(target.metrics(("vllm:num_preemptions_total",)).values()))
    after = target.probe()
    if after != before:
        tally.problem(f"the greedy answer has changed: {before!r}, now {after!r}")
    check_drained(target, tally)
    if process:
        for name, now in memory_mib(process).items():
            growth = now - memory.get(name, 0.0)
            print(f"memory of {name}: {memory.get(name, 0.0):.1f} MiB before, {now:.1f} MiB after")
            if growth > options.max_growth_mib:
                tally.problem(f"memory of {name} has grown by {growth:.1f} MiB (bound: {options.max_growth_mib})")
        if process.num_fds() > files + 4:
            tally.problem(f"open files: {files} before, {process.num_fds()} after")
    return tally


def with_own_server(options: argparse.Namespace) -> Tally:
    """Start the server, soak it, stop it; its log must hold no traceback."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", "serve", options.model, "--port", "0", *options.serve_flags],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = wait_for_url(server, log.fileno())
            tally = soak(Target(url, {}), psutil.Process(server.pid), options)
            server.send_signal(signal.SIGTERM)
            code = server.wait(5)
            if code:
                tally.problem(f"exit code {code}")
        finally:
            server.kill()
            server.wait()
        log.seek(0)
        text = log.read()
        if "Traceback" in text or " ERROR " in text:
            tally.problem("the server's log:\n" + text[-4000:])
    return tally


def wait_for_url(server: subprocess.Popen[bytes], log_fd: int) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        text = Path(f"/proc/self/fd/{log_fd}").read_text()
        if match := re.search(r" on (http://\S+)", text):
            return match[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{Path(f'/proc/self/fd/{log_fd}').read_text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--duration", type=float, default=60, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth-mib", type=float, default=32, help="of each process's private memory")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--api-key", default="", help="of that server")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.serve_flags = flags
    if options.url:
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        tally = soak(Target(options.url, headers), None, options)
    else:
        tally = with_own_server(options)
    print(", ".join(f"{name}: {count}" for name, count in sorted(tally.events.items())))
    for problem in tally.problems:
        print(f"problem: {problem}")
    print("failed" if tally.problems else "no leak, no error")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
