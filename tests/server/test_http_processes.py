"""Three HTTP processes and two engines behind one port: real processes, a fake executor, a real HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest

from headrace.config import ServerConfig
from headrace.errors import ConfigError
from headrace.planner.served import decide_http_processes
from tests.engine.fakes import SLOW_TOKEN
from tests.server.fake_engine import events
from tests.server.live import Live
from tests.serving import gone
from tests.speed import PATIENCE

PROCESS, CORE = "headrace.server.http_process", "headrace.engine.core_process"
PROCESSES = 3
SLOW: dict[str, Any] = {"prompt": [SLOW_TOKEN, 80, 81], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
"""Ten seconds of work; of three tokens the first has no text."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The server of this file's tests, of which the last one ends it."""
    with Live(tmp_path_factory.mktemp("model"), engines=2, processes=PROCESSES) as server:
        yield server


@contextlib.asynccontextmanager
async def doors(live: Live, each: int = 1) -> AsyncIterator[list[list[httpx.AsyncClient]]]:
    """`each` clients of every HTTP process, the first one's first, with a connection of their own that stays open."""
    limits = httpx.Limits(max_connections=1, keepalive_expiry=PATIENCE)
    options: dict[str, Any] = {"base_url": live.url, "headers": live.headers, "limits": limits, "timeout": PATIENCE}
    found: list[list[httpx.AsyncClient]] = [[] for _ in range(PROCESSES)]
    async with contextlib.AsyncExitStack() as stack:
        while min(map(len, found)) < each:
            client = await stack.enter_async_context(httpx.AsyncClient(**options))
            async with client.stream("GET", "/version") as answer:
                port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                await answer.aread()
            found[holder(live, port)].append(client)
        yield [clients[:each] for clients in found]


def holder(live: Live, port: int) -> int:
    """Which HTTP process has the connection that comes from that port of a client."""
    for place, process in enumerate((psutil.Process(live.process.pid), *live.children(PROCESS))):
        if any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp")):
            return place
    raise AssertionError(f"nobody holds the connection from port {port}")


