"""One process a rank on this machine, driven over local sockets.

Every rank gets the same steps; rank 0 answers. A rank that fails or dies takes its group with it, since the others may
be waiting for it inside a collective.
"""

from __future__ import annotations

import collections
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.errors import EngineDeadError, HeadraceError, rebuild
from headrace.executor.messages import (
    CacheReady,
    Command,
    Execute,
    Failed,
    InitializeCache,
    Load,
    Loaded,
    RankConfig,
    Reply,
    StepDone,
    Stop,
)
from headrace.process import Child, spawn
from headrace.step import RunnerOutput, SchedulerOutput, WorkerFacts

R = TypeVar("R", Loaded, CacheReady)

POLL_MS = 200
"""How often a wait looks whether all ranks still live."""


class _Handle:
    def __init__(self, executor: MultiprocExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def done(self) -> bool:
        return self._executor.has_output(self._step)

    def result(self) -> RunnerOutput:
        return self._executor.wait_output(self._step)


class MultiprocExecutor:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._size = config.tensor_parallel_size
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-")  # mode 0700: nobody else can connect
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._outputs: dict[int, RunnerOutput] = {}
        self._notices: collections.deque[Reply] = collections.deque()
        self._dead: str | None = None
        base = self._directory.name
        replies = f"ipc://{base}/replies"
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(replies)
        self._commands: list[zmq.Socket[bytes]] = []
        self._children: list[Child] = []
        threads = str(config.cpu_threads or 1)
        for rank in range(self._size):
            address = f"ipc://{base}/rank{rank}"
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.bind(address)
            self._commands.append(socket)
            rank_config = RankConfig(config, str(folder), rank, f"file://{base}/rendezvous", address, replies)
            self._children.append(
                spawn("headrace.executor.rank", self._encoder.encode(rank_config), OMP_NUM_THREADS=threads)
            )

    def load(self) -> list[WorkerFacts]:
        self._send(Load())
        facts = {reply.rank: reply.facts for reply in self._gather(Loaded)}
        return [facts[rank] for rank in range(self._size)]

    def initialize_cache(self, num_blocks: int) -> None:
        self._send(InitializeCache(num_blocks))
        self._gather(CacheReady)
        self._directory.cleanup()  # all are connected, and a path that is gone is not left behind by a killed process

    def execute(self, step: SchedulerOutput) -> _Handle:
        self._send(Execute(step))
        return _Handle(self, step.step)

    def check(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._receive(timeout_ms=0)

    def shutdown(self) -> None:
        if self._dead is None:
            self._send(Stop())
        for child in self._children:
            child.stop(timeout=2.0)
        self._context.destroy(linger=0)
        self._directory.cleanup()

    def has_output(self, step: int) -> bool:
        while step not in self._outputs and self._receive(timeout_ms=0):
            pass
        return step in self._outputs

    def wait_output(self, step: int) -> RunnerOutput:
        while step not in self._outputs:
            self._receive(timeout_ms=POLL_MS)
        return self._outputs.pop(step)

    def _send(self, command: Command) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        message = self._encoder.encode(command)
        for socket in self._commands:
            socket.send(message)

    def _gather(self, kind: type[R]) -> list[R]:
        """One reply of `kind` from every rank."""
        found: list[R] = []
        while len(found) < self._size:
            self._receive(timeout_ms=POLL_MS)
            while self._notices:
                notice = self._notices.popleft()
                if isinstance(notice, kind):
                    found.append(notice)
        return found

    def _receive(self, timeout_ms: int) -> bool:
        """Take in one reply if one comes in time; raises when the group has failed."""
        if not self._replies.poll(timeout_ms):
            for rank, child in enumerate(self._children):
                if not child.is_alive():
                    raise self._fail(EngineDeadError(f"rank {rank} died (exit code {child.process.returncode})"))
            return False
        reply = self._decoder.decode(self._replies.recv())
        if isinstance(reply, StepDone):
            self._outputs[reply.output.step] = reply.output
        elif isinstance(reply, Failed):
            raise self._fail(rebuild(reply.error_class, reply.message, EngineDeadError(_what_failed(reply))))
        else:
            self._notices.append(reply)
        return True

    def _fail(self, error: HeadraceError) -> HeadraceError:
        self._dead = str(error)
        for child in self._children:
            child.process.kill()
        return error


def _what_failed(reply: Failed) -> str:
    return f"rank {reply.rank} failed: {reply.error_class}: {reply.message}"
