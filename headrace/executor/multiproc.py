"""Runs one process for each rank, driven over local sockets, or over the network where ranks are on other machines.

Every rank gets the same steps; one of the last pipeline stage answers. A rank that fails or dies takes its group with
it, since the others may be waiting for it inside a collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.distributed.network import interface_of
from headrace.distributed.progress import Progress, RankProgress, blame
from headrace.distributed.ranks import LOOPBACK
from headrace.environment import environment
from headrace.errors import EngineDeadError, HeadraceError, rebuild
from headrace.executor.messages import (
    AdapterRead,
    Command,
    Execute,
    Facts,
    InitializeCache,
    Load,
    Profile,
    RankConfig,
    ReadAdapter,
    Reply,
    Sample,
    StartRanks,
    StepDone,
    Stop,
)
from headrace.executor.nodes import Nodes
from headrace.lora import LoRARequest
from headrace.process import Child, SocketFolder, spawn
from headrace.step import Masks, RunnerOutput, SchedulerOutput, WorkerFacts

POLL_MS = 200
"""How often a waiting executor checks that all ranks are alive."""
STALL_SECONDS = 30.0
"""How long no rank may move while a step is under way, or SLOWEST times as long as the slowest step so far took."""
SLOWEST = 20
START_SECONDS = 300.0
"""How long no rank may move in a start, where one waits for others or all have met: between joining and their first
check of a kernel they read weights, however long that takes. Collectives themselves wait twice as long."""
ENDING_SECONDS = 1.0
"""How long a process may take to end whose connections are closed."""


def start_rank(config: RankConfig) -> Child:
    """Start the process of a rank."""
    network, named = LOOPBACK, "NCCL_SOCKET_IFNAME" in environment()
    if config.keys is not None and config.config.device == "cuda" and not named:
        network = f"={interface_of(config.address)}"
    variables = {
        "OMP_NUM_THREADS": str(config.config.cpu_threads or 1),
        "NCCL_SOCKET_IFNAME": network,
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # sums do without it, and not every machine lends it
    }
    return spawn("headrace.executor.rank", msgspec.msgpack.encode(config), variables)


class _Handle:
    def __init__(self, executor: MultiprocExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def done(self) -> bool:
        return self._executor.has_output(self._step)

    def result(self) -> RunnerOutput:
        return self._executor.wait_output(self._step)


class MultiprocExecutor:
    """Sends every rank the same commands; ranks answer with facts, and the first of the last stage alone with the
    results of steps."""

    def __init__(
        self, config: EngineConfig, folder: Path, rendezvous: str = "", given: EngineConfig | None = None
    ) -> None:
        """`rendezvous`: where the ranks of several engines meet; empty: these are all. `given`: the config as the user
        gave it, with which other machines must agree."""
        self._folder = folder
        self._rendezvous = rendezvous
        self._size = config.tensor_parallel_size * config.pipeline_parallel_size
        self._sockets = SocketFolder()
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._num_groups = 0
        self._nodes: Nodes | None = None
        """the other machines; None: there are none"""
        if config.nnodes > 1:
            store = f"ipc://{self._sockets.name}/store"
            try:
                self._nodes = Nodes(config, given or config, folder, self._context, store)
            except BaseException:
                self._context.destroy(linger=0)
                raise
        self._start(config)

    def _start(self, config: EngineConfig) -> None:
        """Start a group of ranks, each waiting for commands."""
        self._outputs: dict[int, RunnerOutput] = {}
        self._answers: list[Facts] = []
        self._read: list[str] = []
        """what ranks have said of the adapter that is read"""
        self._dead: str | None = None
        self._stuck = False
        self._num_groups += 1
        base = f"{self._sockets.name}/{self._num_groups}"
        self._replies, replies_port = self._bind(zmq.PULL, f"{base}-replies")
        self._progress = Progress(Path(f"{base}-progress"), self._size)
        self._under_way: dict[int, float] = {}
        """step -> time.monotonic() when it was sent"""
        self._starting = False
        """Facts are awaited."""
        self._slowest = 0.0
        """seconds"""
        self._looked = 0.0
        self._seen: tuple[list[RankProgress], float] = ([], 0.0)
        """how far the ranks had come when one of them was last seen to move, and when that was"""
        bound = [self._bind(zmq.PUSH, f"{base}-rank{rank}") for rank in range(self._size)]
        self._commands = [socket for socket, _ in bound]
        self._children: list[Child] = []
        for rank in range(config.ranks_per_node):
            rank_config = RankConfig(
                config, str(self._folder), rank, self._rendezvous or f"{base}-rendezvous", f"{base}-progress",
                f"ipc://{base}-rank{rank}", f"ipc://{base}-replies", group=self._num_groups,
            )  # fmt: skip
            if self._nodes is not None:
                rank_config = self._nodes.joined(rank_config)
            self._children.append(start_rank(rank_config))
        if self._nodes is not None:
            ports = {rank: port for rank, (_, port) in enumerate(bound)}
            self._nodes.begin(StartRanks(self._num_groups, config, ports, replies_port), self._progress)

    def _bind(self, kind: int, path: str) -> tuple[zmq.Socket[bytes], int]:
        """Return a new socket that is bound to a path, and the port at which other machines reach it, if there are
        any."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        if self._nodes is not None:
            return socket, self._nodes.bind(socket, f"ipc://{path}")
        socket.bind(f"ipc://{path}")
        return socket, 0

    def load(self) -> list[WorkerFacts]:
        return self._profiled(Load())

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        if not self._stuck:
            return self._profiled(Profile(config))
        for child in self._children:
            child.process.kill()
            child.stop(timeout=0.0)
        for socket in (self._replies, *self._commands):
            socket.close(linger=0)
        self._start(config)
        return self.load()

    def _profiled(self, command: Command) -> list[WorkerFacts]:
        """Return the facts of every rank, or those up to the first whose step did not fit: the others may now wait for
        it inside a collective for ever, so that this group can do no more."""
        facts = self._facts(command, stop_at_shortfall=True)
        self._stuck = any(each.shortfall for each in facts)
        return facts

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        facts = self._facts(InitializeCache(num_pages))
        self._sockets.remove()  # all are connected, and a path that is gone is not left behind by a killed process
        return facts

    def execute(self, step: SchedulerOutput) -> _Handle:
        self._send(Execute(step))
        self._under_way[step.step] = time.monotonic()
        return _Handle(self, step.step)

    def sample(self, masks: Masks) -> None:
        self._send(Sample(masks))

    def read_adapter(self, request: LoRARequest, dropped: Sequence[int]) -> None:
        self._read = []
        self._send(ReadAdapter(request, [*dropped]))

    def adapter_error(self) -> str | None:
        while len(self._read) < self._size:
            if not self._receive(timeout_ms=0):
                return None
        return next(filter(None, self._read), "")

    def check(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._receive(timeout_ms=0)

    def shutdown(self) -> None:
        if self._nodes is not None:
            self._nodes.end(self._dead or "")
            self._nodes.close()
        elif self._dead is None:
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
            while True:
                try:
                    socket.send(message, zmq.NOBLOCK)
                    break
                except zmq.Again:  # the rank has not connected yet
                    if not socket.poll(POLL_MS, zmq.POLLOUT):
                        self._check_ranks()

    def _facts(self, command: Command, stop_at_shortfall: bool = False) -> list[WorkerFacts]:
        """Send a command and wait for the facts of every rank, or until one reports a shortfall; return them in the
        order of ranks."""
        self._answers, self._starting, self._seen = [], True, ([], time.monotonic())
        self._send(command)
        while len(self._answers) < self._size:
            self._receive(timeout_ms=POLL_MS)
            if stop_at_shortfall and any(answer.facts.shortfall for answer in self._answers):
                break
        self._starting = False
        return [answer.facts for answer in sorted(self._answers, key=lambda answer: answer.rank)]

    def _receive(self, timeout_ms: int) -> bool:
        """Take in one reply; return whether one came in time. Raises when the group has failed."""
        if not self._replies.poll(timeout_ms):
            self._check_ranks()
            return False
        reply = self._decoder.decode(self._replies.recv())
        if isinstance(reply, StepDone):
            self._outputs[reply.output.step] = reply.output
            if (sent := self._under_way.pop(reply.output.step, None)) is not None:
                self._slowest = max(self._slowest, time.monotonic() - sent)
        elif isinstance(reply, Facts):
            self._answers.append(reply)
        elif isinstance(reply, AdapterRead):
            self._read.append(reply.error)
        else:
            other = EngineDeadError(f"rank {reply.rank} failed: {reply.error_class}: {reply.message}")
            error = rebuild(reply.error_class, reply.message, other)
            raise self._fail(self._killed_rank() or error if error is other else error)
        return True

    def _check_ranks(self) -> None:
        """Raise EngineDeadError if a rank is gone, or none moves."""
        if (dead := self._dead_rank()) is not None:
            raise self._fail(dead)
        self._check_that_ranks_move()

    def _killed_rank(self) -> EngineDeadError | None:
        """Return the error for a rank that a signal has ended, of which another has only heard that nobody answers;
        None: there is none. The system closes connections a little before it tells that a process has ended."""
        until = time.monotonic() + ENDING_SECONDS
        while (dead := self._dead_rank(killed=True)) is None and time.monotonic() < until:
            time.sleep(0.01)
        return dead

    def _dead_rank(self, killed: bool = False) -> EngineDeadError | None:
        """Return the error for a rank whose process has ended, or of those `killed` by a signal; None: there is
        none."""
        for rank, child in enumerate(self._children):
            if not child.is_alive() and (child.process.returncode < 0 or not killed):
                return EngineDeadError(f"rank {rank} died (exit code {child.process.returncode})")
        if self._nodes is not None:
            self._nodes.look()
            if problem := self._nodes.problem(killed):
                return EngineDeadError(problem)
        return None

    def _check_that_ranks_move(self) -> None:
        """Raise EngineDeadError, naming the rank that the others wait for, if a step or a start is under way and none
        has moved for long."""
        now = time.monotonic()
        if now - self._looked < POLL_MS / 1000:
            return
        self._looked = now
        ranks = self._progress.read()
        if self._starting:
            watched, most = any(one.waits or one.entered > 1 for one in ranks), START_SECONDS
        else:
            watched, most = bool(self._under_way), max(STALL_SECONDS, SLOWEST * self._slowest)
        if not watched:
            self._seen = [], now
            return
        before, since = self._seen
        if ranks != before:
            self._seen = ranks, now
        elif now - since > most:
            raise self._fail(EngineDeadError(f"no rank has moved for {now - since:.0f} s: {blame(ranks)}"))

    def _fail(self, error: HeadraceError) -> HeadraceError:
        """Kill the group; return `error` for the caller to raise."""
        self._dead = str(error)
        for child in self._children:
            child.process.kill()
        if self._nodes is not None:
            self._nodes.end(self._dead)
        return error
