"""Serves the store in which ranks on several machines find each other, on the first of them.

torch's own TCPStore asks nobody who he is, and listens on all networks. Here what a rank puts into the store, and reads
there, goes over the same sealed sockets as its commands. Imports no torch.
"""

from __future__ import annotations

import threading

import msgspec
import zmq

from headrace.distributed.network import Keys


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Holds one question to the store; the answer is the value that the first key has then, or None."""

    verb: str
    """`get`, `set`, `add`, `swap`, `delete` or `check`"""
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    """of `swap`, which sets a key only if it has this value"""


class StoreServer(threading.Thread):
    """Serves a store from a thread of its own, until `close`."""

    def __init__(self, keys: Keys, *endpoints: str) -> None:
        """Listen at every endpoint; `port` is that of the last one."""
        super().__init__(name="store", daemon=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self.port = keys.bind(self._socket, *endpoints)
        self._values: dict[str, bytes] = {}
        self.start()

    def run(self) -> None:
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Ask)
        try:
            while True:
                self._socket.send(encoder.encode(self._answer(decoder.decode(self._socket.recv()))))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, ask: Ask) -> bytes | None:
        values, key = self._values, ask.keys[0] if ask.keys else ""
        if ask.verb == "set":
            values[key] = ask.value
        elif ask.verb == "add":
            values[key] = str(int(values.get(key, b"0")) + int(ask.value)).encode()
        elif ask.verb == "swap" and values.get(key, b"") == ask.expected:
            values[key] = ask.value
        elif ask.verb == "delete":
            return values.pop(key, None)
        elif ask.verb == "check":
            return b"all" if all(each in values for each in ask.keys) else None
        return values.get(key)

    def close(self) -> None:
        """End the thread."""
        self._context.term()
