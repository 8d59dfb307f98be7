"""Connects a front end to engines on other machines, each of which runs some of them as `headrace serve --headless`.

A machine says which engines it has room for, and is told to start their cores (engine/node.py). These talk to the front
end as cores of its own machine do, over TCP in place of local sockets. A machine that is gone takes its engines alone
with it; once it comes again, so do they.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import zmq

from headrace.config import EngineConfig
from headrace.distributed.network import endpoint
from headrace.engine.core_client import CoreLink
from headrace.errors import EngineDeadError
from headrace.executor.messages import Beat, EndRanks, Join, RankEnded, StartCore
from headrace.executor.nodes import JOIN_SECONDS, LOOK_SECONDS, Listener, Node

logger = logging.getLogger(__name__)


class Machines:
    """Waits for other machines, and starts and ends cores there. To be used from one event loop."""

    def __init__(self, given: EngineConfig, config: EngineConfig, folder: Path) -> None:
        """Listen at data_parallel_address. `given`: the config that other machines must agree with; `config`: that of
        the engines. Raises what Listener raises."""
        self._config = config
        self._context = zmq.Context()
        try:
            self._listener = Listener(
                given, folder, self._context, "data_parallel_address", "data_parallel_rpc_port", self._place,
                self._there, self._told,
            )  # fmt: skip
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.keys, self.host = self._listener.keys, self._listener.host
        self._cores: dict[int, RemoteCore] = {}
        self._task = asyncio.create_task(self._watch(), name="machines")

    def start(self, core: RemoteCore) -> None:
        """Let a core run on the machine that has room for it, as soon as that is there."""
        self._cores[core.rank] = core
        if (node := self._node_of(core.rank)) is not None:
            self._start(node, core)

    def _start(self, node: Node, core: RemoteCore) -> None:
        core.node, core.since = node, None
        config = self._config.for_engine(core.rank, len(node.ranks))
        self._listener.send(node, StartCore(core.group, core.rank, config, *core.ports))

    def end(self, core: RemoteCore) -> None:
        """End a core, without waiting for it."""
        if core.node is not None:
            self._listener.send(core.node, EndRanks(rank=core.rank))
        core.note_end("the engine core was ended")

    def _node_of(self, rank: int) -> Node | None:
        return next((node for node in self._listener.nodes if rank in node.ranks and not node.lost), None)

    def _place(self, join: Join) -> Node | str:
        ranks, elsewhere = range(join.node, join.node + join.engines), self._config.remote_engines
        if not join.engines or ranks.start not in elsewhere or ranks[-1] not in elsewhere:
            return f"other machines run {engines_in_words(elsewhere)}, and it has {join.engines} from {join.node} on"
        for rank in ranks:
            if (other := self._node_of(rank)) is not None:
                return f"engine {rank} runs on {other}"
        node = Node(f"the machine of {engines_in_words(ranks)}", ranks)
        self._listener.nodes.append(node)
        return node

    def _there(self, node: Node) -> None:
        for rank in node.ranks:
            if (core := self._cores.get(rank)) is not None and core.node is None:
                self._start(node, core)

    def _told(self, node: Node, message: Beat | RankEnded) -> None:
        if isinstance(message, Beat):
            return
        core = self._cores.get(message.rank)
        if core is not None and core.group == message.group:
            core.note_end(f"the engine core on {node} died (exit code {message.exit_code})")

    async def _watch(self) -> None:
        """Notice what becomes of machines, and which do not come."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        self._listener.look()
        awaited = [str(rank) for rank, core in self._cores.items() if core.node is None]
        self._listener.say_missing(f"a machine with engine {', '.join(awaited)}" if awaited else "")
        lost = [node for node in self._listener.nodes if node.lost or not node.identity]
        for core in self._cores.values():
            if core.node in lost:
                core.note_end(f"{core.node} is gone: {core.node.lost}")
            elif core.since is not None and (waited := time.monotonic() - core.since) > JOIN_SECONDS:
                core.note_end(
                    self._listener.strangers_too(f"no machine with engine {core.rank} came in {waited:.0f} s")
                )
        for node in lost:
            self._listener.send(node, EndRanks(f"this machine was taken for gone, since {node.lost}"))
            self._listener.nodes.remove(node)

    async def close(self) -> None:
        """End all cores, and the connections."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._context.closed:
            for node in self._listener.nodes:
                self._listener.send(node, EndRanks())
            self._listener.close()
            await asyncio.to_thread(self._context.term)


def engines_in_words(ranks: range) -> str:
    return f"engines {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"engine {ranks[0]}"


class RemoteCore(CoreLink):
    """Runs a core on another machine."""

    _groups = 0

    def __init__(self, machines: Machines, rank: int) -> None:
        """Let it start, without waiting for it: `ready` does."""
        at = endpoint(machines.host, "*")
        super().__init__(at, at, machines.keys)
        RemoteCore._groups += 1
        self.rank, self.group = rank, RemoteCore._groups
        self.node: Node | None = None
        """where it runs"""
        self.since: float | None = time.monotonic()
        """when a machine for it was first awaited; None: it is there"""
        self._why = ""
        """how it has ended"""
        self._machines = machines
        machines.start(self)

    async def again(self) -> CoreLink:
        await self.shutdown()
        return RemoteCore(self._machines, self.rank)

    def kill(self) -> None:
        self._machines.end(self)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """End the core, without waiting for it."""
        if not self._context.closed:
            self.kill()
            await super().shutdown()

    def note_end(self, why: str) -> None:
        """Take note of what has ended the core."""
        self._why = self._why or why
        if not self._ended.done():
            self._ended.set_result(None)

    def _is_alive(self) -> bool:
        return not self._why

    def _death(self) -> EngineDeadError:
        return EngineDeadError(self._why)
