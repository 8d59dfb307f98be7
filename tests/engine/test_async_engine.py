"""The engine over its own process: streaming, aborts, and what happens when either side dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.core_client import AsyncMPClient
from headrace.engine.step_health import MOST_FAILURES
from headrace.errors import (
    CheckpointError,
    EngineDeadError,
    HeadraceError,
    RequestError,
    StepsFailError,
    TokenizerError,
)
from headrace.request import RequestOutput
from headrace.sampling_params import SamplingParams
from tests.engine.fakes import DEAD_TOKEN, DIE_TOKEN, FAIL_TOKEN, SLOW_TOKEN, STUCK_TOKEN, model_folder
from tests.speed import PATIENCE, until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _children_find_the_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


@contextlib.asynccontextmanager
async def started(folder: Path, executor: str = "make_delayed", **config: object) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(
        EngineConfig(model=str(folder), **config),  # type: ignore[arg-type]
        executor=f"tests.engine.fakes:{executor}",
    )
    try:
        yield engine
    finally:
        await engine.shutdown()
        assert not psutil.pid_exists(engine.replicas._all[0].client.pid)


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **values})  # type: ignore[arg-type]


async def generate(
    engine: AsyncEngine, prompt: str | list[int], params: SamplingParams, request_id: str, **options: Any
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one prompt."""
    prompts = [await engine.tokenize(prompt) if isinstance(prompt, str) else prompt]
    async with contextlib.aclosing(engine.generate(prompts, params, request_id, **options)) as batches:
        async for ((_, output),) in batches:
            yield output


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_streaming_aborting_and_refusing(folder: Path) -> None:
    """One engine for what does not hurt it, since each start costs a process."""

    async def body() -> None:
        async with started(folder) as engine:
            await check_expectations(engine)
            await check_deltas(engine)
            await check_slow_reader(engine)
            await check_a_loop_that_falls_behind(engine)
            await check_many_at_once(engine)
            await check_closing_aborts(engine)
            await check_abort_from_outside(engine)
            await check_refusals(engine)
            await check_failed_step(engine)
            await check_long_prompts_leave_the_loop_free(engine)
            await check_turns(engine)
            await check_ctrl_c_is_the_parents_business(engine)
            # Whatever became of them, nothing of what was sent is thought to wait still.
            await until(lambda: (engine.queue.num_requests, engine.queue.num_tokens) == (0, 0))
            engine.check_health()

    async def check_expectations(engine: AsyncEngine) -> None:
        """With no flag that names any traffic."""
        assert engine.expected is not None
        assert (engine.expected.workload.input_len, engine.expected.workload.output_len) == (128, 64)
        assert engine.expected.source.startswith("usual for interactive; ")
        assert engine.memory is not None
        assert engine.memory.kv_cache == engine.kv_cache_tokens // engine.config.block_size * 2**10
        await collect(generate(engine, [5, 6, 7], params(), "a"))
        text = engine.metrics.render().decode()
        assert 'headrace:step_time_seconds_predicted_count{engine="0",kind="mixed"' in text
        observed = next(line for line in text.splitlines() if 'observed_sum{engine="0",kind="decode"' in line)
        assert float(observed.rsplit(" ", 1)[1]) > 0.005  # seven steps of 5 ms each, that began one after the other

    async def check_ctrl_c_is_the_parents_business(engine: AsyncEngine) -> None:
        os.kill(engine.replicas._all[0].client.pid, signal.SIGINT)
        assert len(await collect(generate(engine, [5], params(), "after Ctrl-C"))) > 0

    async def check_deltas(engine: AsyncEngine) -> None:
        outputs = await collect(generate(engine, "✓ab", params(), "deltas"))
        assert "".join(o.outputs[0].text for o in outputs) == "✓ab✓"
        assert [t for o in outputs for t in o.outputs[0].token_ids] == engine.tokenizer.encode("✓ab✓")  # type: ignore[union-attr]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"

    async def check_slow_reader(engine: AsyncEngine) -> None:
        stream = generate(engine, "abcd", params(max_tokens=20), "slow reader")
        first = await anext(stream)
        await until(lambda: engine.replicas._all[0].outputs.num_requests == 0)
        rest = await collect(stream)
        assert len(rest) == 1
        assert (first.outputs[0].text + rest[0].outputs[0].text) == "abcd" * 5

    async def check_a_loop_that_falls_behind(engine: AsyncEngine) -> None:
        """What several steps brought meanwhile goes out as one, once the core has had time for several."""
        counts, pause = [0], 0.4
        while max(counts) <= 4:
            assert pause < PATIENCE
            stream = generate(engine, "abcd", params(max_tokens=60), f"late loop {pause}")
            first = await anext(stream)
            time.sleep(pause)
            rest = await collect(stream)
            counts = [len(output.outputs[0].token_ids) for output in (first, *rest)]
            assert sum(counts) == 60
            pause *= 4

    async def check_many_at_once(engine: AsyncEngine) -> None:
        prompts = [f"prompt {i:03}" for i in range(50)]
        streams = [generate(engine, p, params(max_tokens=10), p, output_kind="final") for p in prompts]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert [result[0].outputs[0].text for result in results] == prompts

    async def check_turns(engine: AsyncEngine) -> None:
        """Many prompts of one request hold up another request by little."""
        finished: list[str] = []

        async def one(name: str, parent: str | None, max_tokens: int) -> None:
            await collect(generate(engine, [SLOW_TOKEN, 6, 7], params(max_tokens=max_tokens), name, parent=parent))
            finished.append(name)

        large = [asyncio.create_task(one(f"large {i}", "large", 100)) for i in range(400)]
        await until(lambda: engine.metrics.stats.num_waiting > 0)
        await asyncio.wait_for(one("small", None, 2), PATIENCE)
        assert len(finished) == 1, "before any of the others came to its end"
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)

    async def check_closing_aborts(engine: AsyncEngine) -> None:
        stream = generate(engine, [SLOW_TOKEN], params(max_tokens=200), "closed")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(collect(generate(engine, [SLOW_TOKEN], params(max_tokens=200), "cancelled")))
        await until(lambda: engine.metrics.stats.num_running > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.replicas._all[0].outputs.num_requests == 0
        await until(lambda: engine.metrics.stats.num_running == 0)
        stats = engine.metrics.stats
        assert stats.num_free_blocks == stats.num_blocks

    async def check_abort_from_outside(engine: AsyncEngine) -> None:
        stream = generate(engine, [SLOW_TOKEN], params(max_tokens=200), "aborted")
        await anext(stream)
        await engine.abort("aborted")
        rest = await collect(stream)
        assert rest[-1].outputs[0].finish_reason == "abort"
        await engine.abort("never heard of")

    async def check_refusals(engine: AsyncEngine) -> None:
        for prompt, message in (
            ([], "empty"),
            ([512], "vocabulary"),
            ("x" * 300, "maximum context"),
            ("\ud800", "UTF-8"),
        ):
            with pytest.raises(RequestError, match=message):
                await collect(generate(engine, prompt, params(), "refused"))  # type: ignore[arg-type]
        stream = generate(engine, [SLOW_TOKEN], params(), "twice")
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await collect(generate(engine, [5], params(), "twice"))
        assert len(await collect(stream)) > 0  # the refusal did not touch the first

    async def check_failed_step(engine: AsyncEngine) -> None:
        with pytest.raises(HeadraceError, match="scripted failure"):
            await collect(generate(engine, [FAIL_TOKEN], params(), "failed"))
        assert len(await collect(generate(engine, [5], params(), "after a failure"))) > 0

    async def check_long_prompts_leave_the_loop_free(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="maximum context"):
            await engine.tokenize("ab " * 14_000)

    asyncio.run(body())


async def test_health_follows_the_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red while a step is stuck, or one fails after the other; green as long as an idle loop shows itself."""
    monkeypatch.setattr("headrace.engine.core_client.IDLE_SILENCE_SECONDS", 1.5)
    monkeypatch.setattr("headrace.engine.core_client.BUSY_SILENCE_SECONDS", 0.3)

    async with started(folder, "make_echo") as engine:

        def heard() -> bool:
            with contextlib.suppress(EngineDeadError):
                engine.check_health()
                return True
            return False

        await asyncio.sleep(2.0)
        await until(heard)
        for number in range(MOST_FAILURES):
            await until(heard)
            with pytest.raises(HeadraceError, match="the step failed"):
                await collect(generate(engine, [FAIL_TOKEN], params(), f"bad {number}"))
        with pytest.raises(StepsFailError, match=r"last 3 steps failed.*scripted failure"):
            await until(heard)
        await collect(generate(engine, [10], params(), "good"))
        await until(heard)
        task = asyncio.create_task(collect(generate(engine, [STUCK_TOKEN], params(), "stuck")))
        await until(lambda: not heard())
        with pytest.raises(EngineDeadError, match="silent"):
            engine.check_health()
        task.cancel()
        await engine.shutdown(timeout=0.0)  # which waits for nothing


@pytest.mark.parametrize("token", [DIE_TOKEN, DEAD_TOKEN], ids=["killed in a step", "executor gone"])
async def test_death_of_the_core_ends_open_requests(folder: Path, token: int) -> None:
    async with started(folder) as engine:
        waiting = asyncio.create_task(collect(generate(engine, [SLOW_TOKEN], params(max_tokens=200), "open")))
        await until(lambda: engine.metrics.num_generation_tokens > 0)
        with pytest.raises(EngineDeadError):
            await collect(generate(engine, [token], params(), "last"))
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineDeadError):
                await waiting
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(generate(engine, [5], params(), "too late"))


async def test_shutdown_with_open_requests(folder: Path) -> None:
    async with started(folder) as engine:
        waiting = asyncio.create_task(collect(generate(engine, [STUCK_TOKEN], params(), "open")))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(PATIENCE):  # it would be for ever
            await engine.shutdown(timeout=1.0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await waiting


@pytest.mark.parametrize(
    ("executor", "config", "error", "message"),
    [
        ("make_broken", {}, CheckpointError, "lacks `model.norm.weight`"),
        ("make_crashing", {}, EngineDeadError, "exit code -9"),
        ("no_such_name", {}, HeadraceError, "could not start: AttributeError"),
        ("make_slow_start", {"tokenizer": "/"}, TokenizerError, "no tokenizer.json"),
    ],
)
async def test_what_is_wrong_with_a_start_arrives_as_its_class(
    folder: Path, executor: str, config: dict[str, object], error: type[HeadraceError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        async with started(folder, executor, **config):
            pass
    assert type(caught.value) is error
    assert not [child for child in psutil.Process().children() if "core_process" in " ".join(child.cmdline())]


PARENT = """
import asyncio, sys
from pathlib import Path
from headrace.config import EngineConfig
from headrace.engine.core_client import AsyncMPClient

async def main():
    client = AsyncMPClient(EngineConfig(), Path(sys.argv[1]), "tests.engine.fakes:make_slow_start")
    print(client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_core_that_is_still_starting_does_not_outlive_its_parent(folder: Path) -> None:
    """However the parent dies. One that has started: tests/e2e/test_processes.py."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        core.wait(timeout=PATIENCE)
    assert not core.is_running()


async def test_no_socket_is_left_to_connect_to(folder: Path) -> None:
    """Once both ends are connected the sockets' folder is gone; before that nobody else can enter it."""
    client = AsyncMPClient(EngineConfig(), folder, "tests.engine.fakes:make_echo")
    directory = Path(client._folder.name)
    try:
        assert directory.stat().st_mode & 0o777 == 0o700
        await client.ready()
        assert not directory.exists()
    finally:
        await client.shutdown()
