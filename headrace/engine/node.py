"""Runs the ranks of one of several machines, or its engines: what `headrace serve --headless` is.

It joins the first machine's executor, starts the ranks that this asks for, and says when one has ended; or its front
end, and the cores of engines. These themselves talk to the executor or front end. They end when the connection does,
and with them this process, but where the executor has said that there may be another.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.config import EngineConfig
from headrace.distributed.network import Keys, data_address, endpoint, read_keys, resolve
from headrace.distributed.progress import Progress
from headrace.engine.async_engine import model_folder
from headrace.engine.build import with_local_draft
from headrace.engine.messages import CoreConfig
from headrace.environment import node_network, node_secret
from headrace.errors import ConfigError, EngineDeadError
from headrace.executor.messages import (
    Beat,
    EndRanks,
    Join,
    NodeCommand,
    NodeReply,
    RankConfig,
    RankEnded,
    Refuse,
    StartCore,
    StartRanks,
)
from headrace.executor.multiproc import start_rank
from headrace.executor.nodes import JOIN_SECONDS, must_be_alike, settings_given
from headrace.models.served import read_served_config
from headrace.process import Child, SocketFolder, configure_logging, spawn

logger = logging.getLogger(__name__)

POLL_MS = 50
"""How often ranks are looked at."""
BEAT_SECONDS = 0.5
RECONNECT_MS = 200
REFUSALS = 5
"""After so many handshakes that failed one after the other, the secrets differ; one may fail for other reasons."""
NEXT_SECONDS = 10.0
"""How long to wait for another executor after one has ended as it should."""


def run_node(config: EngineConfig) -> int:
    """Run ranks until the first machine's engine ends, or a signal comes; return the exit code. Raises UserError for
    what the user can mend, EngineDeadError if the engine has failed."""
    name = f"node {config.node_rank}" if config.node_rank else f"engines from {config.data_parallel_start_rank} on"
    configure_logging(config.log_level, f"[{name}] ")
    keys = read_keys(node_secret(), config.secret_file)
    folder = model_folder(config)
    read_served_config(folder, config)
    node = _Node(config, folder, keys)
    try:
        node.run()
        logger.info("node 0 has stopped")
    except KeyboardInterrupt:
        logger.info("stopped")
    finally:
        node.close()
    return 0


class _Node:
    def __init__(self, config: EngineConfig, folder: Path, keys: Keys) -> None:
        self._folder, self._keys = folder, keys
        self._draft = with_local_draft(config).speculative_config.get("model")
        """where this machine has the model that guesses tokens"""
        alike, given, own = must_be_alike(folder), settings_given(config), config.engine_ranks
        if config.node_rank:
            self._master, port = resolve("master_addr", config.master_addr or ""), config.master_port
            self._join = Join(config.node_rank, alike, given)
        else:
            self._master = resolve("data_parallel_address", config.data_parallel_address or "")
            port = config.data_parallel_rpc_port
            self._join = Join(own.start, alike, given, len(own))
        self._address = data_address(*node_network(), self._master)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(NodeCommand)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 500), (zmq.RECONNECT_IVL, RECONNECT_MS)):
            self._socket.setsockopt(option, value)
        self._events = self._socket.get_monitor_socket()
        self._endpoint = endpoint(self._master, port)
        keys.connect(self._socket, self._endpoint)
        self._connected = self._joined = False
        self._refusals = 0
        self._since = time.monotonic()
        """when the connection was last lost"""
        self._next = True
        """another executor may come"""
        self._order: StartRanks | None = None
        self._children: dict[int, tuple[int, Child]] = {}
        """rank or engine -> the group as which it was asked for, and its process"""
        self._sockets: SocketFolder | None = None
        self._beaten = 0.0

    def run(self) -> None:
        """Do as the executor says until it ends."""
        poller = zmq.Poller()
        for socket in (self._socket, self._events):
            poller.register(socket, zmq.POLLIN)
        logger.info("joining node 0 at %s", self._endpoint)
        while self._connected or self._may_come():
            poller.poll(POLL_MS)
            while self._events.poll(0):
                self._note(recv_monitor_message(self._events)["event"])
            while self._socket.poll(0):  # what was said before the connection closed, too
                self._obey(self._decoder.decode(self._socket.recv()))
            self._look_at_ranks()

    def _may_come(self) -> bool:
        """Return whether to wait on for an executor. Raises EngineDeadError if the last one has failed, or none
        has come in time."""
        waited = time.monotonic() - self._since
        if not self._joined:
            if waited > JOIN_SECONDS:
                raise EngineDeadError(f"node 0 has not answered at {self._endpoint} in {waited:.0f} s: is it started?")
            return True
        if not self._next:
            raise EngineDeadError("the engine of node 0 is gone: its connection closed")
        return waited < NEXT_SECONDS

    def _note(self, event: int) -> None:
        """Take in what has become of the connection."""
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._connected, self._refusals = True, 0
            self._send(self._join)
        elif event in (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL):
            self._refusals += 1
            if self._refusals >= REFUSALS:
                needed = "HEADRACE_SECRET or --secret-file must be the same on all nodes"
                raise ConfigError(f"{self._endpoint} refuses this node: {needed}")
        elif event == zmq.Event.DISCONNECTED and self._connected:
            self._connected, self._since = False, time.monotonic()
            self._end_ranks()

    def _obey(self, command: NodeCommand) -> None:
        if isinstance(command, StartRanks):
            self._start(command)
        elif isinstance(command, StartCore):
            self._start_core(command)
        elif isinstance(command, EndRanks):
            self._end_ranks(command.rank)
            if command.why:
                raise EngineDeadError(f"the engine of node 0 has ended: {command.why}")
            self._next = self._next or command.rank is None
        elif isinstance(command, Refuse):
            raise ConfigError(f"node 0 refuses this node: {command.why}")

    def _start(self, order: StartRanks) -> None:
        self._end_ranks()
        self._joined, self._next = True, False
        config = self._with_draft(order.config)
        self._order = order
        self._sockets = SocketFolder()
        path = f"{self._sockets.name}/progress"
        self._ranks = range(min(order.commands), max(order.commands) + 1)
        self._progress = Progress(Path(path), config.tensor_parallel_size * config.pipeline_parallel_size)
        store, replies = (endpoint(self._master, port) for port in (order.store, order.replies))
        for rank, port in order.commands.items():
            commands = endpoint(self._master, port)
            started = RankConfig(
                config, str(self._folder), rank, store, path, commands, replies, self._keys, order.group, self._address
            )
            self._children[rank] = order.group, start_rank(started)
        logger.info("node 0 has this node run %s", ", ".join(f"rank {rank}" for rank in self._ranks))

    def _with_draft(self, config: EngineConfig) -> EngineConfig:
        """Return the config of a rank or engine with the path that the model which guesses tokens has here."""
        if self._draft is None:
            return config
        return config.replace(speculative_config={**config.speculative_config, "model": self._draft})

    def _start_core(self, order: StartCore) -> None:
        self._end_ranks(order.rank)
        self._joined, self._next = True, False
        requests, replies = (endpoint(self._master, port) for port in (order.requests, order.replies))
        core = CoreConfig(
            self._with_draft(order.config), str(self._folder), requests, replies, name=f"core {order.rank}",
            keys=self._keys,
        )  # fmt: skip
        child = spawn("headrace.engine.core_process", self._encoder.encode(core))
        self._children[order.rank] = order.group, child
        logger.info("the first machine has this one run engine %d", order.rank)

    def _look_at_ranks(self) -> None:
        """Tell of what has ended, and now and then that this node is there, and how far its ranks have come."""
        for rank, (group, child) in [*self._children.items()]:
            if not child.is_alive():
                del self._children[rank]
                self._send(RankEnded(group, rank, child.process.returncode))
                logger.error("rank %d died (exit code %d)", rank, child.process.returncode)
        if time.monotonic() - self._beaten > BEAT_SECONDS:
            self._beaten, order = time.monotonic(), self._order
            self._send(Beat() if order is None else Beat(order.group, self._progress.lines(self._ranks)))
            if self._sockets is not None and all(self._progress.read()[rank].taken for rank in self._ranks):
                self._sockets.remove()  # all have opened its file, and a killed process leaves nothing behind
                self._sockets = None

    def _end_ranks(self, only: int | None = None) -> None:
        """End all ranks or cores, or only one."""
        ended = [*self._children] if only is None else [rank for rank in (only,) if rank in self._children]
        children = [self._children.pop(rank)[1] for rank in ended]
        for child in children:
            child.process.kill()
        for child in children:
            child.stop(timeout=0.0)
        if only is not None:
            return
        self._order = None
        if self._sockets is not None:
            self._sockets.remove()

    def _send(self, message: NodeReply) -> None:
        if self._connected:
            self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """End the ranks, and the connection."""
        self._end_ranks()
        self._socket.disable_monitor()
        self._context.destroy()
