"""Soaks `headrace serve`: clients come and go at random, more than it can serve, and nothing may be left of them.

    python bench/soak.py [MODEL] [--seconds 60] [--overload 2] [--url URL] [-- FLAGS OF SERVE]

First --clients clients, each with one request at a time, measure the rate of requests that the server sustains. Then
requests arrive at random at --overload times that rate, whether others have ended or not. Each streams a completion or
a chat, some with n, stop strings, penalties or logprobs; two of three clients leave in the middle, many before the
first byte. A request that is refused with 429 and Retry-After does not count as lost.

Prints over time the resident memory of each process against its bound; then how many requests were lost and the
slowest answer of /health, which a process of its own asks once a second. Exit code 1 for anything wrong that was not
a client's own doing: a lost request (an error, a broken stream, a status other than 200 and 429), a 429 without
Retry-After, /health slow or not 200, memory that has grown by more than 96 MiB, requests, KV blocks or open
files still held afterwards, a traceback in the log, or a greedy answer that has changed.

Starts a server of its own (and ends it) unless --url names one; memory, files and log are then not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from server_process import serving

START_SECONDS = 600
DRAIN_SECONDS = 10
PATIENCE_SECONDS = 600.0
"""A client that stays to the end gives up after so long, and counts as lost."""
MOST_GROWTH_MIB = 96
"""of each process's resident memory"""
LINES = 60
"""that are printed of memory over time"""
PROBE = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0}
OPENINGS = ("Once upon a time", "One day, a little girl", "The dog was", "Tom and Sue", "In the garden", "It was late")
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Target:
    """Reaches the server that is soaked."""

    url: str
    headers: dict[str, str]

    def client(self) -> httpx.AsyncClient:
        """Return a client without a limit of connections. It verifies nothing: loading certificates takes too long."""
        own: dict[str, Any] = {"base_url": self.url, "headers": self.headers, "timeout": PATIENCE_SECONDS}
        return httpx.AsyncClient(**own, verify=False, limits=httpx.Limits())

    def metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        """Return the metrics whose names begin with one of `names`."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30).text
        return {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)}

    def probe(self) -> str:
        """Return a greedy answer."""
        answer = httpx.post(f"{self.url}/v1/completions", json=PROBE, headers=self.headers, timeout=60)
        text: str = answer.raise_for_status().json()["choices"][0]["text"]
        return text


@dataclass
class Tally:
    """Counts what happened, and lists what should not have."""

    events: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def lost(self, text: str) -> None:
        """Count a request that neither ended, nor was left by its client, nor refused."""
        self.events["lost"] += 1
        self.problem(text)

    def problem(self, text: str) -> None:
        """Record something that must not happen."""
        self.events["problems"] += 1
        if len(self.problems) < 20:
            self.problems.append(text)


def random_request(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """Return (path, body, number of choices) of a streamed request."""
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


async def one_stream(client: httpx.AsyncClient, rng: random.Random, tally: Tally, leaves_at: float) -> None:
    """Send one request, and leave at `leaves_at` (time.monotonic(); inf: at the end)."""
    path, body, n = random_request(rng)
    ended: set[int] = set()
    done = False
    patience = min(max(leaves_at - time.monotonic(), 0.0), PATIENCE_SECONDS)
    tally.events["requests"] += 1
    try:
        async with asyncio.timeout(patience), client.stream("POST", path, json=body) as answer:
            if answer.status_code == 429:
                tally.events["refused"] += 1
                if not answer.headers.get("retry-after", "").isdecimal():
                    tally.problem(f"{path}: a 429 without seconds in Retry-After")
                return
            if answer.status_code != 200:
                tally.lost(f"{path}: status {answer.status_code}: {(await answer.aread())[:300]!r}")
                return
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    tally.lost(f"{path}: error event {event['error']}")
                    return
                ended |= {choice["index"] for choice in event["choices"] if choice["finish_reason"]}
    except TimeoutError:
        if patience < PATIENCE_SECONDS:
            tally.events["left"] += 1
        else:
            tally.lost(f"{path}: not answered within {PATIENCE_SECONDS:.0f} s")
        return
    except (httpx.HTTPError, ValueError) as error:
        tally.lost(f"{path}: {type(error).__name__}: {error}")
        return
    tally.events["finished"] += 1
    if not done or len(ended) != n:
        tally.lost(f"{path}: stream ended early: [DONE] {done}, {len(ended)} of {n} choices ended")


def leaving(rng: random.Random) -> float:
    """Return when a client leaves: a third almost at once, a third sometime, a third at the end."""
    return time.monotonic() + rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.1, 5.0), float("inf")))


async def sustained_rate(target: Target, clients: int, seconds: float, seed: int) -> float:
    """Return the requests a second that the server takes from clients that send one request at a time."""
    tally, until = Tally(), time.monotonic() + seconds

    async def one_client(rng: random.Random) -> None:
        while time.monotonic() < until:
            await one_stream(client, rng, tally, min(leaving(rng), until))

    async with target.client() as client, asyncio.TaskGroup() as group:
        for index in range(clients):
            group.create_task(one_client(random.Random(seed + index)))
    served = tally.events["requests"] - tally.events["refused"] - clients  # each client's last one was cut short
    return max(served, 1) / seconds


async def flood(target: Target, rate: float, seconds: float, seed: int, tally: Tally, watch: Watch | None) -> None:
    """Send requests at `rate` a second on average, or as fast as this process can; at the end all clients leave."""
    rng = random.Random(seed)
    began = arrives = time.monotonic()
    until, looks = began + seconds, began
    open_requests: set[asyncio.Task[None]] = set()
    async with target.client() as client:
        while arrives < until and (now := time.monotonic()) < until:
            if watch is not None and now >= looks:
                watch.look(now - began, tally, len(open_requests))
                looks += max(seconds / LINES, 1.0)
            await asyncio.sleep(max(arrives - now, 0.0))
            request = random.Random(rng.random())
            task = asyncio.create_task(one_stream(client, request, tally, min(leaving(request), until)))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
            arrives += rng.expovariate(rate)
        await asyncio.gather(*open_requests)


def ask_health(url: str, seconds: float) -> tuple[float, str]:
    """Ask /health once a second for so long; return the seconds of the slowest answer, and a first problem.

    It runs in a process of its own, so that nothing but the server can make an answer late.
    """
    slowest, red, until = 0.0, "", time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:
        while time.monotonic() < until:
            time.sleep(1.0)
            began = time.monotonic()
            try:
                answer = client.get("/health")
                red = red or ("" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:300]}")
            except httpx.HTTPError as error:
                red = red or f"{type(error).__name__}: {error}"
            slowest = max(slowest, time.monotonic() - began)
    return slowest, red


def memory_mib(process: psutil.Process) -> dict[str, float]:
    """Return the resident memory of the server and its children, by what they run."""
    return {
        f"{re.sub(r'.*headrace.', '', ' '.join(one.cmdline()[:5])).split()[0]} {one.pid}": one.memory_info().rss / 2**20
        for one in (process, *process.children(recursive=True))
    }


class Watch:
    """Checks the memory of every process over time against its first value and what it may grow by."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._bounds = {name: now + MOST_GROWTH_MIB for name, now in memory_mib(process).items()}
        self._told: set[str] = set()

    def look(self, seconds: float, tally: Tally, open_requests: int = 0) -> None:
        """Print a line. Memory beyond its bound is a problem, once a process."""
        shown = []
        for name, now in memory_mib(self._process).items():
            bound = self._bounds.setdefault(name, now + MOST_GROWTH_MIB)
            shown.append(f"{name} {now:.0f} of {bound:.0f} MiB")
            if now > bound and name not in self._told:
                self._told.add(name)
                tally.problem(f"memory of {name}: {now:.0f} MiB after {seconds:.0f} s, bound {bound:.0f} MiB")
        events = ", ".join(f"{name} {tally.events[name]}" for name in ("requests", "finished", "refused", "lost"))
        print(f"{seconds:6.0f} s: {', '.join(shown)}; {open_requests} open; {events}", flush=True)


