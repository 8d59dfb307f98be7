"""Holds the first machine's ends of its connections to the others, where an engine's ranks are on several.

A node runs its ranks as it is told (engine/node.py), and these talk to the executor as ranks of this machine do, over
TCP in place of local sockets. What goes over the connection to the node itself is who is there and what has ended.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Iterable
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
class _Node:
    rank: int
    ranks: range
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
        return f"node {self.rank} ({self.address})" if self.address else f"node {self.rank}"


class Nodes:
    """Waits for the other machines, starts and ends ranks there, and notices what becomes of them."""

    def __init__(
        self, config: EngineConfig, given: EngineConfig, folder: Path, context: zmq.Context[zmq.Socket[bytes]],
        store: str,
    ) -> None:  # fmt: skip
        """Listen at master_addr. `store`: local address at which this machine's ranks find the store. Raises
        ConfigError for a secret or an address that cannot work, PortInUseError for a port that is taken."""
        self.keys: Keys = read_keys(node_secret(), config.secret_file)
        host = config.master_addr or ""
        self.host = resolve("master_addr", host)
        self.data_host = data_address(*node_network(), self.host)
        """where this machine's ranks listen for those of others"""
        self._alike, self._given = must_be_alike(folder), settings_given(given)
        per_node = config.ranks_per_node
        self._nodes = [_Node(n, range(n * per_node, (n + 1) * per_node)) for n in range(1, config.nnodes)]
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(NodeReply)
        self._order: StartRanks | None = None
        self._began = self._looked = time.monotonic()
        self._waiting = ""
        self.strangers = 0
        """connections that were refused because they did not know the secret"""
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        refused = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
        self._refused = self._socket.get_monitor_socket(refused)
        self._at = endpoint(self.host, config.master_port)
        try:
            self.keys.bind(self._socket, self._at)
            self._store = StoreServer(self.keys, store, endpoint(self.host, "*"))
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(f"cannot wait at {self._at}: {error}; choose another --master-port") from None
            raise ConfigError(f"master_addr {host} is no address of this machine, node 0: {error}") from None
        self._local_store = store

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
            if node.identity:
                self._start(node)

    def _start(self, node: _Node) -> None:
        order = self._order
        if order is not None:
            own = {rank: port for rank, port in order.commands.items() if rank in node.ranks}
            self._send(node.identity, msgspec.structs.replace(order, commands=own))

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
        for node in self._nodes:
            if not node.identity or node.lost:
                continue
            if not self._send(node.identity, Ping()):
                node.lost = "its connection is closed"
            elif now - node.heard > SILENCE_SECONDS:
                node.lost = f"it has said nothing for {now - node.heard:.0f} s"
        missing = ", ".join(str(node) for node in self._nodes if not node.identity)
        if missing != self._waiting:
            self._waiting = missing
            if missing:
                logger.info("waiting for %s of %d at %s", missing, len(self._nodes) + 1, self._at)
            else:
                logger.info("all %d nodes are there", len(self._nodes) + 1)

    def _take(self, identity: bytes, address: str, message: NodeReply) -> None:
        if isinstance(message, Join):
            self._join(identity, address, message)
            return
        node = next((node for node in self._nodes if node.identity == identity), None)
        if node is None or self._order is None:
            return
        node.heard = time.monotonic()
        if message.group != self._order.group:
            return
        if isinstance(message, Beat):
            self._progress.put(node.ranks, message.progress)
        else:
            node.ended[message.rank] = message.exit_code

    def _join(self, identity: bytes, address: str, join: Join) -> None:
        why = self._why_not(join)
        if why:
            logger.warning("node %d (%s) is refused: %s", join.node, address, why)
            self._send(identity, Refuse(why))
            return
        node = self._nodes[join.node - 1]
        node.identity, node.address, node.heard = identity, address, time.monotonic()
        logger.info("%s is there", node)
        self._start(node)

    def _why_not(self, join: Join) -> str:
        """Return why a node cannot be of this engine; empty: it can."""
        if not 1 <= join.node <= len(self._nodes):
            return f"node_rank must be from 1 to {len(self._nodes)}, got {join.node}"
        if self._nodes[join.node - 1].identity:
            return f"node_rank {join.node} is taken by {self._nodes[join.node - 1].address}"
        names = {**self._alike, **join.alike}
        compared = [(name, *(alike.get(name, "missing") for alike in (self._alike, join.alike))) for name in names]
        compared += [(name, self._given.get(name, "not given"), there) for name, there in join.given.items()]
        for name, here, there in compared:
            if here != there:
                return f"{name} is {here} on node 0 and {there} on node {join.node}"
        return ""

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
        why = f"{missing} has not come in {waited:.0f} s"
        return f"{why}; {self.strangers} connections did not know the secret" if self.strangers else why

    def end(self, why: str = "") -> None:
        """End the ranks on all nodes, without waiting for them."""
        self._order = None
        for node in self._nodes:
            if node.identity:
                self._send(node.identity, EndRanks(why))

    def close(self) -> None:
        """Close all connections; what has been sent still leaves."""
        self._socket.disable_monitor()
        self._socket.close()
        self._store.close()

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
