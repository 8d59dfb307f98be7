"""Connects a front end to an engine core, which runs in a child process of it, or of the front end that came first."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.distributed.network import Keys, port_of
from headrace.distributed.ranks import LOOPBACK
from headrace.engine.messages import Abort, AbortMany, Add, Command, CoreConfig, CoreFacts, Failed, Join, Ready, Reply
from headrace.errors import EngineDeadError, HeadraceError, StepsFailError, rebuild
from headrace.process import Child, SocketFolder, call_after, spawn
from headrace.request import EngineCoreOutputs, EngineCoreRequest

STOP_SECONDS = 3.0
"""How long a core may take to end after SIGTERM before it is killed."""
IDLE_SILENCE_SECONDS = 10.0
BUSY_SILENCE_SECONDS = 120.0
"""A core that sends nothing for longer counts as dead. While busy it gets more, as a step may take long on a slow
device."""
LAST_MESSAGE_SECONDS = 0.2
"""How long to wait for the last message of a core whose process has ended."""


POLL_SECONDS = 0.1
"""How often a further front end looks whether a core still runs."""


class CoreLink(ABC):
    """Holds the two sockets between a front end and a core, whoever has started that. To be used from one event loop.
    Sending never waits. `receive` raises EngineDeadError once the core has failed or died."""

    def __init__(self, requests: str, replies: str, keys: Keys | None = None) -> None:
        """`requests`, `replies`: addresses for the sockets, to which the core will connect. `keys`: those of all
        machines, if that is on another one."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set(zmq.RCVHWM, 0)
        self._sender = zmq.Context(self._context).socket(zmq.PUSH)
        self._sender.set(zmq.SNDHWM, 0)
        bound: tuple[tuple[Any, str], ...] = ((self._sender, requests), (self._receiver, replies))
        for socket, address in bound:
            if keys is None:
                socket.bind(address)
            else:
                keys.bind(socket, address)
        self.ports = port_of(bound[0][0]), port_of(bound[1][0])
        """at which another machine reaches them"""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._begin()

    def _begin(self) -> None:
        """Know nothing of a core yet."""
        self._dead: HeadraceError | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._last_heard = time.monotonic()
        self._core_busy = False
        self._problem = ""

    async def ready(self) -> CoreFacts:
        """Wait until the core can take requests. An error of the core's start is raised here, as its own class."""
        reply = await self._next()
        if isinstance(reply, Failed):
            what = f"the engine core could not start: {reply.error_class}: {reply.message}"
            dead = reply.error_class == EngineDeadError.__name__
            raise rebuild(reply.error_class, reply.message, EngineDeadError(what) if dead else HeadraceError(what))
        if not isinstance(reply, Ready):
            raise EngineDeadError(f"the engine core sent {type(reply).__name__} before it was ready")
        return reply.facts

    @abstractmethod
    async def again(self) -> CoreLink:
        """Return a link to the core that takes the place of this one, which has died; it need not be ready."""

    @abstractmethod
    def kill(self) -> None:
        """End the core's process at once; `receive` then says that it is dead."""

    @abstractmethod
    def _is_alive(self) -> bool: ...

    @abstractmethod
    def _death(self) -> EngineDeadError: ...

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Send the choices of one request, which share their prompt."""
        self._send(Add.of(requests))

    def abort(self, aborts: list[Abort]) -> None:
        self._send(AbortMany(aborts))

    async def receive(self) -> EngineCoreOutputs:
        """Return the outputs of the next message; a heartbeat has none."""
        if self._dead is not None:
            raise self._dead
        try:
            reply = await self._next()
        except EngineDeadError as error:
            self._dead = error
            raise
        return self._outputs_in(reply)

    def receive_waiting(self) -> EngineCoreOutputs | None:
        """Return the outputs of a message that has arrived already, or None. Raises what `receive` raises."""
        if self._dead is not None:
            raise self._dead
        if not int(self._receiver.get(zmq.EVENTS)) & zmq.POLLIN:  # zmq.Again and its future would hold each other
            return None
        receiving: asyncio.Future[bytes] = self._receiver.recv(zmq.NOBLOCK)  # pyrefly: ignore[bad-assignment]
        return self._outputs_in(self._decode(receiving.result()))

    def _outputs_in(self, reply: Reply) -> EngineCoreOutputs:
        if isinstance(reply, Failed):
            self._dead = EngineDeadError(f"the engine core failed: {reply.error_class}: {reply.message}")
            raise self._dead
        if isinstance(reply, Ready):
            raise self._started_again(reply)
        self._core_busy = reply.busy
        self._problem = reply.outputs.stats.problem
        return reply.outputs

    def check_health(self, has_requests: bool) -> None:
        """Raise EngineDeadError if the core is dead or silent for too long, StepsFailError while its steps fail."""
        if self._dead is not None:
            raise self._dead
        if not self._is_alive():
            raise self._death()
        silence = time.monotonic() - self._last_heard
        allowed = BUSY_SILENCE_SECONDS if has_requests or self._core_busy else IDLE_SILENCE_SECONDS
        if silence > allowed:
            raise EngineDeadError(f"the engine core has been silent for {silence:.0f} s")
        if self._problem:
            raise StepsFailError(self._problem)

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """Close the sockets."""
        if not self._context.closed:
            self._dead = self._dead or EngineDeadError("the engine is shut down")
            self._receiver.close(linger=0)
            self._sender.close(linger=0)
            self._context.term()

    def _started_again(self, ready: Ready) -> EngineDeadError:
        """Return the error for a core that says for the second time that it has started."""
        return EngineDeadError("the engine core started twice")

    def _send(self, command: Command) -> None:
        if self._dead is not None:
            raise self._dead
        with contextlib.suppress(zmq.Again):  # the core has just died: its requests are seen to when that is noticed
            self._sender.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def _next(self) -> Reply:
        """Return the next message. Raises EngineDeadError if the process ends without one."""
        receiving: asyncio.Future[bytes] = self._receiver.recv()  # pyrefly: ignore[bad-assignment]
        if not receiving.done():
            await asyncio.wait((receiving, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():  # the process has ended; its last message may still be on its way
                await asyncio.wait((receiving,), timeout=LAST_MESSAGE_SECONDS)
            if not receiving.done():
                receiving.cancel()
                raise self._death()
        return self._decode(receiving.result())

    def _decode(self, message: bytes) -> Reply:
        self._last_heard = time.monotonic()
        return self._decoder.decode(message)

    def _watch(self, wait: Callable[[], object]) -> None:
        """Note when the core's process ends, for which `wait` waits in a thread of its own."""
        ended = self._ended

        def note() -> None:
            if not ended.done():
                ended.set_result(None)

        call_after(wait, self._loop, note)