def check_drained(target: Target, tally: Tally) -> None:
    """Record a problem where the server still holds requests or blocks some seconds after the last client left."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while any((now := target.metrics(HELD)).values()):
        if time.monotonic() > deadline:
            tally.problem(f"still held {DRAIN_SECONDS} s after the last client left: {now}")
            return
        time.sleep(0.1)


def soak(target: Target, process: psutil.Process | None, options: argparse.Namespace) -> Tally:
    """Measure the sustained rate, flood the server, and check what is left. `process`: the server's, if it is ours."""
    tally, seconds, seed = Tally(), options.seconds, options.seed
    before = target.probe()
    rate = asyncio.run(sustained_rate(target, options.clients, min(seconds / 4, 15), seed + 10_000))
    check_drained(target, tally)
    print(f"sustained: {rate:.1f} requests a second; from now on {options.overload * rate:.1f}", flush=True)
    rate *= options.overload
    watch, files = None, 0
    if process:
        # What is allocated once, under the first load, is no leak: a flood whose memory is not watched comes first.
        asyncio.run(flood(target, rate, min(seconds, 120), seed + 20_000, Tally(), None))
        check_drained(target, tally)
        watch, files = Watch(process), process.num_fds()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(int).result()  # its process has started
        asking = pool.submit(ask_health, target.url, seconds)
        asyncio.run(flood(target, rate, seconds, seed, tally, watch))
        slowest, red = asking.result()
    check_drained(target, tally)
    tally.events["preemptions"] = int(sum(target.metrics(("vllm:num_preemptions_total",)).values()))
    print(f"lost requests: {tally.events['lost']} of {tally.events['requests']} (must be 0)")
    print(f"slowest answer of /health: {1000 * slowest:.0f} ms (must be below {options.max_health_ms:g} ms)")
    if not 0 < 1000 * slowest < options.max_health_ms:
        tally.problem(f"/health took {1000 * slowest:.0f} ms (bound: {options.max_health_ms:g} ms)")
    if red:
        tally.problem(f"/health was not 200: {red}")
    after = target.probe()
    if after != before:
        tally.problem(f"the greedy answer has changed: {before!r}, now {after!r}")
    check_drained(target, tally)
    if process and watch:
        watch.look(seconds, tally)
        if process.num_fds() > files + 4:
            tally.problem(f"open files: {files} before, {process.num_fds()} after")
    return tally


def with_own_server(options: argparse.Namespace) -> Tally:
    """Start the server, soak it, stop it; its log must hold no traceback."""
    with serving([options.model, *options.serve_flags]) as server:
        url = server.wait_for_url(START_SECONDS)
        tally = soak(Target(url, {}), psutil.Process(server.process.pid), options)
        if code := server.stop():
            tally.problem(f"exit code {code}")
    log = "\n".join(server.lines)
    if "Traceback" in log or " ERROR " in log:
        tally.problem("the server's log:\n" + log[-4000:])
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=60, help="how long requests arrive, after up to 135 s before")
    parser.add_argument("--overload", type=float, default=2, help="times the rate that the server sustains")
    parser.add_argument("--clients", type=int, default=64, help="with one request each, to find that rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-health-ms", type=float, default=200, help="of the slowest answer of /health")
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
