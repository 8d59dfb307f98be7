"""Runs the further HTTP processes of a server (`--api-server-count`): the first one starts, watches and ends them.

All listen on one socket, which the first one has bound and the others inherit, and each has sockets of its own to every
engine core. One that dies ends the server, as in vLLM: a supervisor should start it again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from functools import partial

import msgspec

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.messages import Join
from headrace.errors import HeadraceError
from headrace.planner.record import Decision
from headrace.process import Child, SocketFolder, call_after, spawn
from headrace.server.relay import AnswerEndedError, samples_of

POLL_SECONDS = 0.02
"""How often a process that starts is asked whether it serves."""


class HttpProcessConfig(msgspec.Struct, frozen=True):
    """Holds what a further HTTP process reads from its inherited file descriptor when it starts."""

    number: int
    """from 1; the first process is 0"""
    config: EngineConfig
    server_config: ServerConfig
    folder: str
    """the model's"""
    cores: Mapping[int, Join]
    """addresses of this process's sockets for each core, by rank"""
    listener: int
    """file descriptor of the socket on which all listen"""
    shares: int
    """file descriptor for http_server.Shares"""
    inside: str
    """where this process answers the first one"""
    first: str
    """where the first one answers this process"""
    created: int
    """when the server started, in seconds since 1970"""
    decision: Decision
    """why there are so many"""


class HttpProcesses:
    """Holds the processes beside the first one, which is this."""

    def __init__(
        self, engine: AsyncEngine, config: EngineConfig, server_config: ServerConfig, listener: socket.socket,
        decision: Decision,
    ) -> None:  # fmt: skip
        """Start `decision.value` - 1 processes, without waiting for them: `ready` does."""
        self._folder = SocketFolder()
        self.created = int(time.time())
        self.shares = os.memfd_create("headrace-connections")
        """File descriptor for http_server.Shares."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Says which process has ended, once one has."""
        self.first = f"{self._folder.name}/http0"
        self.further = [f"{self._folder.name}/http{number}" for number in range(1, decision.value)]
        self._children: list[Child] = []
        os.ftruncate(self.shares, 4 * decision.value)
        for number, inside in enumerate(self.further, 1):
            place = f"ipc://{self._folder.name}/{number}"
            cores = {rank: Join(f"{place}-requests{rank}", f"{place}-replies{rank}") for rank in config.engine_ranks}
            engine.replicas.join(cores)
            given = HttpProcessConfig(
                number, config, server_config, str(engine.folder), cores, listener.fileno(), self.shares, inside,
                self.first, self.created, decision,
            )  # fmt: skip
            descriptors = (listener.fileno(), self.shares)
            child = spawn("headrace.server.http_process", msgspec.msgpack.encode(given), descriptors=descriptors)
            self._children.append(child)
            call_after(child.process.wait, asyncio.get_running_loop(), partial(self._note_end, number))

    async def ready(self) -> None:
        """Wait until all serve. Raises HeadraceError if one ends."""
        for path in self.further:
            while not self.ended.done():
                try:
                    await samples_of(path)
                    break
                except (OSError, AnswerEndedError):  # it does not listen yet, or has ended
                    await asyncio.sleep(POLL_SECONDS)
        if self.ended.done():
            raise HeadraceError(self.ended.result())

    def terminate(self) -> None:
        """Tell all to stop; open requests have --shutdown-timeout to finish, as here."""
        for child in self._children:
            child.process.terminate()

    async def stop(self, seconds: float) -> None:
        """Wait until all have ended, and kill those that take longer than `seconds`."""
        await asyncio.gather(*(asyncio.to_thread(child.end_within, seconds) for child in self._children))
        self._folder.remove()
        os.close(self.shares)

    def _note_end(self, number: int) -> None:
        if not self.ended.done():
            code, count = self._children[number - 1].process.poll(), len(self._children) + 1
            self.ended.set_result(f"HTTP process {number} of {count} died (exit code {code}), so the server ends")
