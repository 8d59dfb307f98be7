"""One process a rank on this machine, driven over local sockets.

Every rank gets the same steps; rank 0 answers. A rank that fails or dies takes its group with it, since the others may
be waiting for it inside a collective.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
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
    Profile,
    RankConfig,
    Reply,
    StepDone,
    Stop,
)
from headrace.process import Child, SocketFolder, spawn
from headrace.step import RunnerOutput, SchedulerOutput, WorkerFacts

R = TypeVar("R", Loaded, CacheReady)

LOOPBACK = "lo"
"""Where NCCL's ranks meet: it would listen on a network that others can reach."""
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
        self._folder = folder
        self._size = config.tensor_parallel_size
        self._sockets = SocketFolder()
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._num_groups = 0
        self._start(config)

    def _start(self, config: EngineConfig) -> None:
        """A group of ranks, each waiting for commands."""
        self._outputs: dict[int, RunnerOutput] = {}
        self._notices: collections.deque[Reply] = collections.deque()
        self._dead: str | None = None
        self._stuck = False
        self._num_groups += 1
        base = f"{self._sockets.name}/{self._num_groups}"
        replies = f"ipc://{base}-replies"
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(replies)
        self._commands: list[zmq.Socket[bytes]] = []
        self._children: list[Child] = []
        environment = {"OMP_NUM_THREADS": str(config.cpu_threads or 1), "NCCL_SOCKET_IFNAME": LOOPBACK}
        for rank in range(self._size):
            address = f"ipc://{base}-rank{rank}"
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.bind(address)
            self._commands.append(socket)
            rank_config = RankConfig(config, str(self._folder), rank, f"{base}-rendezvous", address, replies)
            self._children.append(spawn("headrace.executor.rank", self._encoder.encode(rank_config), **environment))

    def load(self) -> list[WorkerFacts]:
        self._send(Load())
        return self._facts()

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        if not self._stuck:
            self._send(Profile(config))
            return self._facts()
        for child in self._children:
            child.process.kill()
            child.stop(timeout=0.0)
        for socket in (self._replies, *self._commands):
            socket.close(linger=0)
        self._start(config)
        return self.load()

    def _facts(self) -> list[WorkerFacts]:
        """Of every rank; or of the first one whose step did not fit: others may now wait for it inside a collective for
        ever, so that this group can do no more."""
        replies = self._gather(Loaded, until=lambda reply: bool(reply.facts.shortfall))
        self._stuck = any(reply.facts.shortfall for reply in replies)
        return [reply.facts for reply in sorted(replies, key=lambda reply: reply.rank)]

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        self._send(InitializeCache(num_pages))
        replies = self._gather(CacheReady)
        self._sockets.remove()  # all are connected, and a path that is gone is not left behind by a killed process
        return [reply.facts for reply in sorted(replies, key=lambda reply: reply.rank)]

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
        self._sockets.remove()

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

    def _gather(self, kind: type[R], until: Callable[[R], bool] = lambda reply: False) -> list[R]:
        """One reply of `kind` from every rank, or those that came up to one that `until` is true of."""
        found: list[R] = []
        while len(found) < self._size:
            self._receive(timeout_ms=POLL_MS)
            while self._notices:
                notice = self._notices.popleft()
                if isinstance(notice, kind):
                    found.append(notice)
                    if until(notice):
                        return found
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
