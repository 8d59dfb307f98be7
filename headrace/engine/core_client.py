"""Connects a server to its engine core, which runs in a child process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from headrace.config import EngineConfig
from headrace.distributed.ranks import LOOPBACK
from headrace.engine.messages import Abort, AbortMany, Add, Command, CoreConfig, CoreFacts, Failed, Ready, Reply
from headrace.errors import EngineDeadError, HeadraceError, StepsFailError, rebuild
from headrace.process import Child, SocketFolder, spawn
from headrace.request import EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""How long a core may take to end after SIGTERM before it is killed."""
IDLE_SILENCE_SECONDS = 10.0
BUSY_SILENCE_SECONDS = 120.0
"""A core that sends nothing for longer counts as dead. While busy it gets more, as a step may take long on a slow
device."""
LAST_MESSAGE_SECONDS = 0.2
"""How long to wait for the last message of a core whose process has ended."""


class AsyncMPClient:
    """Runs the core in a child process that never outlives this one. To be used from one event loop. Sending never
    waits. `receive` raises EngineDeadError once the core has failed or died."""

    def __init__(
        self, config: EngineConfig, folder: Path, executor: str | None = None, name: str = "core", meeting: str = ""
    ) -> None:
        """Start the process, without waiting for it: `ready` does. `name`: how the log calls it. `meeting`: see
        CoreConfig."""
        self._loop = asyncio.get_running_loop()
        self._folder = SocketFolder()
        self._context = zmq.asyncio.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set(zmq.RCVHWM, 0)
        self._sender = zmq.Context(self._context).socket(zmq.PUSH)
        self._sender.set(zmq.SNDHWM, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._dead: HeadraceError | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._last_heard = time.monotonic()
        self._core_busy = False
        self._problem = ""
        requests, replies = (f"ipc://{self._folder.name}/{name}" for name in ("requests", "replies"))
        self._sender.bind(requests)
        self._receiver.bind(replies)
        core_config = CoreConfig(config, str(folder), requests, replies, executor, name, meeting)
        variables = {"NCCL_SOCKET_IFNAME": LOOPBACK} if meeting else {}
        self._child: Child = spawn("headrace.engine.core_process", self._encoder.encode(core_config), **variables)
        threading.Thread(target=self._watch, name="core-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.process.pid

    async def ready(self) -> CoreFacts:
        """Wait until the core can take requests. An error of the core's start is raised here, as its own class."""
        reply = await self._next()
        if isinstance(reply, Failed):
            what = f"the engine core could not start: {reply.error_class}: {reply.message}"
            dead = reply.error_class == EngineDeadError.__name__
            raise rebuild(reply.error_class, reply.message, EngineDeadError(what) if dead else HeadraceError(what))
        if not isinstance(reply, Ready):
            raise EngineDeadError(f"the engine core sent {type(reply).__name__} before it was ready")
        self._folder.remove()  # both ends are connected: nobody else can connect any more, and no file is left behind
        return reply.facts

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
        receiving: asyncio.Future[bytes] = self._receiver.recv(zmq.NOBLOCK)  # type: ignore[assignment]
        return self._outputs_in(self._decode(receiving.result()))

    def _outputs_in(self, reply: Reply) -> EngineCoreOutputs:
        if isinstance(reply, Failed):
            self._dead = EngineDeadError(f"the engine core failed: {reply.error_class}: {reply.message}")
            raise self._dead
        if isinstance(reply, Ready):
            raise EngineDeadError("the engine core started twice")
        self._core_busy = reply.busy
        self._problem = reply.outputs.stats.problem
        return reply.outputs

    def check_health(self, has_requests: bool) -> None:
        """Raise EngineDeadError if the core is dead or silent for too long, StepsFailError while its steps fail."""
        if self._dead is not None:
            raise self._dead
        if not self._child.is_alive():
            raise self._death()
        silence = time.monotonic() - self._last_heard
        allowed = BUSY_SILENCE_SECONDS if has_requests or self._core_busy else IDLE_SILENCE_SECONDS
        if silence > allowed:
            raise EngineDeadError(f"the engine core has been silent for {silence:.0f} s")
        if self._problem:
            raise StepsFailError(self._problem)

    def kill(self) -> None:
        """End the core's process at once; `receive` then says that it is dead."""
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
            self._receiver.close(linger=0)
            self._sender.close(linger=0)
            self._context.term()
            self._folder.remove()

    def _send(self, command: Command) -> None:
        if self._dead is not None:
            raise self._dead
        self._sender.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def _next(self) -> Reply:
        """Return the next message. Raises EngineDeadError if the process ends without one."""
        receiving: asyncio.Future[bytes] = self._receiver.recv()  # type: ignore[assignment]
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

    def _watch(self) -> None:
        """Wait for the process to end, in a thread of its own."""
        self._child.process.wait()
        try:
            self._loop.call_soon_threadsafe(self._ended.set_result, None)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("the engine core ended after the event loop")

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"the engine core died (exit code {self._child.process.poll()})")
