"""The loop of the core's process: requests first, warm-up steps when it has been quiet for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from headrace.engine import core_process
from headrace.engine.front_ends import FrontEnds
from headrace.engine.messages import AbortMany
from headrace.request import EngineCoreOutputs, SchedulerStats


class QuietCore:
    """Has nothing to step; stops the loop after so many warm-up steps."""

    busy, may_warm_up, peers = False, True, None

    def __init__(self, steps: int, on_step: Any = None) -> None:
        self.stop = SimpleNamespace(asked=False)
        self.log: list[tuple[str, float]] = []
        self._left = steps
        self._on_step = on_step or (lambda left: None)

    def warm_up(self) -> bool:
        self._left -= 1
        self.log.append(("warm-up", time.monotonic()))
        self._on_step(self._left)
        self.stop.asked = not self._left
        return True

    def abort(self, aborts: list[Any]) -> None:
        self.log.append(("command", time.monotonic()))

    def step(self) -> None:
        return None

    def check(self) -> None:
        pass

    def snapshot(self, outputs: list[Any]) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=[], stats=SchedulerStats(), timestamp=0.0)


@pytest.fixture
def sockets() -> Iterator[tuple[FrontEnds, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Those of a core with one front end, and that one's two."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    sender.bind("inproc://requests")
    receiver.bind("inproc://replies")
    yield FrontEnds(context, "inproc://requests", "inproc://replies"), sender, receiver
    context.destroy(linger=0)


def run(core: QuietCore, front_ends: FrontEnds) -> tuple[list[str], list[float]]:
    """(what the loop did, seconds since its start of each)"""
    start = time.monotonic()
    core_process._loop(core, front_ends, core.stop)  # type: ignore[arg-type]
    return [name for name, _ in core.log], [at - start for _, at in core.log]


def test_a_quiet_loop_warms_up_one_step_after_the_other(sockets: Any) -> None:
    front_ends, _, receiver = sockets
    did, at = run(QuietCore(20), front_ends)
    assert did == ["warm-up"] * 20
    quiet = core_process.QUIET_MS / 1000
    assert at[0] >= quiet
    assert at[-1] - at[0] < 19 * quiet, "there is nothing to wait for between them"
    assert receiver.poll(0), "it still shows itself"


def test_somebody_who_comes_is_first_and_quiet_is_waited_for_anew(sockets: Any) -> None:
    front_ends, sender, _ = sockets
    command = msgspec.msgpack.encode(AbortMany([]))
    core = QuietCore(4, on_step=lambda left: sender.send(command) if left == 2 else None)
    did, at = run(core, front_ends)
    assert did == ["warm-up", "warm-up", "command", "warm-up", "warm-up"]
    assert at[3] - at[2] >= core_process.QUIET_MS / 1000
