"""Holds the first machine's ends of its connections to the others, where ranks or engines are on several.

A node runs its ranks as it is told (engine/node.py), and these talk to the executor as ranks of this machine do, over
TCP in place of local sockets. What goes over the connection to the node itself is who is there and what has ended.
Whole engines on other machines (engine/machines.py) are reached in the same way.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from headrace import __version__
from headrace.config import EngineConfig
from headrace.distributed.network import Keys, data_address, endpoint, read_keys, resolve
from headrace.distributed.progress import Progress
from headrace.distributed.store_server import StoreServer
from headrace.environment import node_network, node_secret
from headrace.errors import ConfigError, PortInUseError
from headrace.executor.messages import (
    Beat,
    EndRanks,
    Join,
    NodeCommand,
    NodeReply,
    Ping,
    RankConfig,
    RankEnded,
    Refuse,
    StartRanks,
)

logger = logging.getLogger(__name__)

JOIN_SECONDS = 300.0
"""How long nodes wait for each other to be there."""
LOOK_SECONDS = 0.1
"""How often the connections are looked at, at most."""
SILENCE_SECONDS = 15.0
"""A node that says nothing for longer is gone, though its connection may still look open."""
OWN_TO_A_NODE = {
    "model", "tokenizer", "revision", "download_dir", "served_model_name", "chat_template", "generation_config",
    "node_rank", "master_addr", "secret_file", "use_profile", "log_level", "disable_log_requests", "disable_log_stats",
    "data_parallel_address", "data_parallel_size_local", "data_parallel_start_rank", "distributed_executor_backend",
}  # fmt: skip
"""Settings that may differ between nodes: where a model's files are (which must be the same), and what the first alone
reads."""


def must_be_alike(folder: Path) -> dict[str, str]:
    """Return what must be the same on every node, by name: versions, this package's source, the model's files."""
    found = {"headrace's version": __version__, "headrace's source": _digest(Path(__file__).parents[1].rglob("*.py"))}
    found |= {f"{name}'s version": importlib.metadata.version(name) for name in ("torch", "msgspec")}
    found["config.json of the model"] = _digest([folder / "config.json"])
    for path in sorted(folder.glob("*.safetensors")):
        found[f"size of {path.name}"] = str(path.stat().st_size)
    return found


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def settings_given(config: EngineConfig) -> dict[str, str]:
    """Return the settings that are not what they are by themselves, of those that nodes must agree on."""
    plain = msgspec.to_builtins(EngineConfig())
    return {
        name: repr(value)
        for name, value in msgspec.to_builtins(config).items()
        if name not in OWN_TO_A_NODE and value != plain[name]
    }


@dataclass
class Node:
    """Holds what is known of another machine."""

    name: str
    ranks: range
    """those that it runs of an engine, or engines"""
    identity: bytes = b""
    """of its connection; empty: it has not come"""
    address: str = ""
    heard: float = 0.0
    """time.monotonic() when it last said something"""
    ended: dict[int, int] = field(default_factory=dict)
    """rank -> exit code, of the current group"""
    lost: str = ""
    """why it is gone; empty: it is not"""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


class Listener:
    """Waits at a port for machines that know the secret and run what this one does, and notices which are gone."""

    def __init__(
        self, config: EngineConfig, folder: Path, context: zmq.Context[zmq.Socket[bytes]], field: str, port_field: str,
        place: Callable[[Join], Node | str], there: Callable[[Node], None],
        told: Callable[[Node, Beat | RankEnded], None],
    ) -> None:  # fmt: skip
        """Listen at the address and port in these fields of `config`, the one that the user gave. `place`: returns the
        node that has come, or why there is no room for it; `there`: what to do then; `told`: what to do with what it
        says. Raises ConfigError for a secret or an address that cannot work, PortInUseError for a port that is
        taken."""
        self.keys: Keys = read_keys(node_secret(), config.secret_file)
        given, port = getattr(config, field) or "", getattr(config, port_field)
        self.host = resolve(field, given)
        self.nodes: list[Node] = []
        """that are awaited, or have come"""
        self.strangers = 0
        """connections that were refused because they did not know the secret"""
        self.at = endpoint(self.host, port)
        self._alike, self._given = must_be_alike(folder), settings_given(config)
        self._place, self._there, self._told = place, there, told
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(NodeReply)
        self._looked = 0.0
        self._missing = ""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        refused = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
        self._refused = self._socket.get_monitor_socket(refused)
        try:
            self.keys.bind(self._socket, self.at)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                flag = f"--{port_field.replace('_', '-')}"
                raise PortInUseError(f"cannot wait at {self.at}: {error}; choose another {flag}") from None
            raise ConfigError(f"{field} {given} is no address of this machine, node 0: {error}") from None

    def look(self) -> None:
        """Take in what nodes have said, and see whether they are still there. Cheap enough to be called often."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        while self._refused.poll(0):
            self._refused.recv_multipart()
            self.strangers += 1
            if self.strangers == 1:
                logger.warning("somebody who does not know the secret tried to join; all nodes need the same one")
        while self._socket.poll(0):
            identity, message = self._socket.recv_multipart(copy=False)
            self._take(identity.bytes, str(message.get("Peer-Address")), self._decoder.decode(message.bytes))
        for node in self.nodes:
            if not node.identity or node.lost:
                continue
            if not self._send(node.identity, Ping()):
                node.lost = "its connection is closed"
            elif now - node.heard > SILENCE_SECONDS:
                node.lost = f"it has said nothing for {now - node.heard:.0f} s"

    def say_missing(self, missing: str) -> None:
        """Log what is awaited, where that has changed."""
        if missing != self._missing:
            self._missing = missing
            if missing:
                logger.info("waiting for %s at %s", missing, self.at)

    def _take(self, identity: bytes, address: str, message: NodeReply) -> None:
        if isinstance(message, Join):
            self._join(identity, address, message)
            return
        node = next((node for node in self.nodes if node.identity == identity), None)
        if node is not None:
            node.heard = time.monotonic()
            self._told(node, message)

    def _join(self, identity: bytes, address: str, join: Join) -> None:
        node = self._place(join)
        why = node if isinstance(node, str) else self._difference(node, join)
        if why or isinstance(node, str):
            logger.warning("a node (%s) is refused: %s", address, why)
            self._send(identity, Refuse(why))
            return
        node.identity, node.address, node.heard = identity, address, time.monotonic()
        logger.info("%s is there", node)
        self._there(node)

    def _difference(self, node: Node, join: Join) -> str:
        """Return what a node has that is not this one's; empty: nothing."""
        if node.identity:
            return f"{node.name} is taken by {node.address}"
        names = {**self._alike, **join.alike}
        compared = [(name, *(alike.get(name, "missing") for alike in (self._alike, join.alike))) for name in names]
        compared += [(name, self._given.get(name, "not given"), there) for name, there in join.given.items()]
        for name, here, there in compared:
            if here != there:
                return f"{name} is {here} on node 0 and {there} on {node.name}"
        return ""

    def send(self, node: Node, command: NodeCommand) -> None:
        """Send a node a command, if it is there."""
        if node.identity:
            self._send(node.identity, command)

    def _send(self, identity: bytes, command: NodeCommand) -> bool:
        """Send a node a command; return whether it is connected."""
        try:
            self._socket.send_multipart([identity, self._encoder.encode(command)], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def strangers_too(self, why: str) -> str:
        """Return why a node has not come, with those who came and did not know the secret."""
        return f"{why}; {self.strangers} connections did not know the secret" if self.strangers else why

    def close(self) -> None:
        """Close all connections; what has been sent still leaves."""
        self._socket.disable_monitor()
        self._refused.close()
        self._socket.close()


class Nodes:
    """Waits for the other machines, starts and ends ranks there, and notices what becomes of them."""

    def __init__(
        self, config: EngineConfig, given: EngineConfig, folder: Path, context: zmq.Context[zmq.Socket[bytes]],
        store: str,
    ) -> None:  # fmt: skip
        """Listen at master_addr. `store`: local address at which this machine's ranks find the store. Raises what
        Listener raises."""
        self._listener = Listener(
            given, folder, context, "master_addr", "master_port", self._place, self._start, self._told
        )
        self.keys, self.host = self._listener.keys, self._listener.host
        self.data_host = data_address(*node_network(), self.host)
        """where this machine's ranks listen for those of others"""
        each = config.ranks_per_node
        self._nodes = [Node(f"node {n}", range(n * each, (n + 1) * each)) for n in range(1, config.nnodes)]
        self._listener.nodes = self._nodes
        self._order: StartRanks | None = None
        self._began = time.monotonic()
        self._store = StoreServer(self.keys, store, endpoint(self.host, "*"))
        self._local_store = store

    @property
    def strangers(self) -> int:
        """Connections that were refused because they did not know the secret."""
        return self._listener.strangers

    def joined(self, rank: RankConfig) -> RankConfig:
        """Return the config of a rank of this machine with which it finds those of the others."""
        return msgspec.structs.replace(rank, rendezvous=self._local_store, keys=self.keys, address=self.data_host)

    def bind(self, socket: zmq.Socket[bytes], local: str) -> int:
        """Let ranks of this machine reach a socket at a local address, and others at the port that is returned."""
        return self.keys.bind(socket, local, endpoint(self.host, "*"))

    def begin(self, order: StartRanks, progress: Progress) -> None:
        """Start a group of ranks on every node that is there, and on the others when they come."""
        self._began = time.monotonic()
        self._progress = progress
        self._order = msgspec.structs.replace(order, store=self._store.port)
        for node in self._nodes:
            node.ended = {}
            self._start(node)

    def _place(self, join: Join) -> Node | str:
        if not 1 <= join.node <= len(self._nodes):
            return f"node_rank must be from 1 to {len(self._nodes)}, got {join.node}"
        return self._nodes[join.node - 1]

    def _start(self, node: Node) -> None:
        order = self._order
        if order is not None:
            own = {rank: port for rank, port in order.commands.items() if rank in node.ranks}
            self._listener.send(node, msgspec.structs.replace(order, commands=own))

    def look(self) -> None:
        """Take in what nodes have said, and see whether they are still there. Cheap enough to be called often."""
        self._listener.look()
        self._listener.say_missing(", ".join(str(node) for node in self._nodes if not node.identity))

    def _told(self, node: Node, message: Beat | RankEnded) -> None:
        if self._order is None or message.group != self._order.group:
            return
        if isinstance(message, Beat):
            self._progress.put(node.ranks, message.progress)
        else:
            node.ended[message.rank] = message.exit_code

    def problem(self, killed: bool = False) -> str:
        """Return what has become of a rank elsewhere, or of its node; empty: nothing. `killed`: only what a signal or a
        lost connection has ended."""
        for node in self._nodes:
            for rank, code in node.ended.items():
                if code < 0 or not killed:
                    return f"rank {rank} on {node} died (exit code {code})"
        for node in self._nodes:
            if node.lost:
                ranks = f"ranks {node.ranks[0]} to {node.ranks[-1]}" if len(node.ranks) > 1 else f"rank {node.ranks[0]}"
                return f"{node} with {ranks} is gone: {node.lost}"
        waited = time.monotonic() - self._began
        missing = next((node for node in self._nodes if not node.identity), None)
        if missing is None or waited < JOIN_SECONDS:
            return ""
        return self._listener.strangers_too(f"{missing} has not come in {waited:.0f} s")

    def end(self, why: str = "") -> None:
        """End the ranks on all nodes, without waiting for them."""
        self._order = None
        for node in self._nodes:
            self._listener.send(node, EndRanks(why))

    def close(self) -> None:
        """Close all connections; what has been sent still leaves."""
        self._listener.close()
        self._store.close()