def total(text: str, pattern: str) -> float:
    """The sum of the metrics whose lines begin so."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(pattern, line))


RUNNING, TOKENS = r"vllm:num_requests_running\{", r"vllm:generation_tokens_total\{"
FIRST = r"vllm:time_to_first_token_seconds_count\{"
ENDED, ABORTED = (rf'vllm:request_success_total\{{.*finished_reason="{reason}"' for reason in ("length", "abort"))


async def metrics(client: httpx.AsyncClient) -> str:
    return (await client.get("/metrics")).text


async def until(client: httpx.AsyncClient, pattern: str, value: float) -> str:
    """/metrics once the sum of some of them is so much."""
    async with asyncio.timeout(PATIENCE):
        while total(text := await metrics(client), pattern) != value:
            await asyncio.sleep(0.1)
    return text


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """The events of a completion."""
    answer = await client.post("/v1/completions", json={**SLOW, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return events(answer)


def said(found: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in found if event != "[DONE]" and "error" not in event)


def test_streams_are_whole_and_metrics_add_up(live: Live) -> None:
    async def go() -> None:
        async with doors(live) as ((one,), (other,), _):
            before = await until(one, RUNNING, 0)
            found = await asyncio.gather(
                stream(one, prompt="abc", max_tokens=30), stream(other, prompt="xyz", max_tokens=60)
            )
            assert [said(each) for each in found] == ["abc" * 10, "xyz" * 20]
            assert [each[-1] for each in found] == ["[DONE]"] * 2
            for client in (one, other):
                text = await metrics(client)
                assert total(text, TOKENS) - total(before, TOKENS) == 90
                assert total(text, ENDED) - total(before, ENDED) == 2
                assert total(text, FIRST) == total(text, ENDED)
                assert total(text, r"headrace:http_connections\{") >= 2
                assert total(text, r"headrace:engine_up\{") == 2, "what the engines count is not counted twice"
                assert total(text, r"headrace:max_queued_requests\{") == 8192
                assert text.count("# TYPE vllm:generation_tokens_total ") == 1

    asyncio.run(go())


def test_a_client_that_vanishes_ends_its_request_alone(live: Live) -> None:
    """Through each process two requests run, of which one is left; others of the same core go on."""

    async def go() -> None:
        async with doors(live, 2) as (ones, others, ((asks, _))):
            before = await until(asks, RUNNING, 0)
            tasks = [asyncio.create_task(stream(client)) for client in (*ones, *others)]
            await until(asks, RUNNING, 4)
            for task in tasks[::2]:
                task.cancel()
            after = await until(asks, RUNNING, 2)
            assert [task.done() for task in tasks[1::2]] == [False, False]
            assert total(after, ABORTED) - total(before, ABORTED) == 2
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(asks, RUNNING, 0)

    asyncio.run(go())


def test_stored_responses_are_known_to_all(live: Live) -> None:
    async def go() -> None:
        async with doors(live) as ((one,), (other,), _):
            for maker, reader in ((one, other), (other, one)):
                made = await maker.post("/v1/responses", json={"input": "abc", "max_output_tokens": 4})
                assert made.status_code == 200, made.text
                place = f"/v1/responses/{made.json()['id']}"
                assert (await reader.get(place)).json() == (await maker.get(place)).json() == made.json()
                more = {"input": "d", "max_output_tokens": 4, "previous_response_id": made.json()["id"], "stream": True}
                answer = await reader.post("/v1/responses", json=more)
                kinds = [line for line in answer.text.splitlines() if line.startswith("event: ")]
                assert (kinds[0], kinds[-1]) == ("event: response.created", "event: response.incomplete")
                assert (await reader.delete(place)).json()["deleted"] is True
                assert (await maker.get(place)).status_code == 404
            for client in (one, other):
                answer = await client.post("/v1/responses", json={"input": 3})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
                assert (await client.post("/v1/responses", content=b"{")).status_code == 415
                assert int((await client.head("/metrics")).headers["content-length"]) > 1000
                assert (await client.get("/metrics", headers={"authorization": "Bearer other"})).status_code == 401

    asyncio.run(go())


def test_a_killed_core_comes_back_for_all(live: Live) -> None:
    async def go() -> None:
        async with doors(live, 4) as (ones, others, ((asks, *_))):
            await until(asks, RUNNING, 0)
            tasks = [asyncio.create_task(stream(client, max_tokens=60)) for client in (*ones, *others)]
            text = await until(asks, RUNNING, 8)
            running = [total(text, rf'{RUNNING}engine="{rank}"') for rank in range(2)]
            victim = running.index(max(running))  # the other may have been thought too slow for any
            live.children(CORE)[victim].kill()
            found = await asyncio.gather(*tasks)
            whole = [each for each in found if each[-1] == "[DONE]"]
            assert all(said(each) == "no" * 20 for each in whole)
            assert all(each in whole or each[-1]["error"]["code"] == "engine_dead" for each in found)
            assert min(running) <= len(whole) < 8, "one core is left"
            async with asyncio.timeout(PATIENCE):
                for client in (ones[0], others[0], asks):
                    while set((await client.get("/health")).json()["engines"].values()) != {"serving"}:
                        await asyncio.sleep(0.05)
            again = rf'{TOKENS}engine="{victim}"'
            for client in (ones[0], others[0]):
                before = await until(asks, RUNNING, 0)
                async with asyncio.timeout(PATIENCE):
                    while total(await metrics(asks), again) == total(before, again):
                        assert said(await stream(client, max_tokens=6)) == "nono"

    asyncio.run(go())


def test_a_killed_http_process_ends_the_server(live: Live) -> None:
    """Of requests in the other processes short ones finish and long ones end with an event, also where the first
    process answers for another."""
    everything = live.children()

    async def go() -> list[str]:
        async with doors(live, 3) as (ones, _, others), doors(live) as ((asks,), _, _):
            before, tasks = await until(asks, RUNNING, 0), []
            for short, long, passed_on in (ones, others):
                body = {"input": "abc" * 30, "max_output_tokens": 100, "stream": True}
                tasks += [asyncio.create_task(stream(short, max_tokens=6)), asyncio.create_task(stream(long))]
                tasks.append(asyncio.create_task(passed_on.post("/v1/responses", json=body)))
            await until(asks, FIRST, total(before, FIRST) + 6)
            live.children(PROCESS)[0].kill()
            found = await asyncio.gather(*tasks)
            return [repr(each[-1]) if isinstance(each, list) else each.text for each in found]

    found = asyncio.run(go())
    for short, long, passed_on in (found[:3], found[3:]):
        assert short == "'[DONE]'"
        assert "server_stopping" in long
        # Where its core has no slow request beside it, it has ended before.
        assert "server_stopping" in passed_on or "event: response.completed" in passed_on
    assert live.process.wait(PATIENCE) == 1
    gone(everything)
    live.reader.join(PATIENCE)
    assert live.text.count("HTTP process 1 of 3 died (exit code -9), so the server ends") == 1
    assert "Traceback" not in live.text


@pytest.mark.parametrize(
    ("given", "engines", "most", "one_because", "value", "reason"),
    [
        (3, 1, None, "", 3, "given"),
        (None, 1, None, "", 1, "one engine"),
        (None, 4, None, "", 1, "one process streams about 24,000 tokens/s, and nothing predicts what 4 engines give"),
        (None, 4, 20_000, "", 1, "one process streams about 24,000 tokens/s, and 4 engines give 20,000 at most"),
        (None, 4, 50_000, "", 3, "one process streams about 24,000 tokens/s, and 4 engines give 50,000 at most"),
        (None, 2, 90_000, "", 2, "one process streams about 24,000 tokens/s, and 2 engines give 90,000 at most"),
        (None, 2, 90_000, "clients may load adapters", 1, "clients may load adapters"),
    ],
)
def test_how_many(
    given: int | None, engines: int, most: float | None, one_because: str, value: int, reason: str
) -> None:
    decision = decide_http_processes(given, engines, most, one_because)
    assert decision.value == value
    assert decision.reason.startswith(reason)


def test_adapters_that_clients_load_need_one_process() -> None:
    with pytest.raises(ConfigError, match="api_server_count must be 1 with runtime_lora_folder, got 2"):
        ServerConfig(api_server_count=2, runtime_lora_folder="/adapters")
