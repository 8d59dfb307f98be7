"""Several engines behind one front end: who gets a request, and what becomes of it when an engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from headrace.config import EngineConfig
from headrace.engine import replicas
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.core_client import CoreLink
from headrace.engine.replicas import MOST_LOST
from headrace.engine.router import EngineLoad
from headrace.errors import CheckpointError, ConfigError, EngineDeadError
from headrace.llm import LLM
from headrace.sampling_params import SamplingParams
from tests.engine.fakes import SLOW_TOKEN, STUCK_TOKEN, model_folder
from tests.engine.test_async_engine import collect, generate, params
from tests.speed import PATIENCE, until

ROOT = Path(__file__).parents[2]
ENGINES = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return model_folder(tmp_path)


def shown(engine: AsyncEngine, name: str) -> list[str]:
    """The values of a metric, by engine."""
    lines = [line for line in engine.metrics.render().decode().splitlines() if line.startswith(name + "{")]
    return [line.rsplit(" ", 1)[1] for line in sorted(lines)]


async def test_spreading_dying_and_coming_back(folder: Path) -> None:
    """One group of engines for all, since each costs a process."""
    config = EngineConfig(model=str(folder), data_parallel_size=ENGINES)
    engine = await AsyncEngine.start(config, executor="tests.engine.fakes:make_delayed")
    try:
        await check_spread(engine)
        with pytest.MonkeyPatch.context() as patch:  # by its choice an engine that was slow once may get nothing
            patch.setattr(replicas, "choose", fewest_open)
            await check_death(engine)
        await check_a_request_that_hangs_each(engine)
        await until(lambda: (engine.queue.num_requests, engine.queue.num_tokens) == (0, 0))
    finally:
        pids = [each.client.pid for each in engine.replicas._all]
        await engine.shutdown()
    assert not any(map(psutil.pid_exists, pids))


async def check_spread(engine: AsyncEngine) -> None:
    found = await asyncio.gather(*(collect(generate(engine, [9, 10 + n], params(), f"r{n}")) for n in range(30)))
    assert [outputs[-1].finished for outputs in found] == [True] * 30
    values = list(map(float, shown(engine, "vllm:generation_tokens_total")))
    assert sum(values) == 30 * 8
    assert min(values) >= 8, "every engine has worked"
    text = engine.metrics.render().decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert shown(engine, "headrace:engine_up") == ["1.0"] * ENGINES
    assert engine.engine_states() == dict.fromkeys("012", "serving")


def fewest_open(loads: Sequence[EngineLoad], *request: object) -> int:
    opened = [load.num_open() for load in loads]
    return opened.index(min(opened))


async def check_death(engine: AsyncEngine) -> None:
    """Of one that is killed: what has sent something ends with an error, what has not is answered by another."""
    tasks = {}
    for number in range(12):
        prompt = [SLOW_TOKEN, 10 + number]
        kind = "final" if number % 2 else "delta"
        stream = generate(engine, prompt, params(max_tokens=120), f"d{number}", output_kind=kind)
        tasks[number] = asyncio.create_task(collect(stream))
    victim = engine.replicas._all[1]

    def streams_have_begun() -> bool:
        held = list(victim.outputs._requests.values())
        return bool(held) and all(request.taken or request.kind == "final" for request in held)

    await until(lambda: all(len(each.outputs._requests) for each in engine.replicas._all))
    await until(streams_have_begun)
    held = {int(name[1:]) for name in victim.outputs._requests}
    assert held
    os.kill(victim.client.pid, signal.SIGKILL)
    for number, task in tasks.items():
        async with asyncio.timeout(PATIENCE):
            if number in held and number % 2 == 0:
                with pytest.raises(EngineDeadError, match="engine 1: the engine core died"):
                    await task
            else:
                outputs = await task
                tokens = [token for each in outputs for token in each.outputs[0].token_ids]
                assert tokens == [SLOW_TOKEN, 10 + number] * 60, "from the first token on, once each"
    engine.check_health()
    await until(lambda: victim.error is None)
    assert shown(engine, "headrace:engine_restarts_total") == ["0.0", "1.0", "0.0"]
    before = float(shown(engine, "vllm:generation_tokens_total")[1])
    await asyncio.gather(*(collect(generate(engine, [9, 20 + n], params(), f"again{n}")) for n in range(30)))
    assert float(shown(engine, "vllm:generation_tokens_total")[1]) > before


async def check_a_request_that_hangs_each(engine: AsyncEngine) -> None:
    """A silent engine is ended, and its request goes to another, but not round for ever. Then all come back."""
    assert MOST_LOST == ENGINES - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.engine.core_client.BUSY_SILENCE_SECONDS", 0.5)
        patch.setattr(replicas, "WATCH_SECONDS", 0.2)
        with pytest.raises(EngineDeadError, match=r"engines (have died with this request|serves)"):
            await collect(generate(engine, [STUCK_TOKEN, 5], params(), "stuck"))
    await until(lambda: all(each.error is None for each in engine.replicas._all))
    assert len(await collect(generate(engine, [5], params(), "after"))) > 0


async def test_while_none_serves_that_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESTART_SECONDS", 3600.0)
    config = EngineConfig(model=str(folder), data_parallel_size=2)
    engine = await AsyncEngine.start(config, executor="tests.engine.fakes:make_delayed")
    try:
        for each in engine.replicas._all:
            monkeypatch.setattr(each.client, "again", NoSecondStart(each.client).again)
            os.kill(each.client.pid, signal.SIGKILL)
        await until(lambda: all(each.error is not None for each in engine.replicas._all))
        with pytest.raises(EngineDeadError, match="none of 2 engines serves now: engine 0: the engine core died"):
            engine.check_health()
        with pytest.raises(EngineDeadError, match="none of 2 engines"):
            await collect(generate(engine, [5], params(), "nobody"))
        assert shown(engine, "headrace:engine_up") == ["0.0", "0.0"]
    finally:
        await engine.shutdown()


class NoSecondStart:
    """A core that cannot start again."""

    def __init__(self, first: CoreLink) -> None:
        self.first = first

    async def again(self) -> NoSecondStart:
        await self.first.shutdown(0.0)
        return self

    async def ready(self) -> None:
        raise EngineDeadError("there is no second start here")

    async def shutdown(self, timeout: float) -> None:
        pass


def test_offline_what_keeps_a_core_from_starting_is_said(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors lacks `model\.norm\.weight`"):
        LLM(str(folder), data_parallel_size=2, executor="tests.engine.fakes:make_broken")


def test_offline_the_tokens_are_the_same() -> None:
    """With a prefix cache, preemptions and grammars, on engines of the real model."""
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 128, "cpu_threads": 1}
    start = "Once upon a time there was a wheel in a river. " * 2
    prompts = [start + tail for tail in ("It", "The miller", "A", "One day", "Then", "But")]
    asked = [SamplingParams(max_tokens=16, temperature=0.0, n=1 + (n == 2)) for n in range(len(prompts))]
    asked[4] = SamplingParams(max_tokens=16, temperature=0.0, structured_outputs={"regex": "[a-z]+ [0-9]{3}"})
    said = []
    for size in (1, 2):
        with LLM("demo", data_parallel_size=size, num_gpu_blocks_override=24, **settings) as llm:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            said.append([[choice.token_ids for choice in output.outputs] for output in outputs])
            pids = [client.pid for client in getattr(llm._core, "_clients", [])]
            assert len(pids) == (size if size > 1 else 0)
            assert llm.stats().num_running == 0
    assert said[0] == said[1]
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_external_lb": True}, "needs data_parallel_rank"),
        ({"data_parallel_rank": 4}, r"less than data_parallel_size \(4\), got 4"),
        ({"data_parallel_rank": 1, "data_parallel_hybrid_lb": True}, "cannot stand beside"),
        ({"data_parallel_size_local": 5}, r"at most data_parallel_size \(4\), got 5"),
        ({"data_parallel_size_local": 2}, r"data_parallel_size_local \(2\) leaves engines to other machines"),
        ({"data_parallel_start_rank": 2}, "needs data_parallel_address, or data_parallel_hybrid_lb"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 1}, "multiple"),
    ],
)
def test_which_engines_run_here_is_plain(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(data_parallel_size=4, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "ranks", "gpus"),
    [
        ({}, [0, 1, 2, 3], [0, 2, 4, 6]),
        ({"data_parallel_external_lb": True, "data_parallel_rank": 3}, [3], [0]),
        ({"data_parallel_rank": 3, "data_parallel_size_local": 2}, [3], [2]),
        (
            {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 2},
            [2, 3],
            [0, 2],
        ),
    ],
)
def test_engines_have_gpus_of_their_own(given: dict[str, object], ranks: list[int], gpus: list[int]) -> None:
    config = EngineConfig(data_parallel_size=4, tensor_parallel_size=2, **given)  # type: ignore[arg-type]
    assert list(config.engine_ranks) == ranks
    assert [config.for_engine(rank).first_gpu for rank in ranks] == gpus
