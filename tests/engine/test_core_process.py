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
from headrace.engine.messages import AbortMany, Stepped
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


class Outbox:
    last_sent = 0.0

    def __init__(self) -> None:
        self.sent = 0

    def send(self, reply: Stepped) -> None:
        self.sent += 1
        self.last_sent = time.monotonic()


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.bind("inproc://requests")
    sender.connect("inproc://requests")
    yield receiver, sender
    context.destroy(linger=0)


def run(core: QuietCore, receiver: zmq.Socket[bytes]) -> tuple[list[str], list[float], Outbox]:
    """(what the loop did, seconds since its start of each, its outbox)"""
    outbox, start = Outbox(), time.monotonic()
    core_process._loop(core, receiver, outbox, core.stop)  # type: ignore[arg-type]
    return [name for name, _ in core.log], [at - start for _, at in core.log], outbox


def test_a_quiet_loop_warms_up_one_step_after_the_other(sockets: Any) -> None:
    did, at, outbox = run(QuietCore(20), sockets[0])
    assert did == ["warm-up"] * 20
    quiet = core_process.QUIET_MS / 1000
    assert at[0] >= quiet
    assert at[-1] - at[0] < 19 * quiet, "there is nothing to wait for between them"
    assert outbox.sent >= 1, "it still shows itself"


def test_somebody_who_comes_is_first_and_quiet_is_waited_for_anew(sockets: Any) -> None:
    receiver, sender = sockets
    command = msgspec.msgpack.encode(AbortMany([]))
    core = QuietCore(4, on_step=lambda left: sender.send(command) if left == 2 else None)
    did, at, _ = run(core, receiver)
    assert did == ["warm-up", "warm-up", "command", "warm-up", "warm-up"]
    assert at[3] - at[2] >= core_process.QUIET_MS / 1000
