"""Engines on other machines, whose cores are stood for by other processes: each is started where there is room, its end
is told by name, and one that is gone is awaited again."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import msgspec
import pytest

from headrace.config import EngineConfig
from headrace.engine import machines, node
from headrace.engine.machines import Machines, RemoteCore
from headrace.engine.messages import CoreConfig
from headrace.errors import ConfigError, EngineDeadError
from headrace.hub import DEMO_FOLDER
from headrace.process import Child, free_port
from tests.executor.test_nodes import SECRET, Node
from tests.speed import until


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of three engines, of which the first machine has one."""
    monkeypatch.setenv("HEADRACE_SECRET", SECRET)
    port = free_port()
    at = {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": port}
    return {"data_parallel_size": 3, "data_parallel_size_local": 1, **at}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CoreConfig, Child]]:
    """The cores that nodes have started, in order."""
    cores: list[tuple[CoreConfig, Child]] = []

    def spawn(module: str, config: bytes) -> Child:
        cores.append((msgspec.msgpack.decode(config, type=CoreConfig), Child(subprocess.Popen(["sleep", "600"]))))
        return cores[-1][1]

    monkeypatch.setattr(node, "spawn", spawn)
    return cores


def test_cores_are_started_where_there_is_room_and_again_when_they_or_their_machine_are_gone(
    spread: dict[str, Any], started: list[tuple[CoreConfig, Child]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "NEXT_SECONDS", 0.0)

    async def scenario() -> None:
        config = EngineConfig(**spread)
        assert (config.engine_ranks, config.remote_engines) == (range(1), range(1, 3))
        there = Machines(config, config, DEMO_FOLDER)
        one, two = (RemoteCore(there, rank) for rank in config.remote_engines)
        further = {**spread, "node_rank": 0, "data_parallel_size_local": 2, "data_parallel_start_rank": 1}
        other = Node(**further)
        await until(lambda: len(started) == 2)
        core = started[0][0]
        assert (core.config.data_parallel_rank, core.config.num_local_engines, core.config.first_gpu) == (1, 2, 1)
        assert (core.requests, core.replies) == tuple(f"tcp://127.0.0.1:{port}" for port in one.ports)
        assert core.keys == there.keys

        second = Node(**further)
        await until(lambda: not second.is_alive())
        assert isinstance(second.ended, ConfigError)
        assert "engine 1 runs on the machine of engines 1 to 2 (127.0.0.1)" in str(second.ended)

        started[0][1].process.kill()
        with pytest.raises(
            EngineDeadError, match=r"on the machine of engines 1 to 2 \(127.0.0.1\) died \(exit code -9"
        ):
            await one.receive()
        two.check_health(has_requests=False)
        again = await one.again()
        await until(lambda: len(started) == 3)
        again.kill()
        await until(lambda: not started[2][1].is_alive())
        with pytest.raises(EngineDeadError, match="the engine core was ended"):
            await again.receive()

        there._listener.nodes[0].lost = "it has said nothing"
        with pytest.raises(EngineDeadError, match=r"engines 1 to 2 \(127.0.0.1\) is gone: it has said nothing"):
            await two.receive()
        monkeypatch.setattr(machines, "JOIN_SECONDS", 0.0)
        two_again = await two.again()
        with pytest.raises(EngineDeadError, match="no machine with engine 2 came in"):
            await two_again.ready()
        await asyncio.gather(again.shutdown(), two_again.shutdown())
        await there.close()
        await until(lambda: not other.is_alive())

    asyncio.run(scenario())
    assert not any(child.is_alive() for _, child in started)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_start_rank": 0}, "other machines run engines 1 to 2, and it has 1 from 0 on"),
        (
            {"data_parallel_start_rank": 1, "max_num_seqs": 3},
            "max_num_seqs is not given on node 0 and 3 on the machine",
        ),
    ],
)
def test_a_machine_that_does_not_belong_is_refused(
    spread: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    async def scenario() -> Any:
        config = EngineConfig(**spread)
        there = Machines(config, config, DEMO_FOLDER)
        other = Node(**{**spread, "node_rank": 0, **settings})
        await until(lambda: not other.is_alive())
        await there.close()
        return other.ended

    ended = asyncio.run(scenario())
    assert isinstance(ended, ConfigError)
    assert message in str(ended)
