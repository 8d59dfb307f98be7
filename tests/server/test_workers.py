"""Work off the event loop: clients take turns, grammars come last, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from headrace.errors import QueueFullError, RequestError
from headrace.server import workers as workers_module
from headrace.server.workers import Workers
from tests.server.fake_engine import chat, error_of, make_app


class Bench:
    """All threads are busy until `free` is set; `order` is what ran after that."""

    def __init__(self) -> None:
        self.workers = Workers()
        self.free = threading.Event()
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[object]] = []

    def ask(self, client: str, name: str, makes_grammar: bool = False) -> asyncio.Task[object]:
        task = asyncio.create_task(self.workers.run(lambda: self.order.append(name), client, makes_grammar))
        self.tasks.append(task)
        return task

    async def block(self, client: str = "first") -> None:
        for _ in range(workers_module.THREADS):
            self.tasks.append(asyncio.create_task(self.workers.run(self.free.wait, client, False)))
        await asyncio.sleep(0)

    async def end(self) -> list[object]:
        self.free.set()
        found = await asyncio.gather(*self.tasks, return_exceptions=True)
        self.workers.stop()
        return found


async def test_many_jobs_of_one_client_hardly_delay_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "THREADS", 1)
    bench = Bench()
    await bench.block("other")
    for number in range(5):
        bench.ask("greedy", str(number))
    await asyncio.sleep(0)
    bench.ask("modest", "modest")
    await asyncio.sleep(0)
    await bench.end()
    assert bench.order == ["0", "modest", "1", "2", "3", "4"]


async def test_what_makes_no_grammar_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "THREADS", 1)
    bench = Bench()
    await bench.block()
    bench.ask("a", "grammar", makes_grammar=True)
    await asyncio.sleep(0)
    bench.ask("a", "plain")
    await asyncio.sleep(0)
    await bench.end()
    assert bench.order == ["plain", "grammar"]


async def test_one_whose_turn_does_not_come_is_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "TURN_SECONDS", 0.05)
    bench = Bench()
    await bench.block()
    late = bench.ask("a", "late")
    await asyncio.wait((late,))
    *_, error = await bench.end()
    assert isinstance(error, QueueFullError)
    assert error.retry_after == 1
    assert "within 0.05 seconds: 1 wait to be read and checked" in str(error)


async def test_one_that_leaves_neither_runs_nor_keeps_a_thread() -> None:
    bench = Bench()
    await bench.block()
    bench.ask("a", "left")
    await asyncio.sleep(0)
    for task in bench.tasks:  # those that have begun run on, though nobody waits for them
        task.cancel()
    await asyncio.sleep(0)
    bench.ask("a", "stayed")
    await bench.end()
    assert bench.order == ["stayed"]


@pytest.mark.parametrize("error", [RequestError("no", "field"), ValueError("a bug")])
def test_errors_reach_the_caller(error: Exception) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(Workers().run(fails, "a", False))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_asks_for_too_much_at_once_gets_a_429(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    def busy(self: Workers, *_: Callable[[], object]) -> None:
        raise QueueFullError("busy", 7)

    monkeypatch.setattr(Workers, "run", busy)
    answer = chat(make_app(), regex="a", stream=stream)
    assert error_of(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "7"