class AsyncMPClient(CoreLink):
    """Runs the core in a child process that never outlives this one."""

    def __init__(
        self, config: EngineConfig, folder: Path, executor: str | None = None, name: str = "core", meeting: str = ""
    ) -> None:
        """Start the process, without waiting for it: `ready` does. `name`: how the log calls it. `meeting`: see
        CoreConfig."""
        self._given = (config, folder, executor, name, meeting)
        self._folder = SocketFolder()
        self._others: list[Join] = []
        """The core's further front ends."""
        requests, replies = (f"ipc://{self._folder.name}/{name}" for name in ("requests", "replies"))
        super().__init__(requests, replies)
        core_config = CoreConfig(config, str(folder), requests, replies, executor, name, meeting)
        variables = {"NCCL_SOCKET_IFNAME": LOOPBACK} if meeting else {}
        self._child: Child = spawn("headrace.engine.core_process", self._encoder.encode(core_config), variables)
        self._watch(self._child.process.wait)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    async def ready(self) -> CoreFacts:
        facts = await super().ready()
        self._folder.remove()  # both ends are connected: nobody else can connect any more, and no file is left behind
        for other in self._others:
            self._send(other)
        return facts

    def join(self, front_end: Join) -> None:
        """Tell the core of a further front end, and so each core that takes its place."""
        self._others.append(front_end)
        if self._dead is None:
            self._send(front_end)

    async def again(self) -> CoreLink:
        await self.shutdown(timeout=0.0)
        new = AsyncMPClient(*self._given)
        new._others = self._others
        return new

    def kill(self) -> None:
        self._child.process.kill()

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """End the core's process with SIGTERM, after `timeout` seconds with SIGKILL; return when it is gone."""
        if self._context.closed:
            return
        self._dead = self._dead or EngineDeadError("the engine is shut down")
        try:
            await asyncio.shield(asyncio.to_thread(self._child.stop, timeout))
        except asyncio.CancelledError:
            self._child.process.kill()
            raise
        finally:
            await super().shutdown()
            self._folder.remove()

    def _is_alive(self) -> bool:
        return self._child.is_alive()

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"the engine core died (exit code {self._child.process.poll()})")


class JoinedCore(CoreLink):
    """Shares a core with the front end that has started it, which also starts it again and ends it. A new core connects
    to the same sockets."""

    def __init__(self, sockets: Join) -> None:
        """`sockets`: the addresses that the core is told."""
        super().__init__(sockets.requests, sockets.replies)
        self._pid = 0
        self._ready: Ready | None = None
        """What the core's successor has said, if it came before the death was noticed."""

    async def ready(self) -> CoreFacts:
        while self._ready is None:
            receiving: asyncio.Future[bytes] = self._receiver.recv()  # pyrefly: ignore[bad-assignment]
            reply = self._decode(await receiving)
            self._ready = reply if isinstance(reply, Ready) else None  # others are the last messages of a dead core
        ready, self._ready = self._ready, None
        self._pid = ready.pid
        self._watch(lambda: self._wait(ready.pid))
        return ready.facts

    async def again(self) -> CoreLink:
        self._begin()
        return self

    def kill(self) -> None:
        """Leave it to the first front end, which sees the same."""

    def _is_alive(self) -> bool:
        return _runs(self._pid)

    def _death(self) -> EngineDeadError:
        return EngineDeadError("the engine core died")

    def _started_again(self, ready: Ready) -> EngineDeadError:
        self._ready = ready
        return self._death()

    def _wait(self, pid: int) -> None:
        while _runs(pid) and not self._context.closed:
            time.sleep(POLL_SECONDS)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
