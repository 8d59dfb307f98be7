"""Lets ranks on several machines find each other through torch's process groups, by a store that the first serves."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import msgspec
import torch.distributed as dist
import zmq

from headrace.distributed.network import Keys
from headrace.distributed.store_server import Ask

LOOK_SECONDS = 0.01
"""How often a rank looks for what another has not put there yet."""
PATIENCE = timedelta(minutes=10)
"""How long it does so, unless torch says otherwise."""


class SharedStore(dist.Store):
    """Asks a StoreServer. Whoever hands it to torch must keep it as long as the process groups."""

    def __init__(self, endpoint: str, keys: Keys, prefix: str) -> None:
        """`prefix`: of the keys of those that meet."""
        super().__init__()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        keys.connect(self._socket, endpoint)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(bytes | None)
        self._prefix = prefix
        self._lock = threading.Lock()  # NCCL's watchdog looks into the store from a thread of its own

    def _ask(self, verb: str, keys: list[str], value: bytes = b"", expected: bytes = b"") -> bytes | None:
        asked = Ask(verb, [self._prefix + key for key in keys], value, expected)
        with self._lock:
            self._socket.send(self._encoder.encode(asked))
            return self._decoder.decode(self._socket.recv())

    def set(self, key: str, value: bytes) -> None:  # pyrefly: ignore[bad-override]
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask("get", [key]) or b""

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], str(value).encode()) or 0)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # pyrefly: ignore[bad-override-param-name]
        return self._ask("swap", [key], desired, expected) or expected

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys) is not None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or PATIENCE).total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"no other rank has put {', '.join(keys)} into the store")
            time.sleep(LOOK_SECONDS)

    def deleteKey(self, key: str) -> bool:  # torch's name for it
        return self._ask("delete", [key]) is not None

    def clone(self) -> dist.Store:
        return self
