"""Lets engines that share the experts of each layer take their steps together.

Inside a step their ranks wait for each other in every sparse layer, so no engine may launch a step that the others do
not. Before each, every engine tells the others how many tokens it brings, which makes the size in which all exchange
them; one without requests brings a token that belongs to nobody. This is agreed on while the device computes the step
before, so it waits for no host, and as nothing of it is on the device, every size can be a graph. Nobody tells anything
while no engine has requests.

What the ranks report goes to all engines too: all then make the same plan, and read, check and allocate in one order.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.errors import OutOfMemoryError
from headrace.executor.base import Executor, StepHandle
from headrace.lora import LoRARequest
from headrace.step import Masks, SchedulerOutput, WorkerFacts

_TOKENS = struct.Struct("<i")


class Peers:
    """Connects an engine's core to those of the others, in rounds: each tells all something, and hears what all have
    told."""

    def __init__(self, folder: str, place: int, size: int) -> None:
        """`folder`: where all meet, which only this user can enter. `place`: which of the engines this is."""
        self.place, self.size = place, size
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PULL)
        """Readable when another has told something."""
        self.socket.bind(f"ipc://{folder}/peer{place}")
        self._others = [self._connect(f"ipc://{folder}/peer{other}") for other in range(size) if other != place]
        self._told: list[collections.deque[bytes]] = [collections.deque() for _ in range(size)]
        """by engine, what it has told in rounds that are not complete, oldest first"""

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.connect(address)
        return socket

    @property
    def wait_for_us(self) -> bool:
        """True if another has begun a round in which this one has told nothing."""
        self._take(0)
        return any(self._told) and not self._told[self.place]

    def offer(self, num_tokens: int) -> None:
        """Tell all of a step to which this engine brings so many tokens."""
        self.tell(_TOKENS.pack(num_tokens))

    def agreed(self, timeout_ms: int | None = None) -> list[int] | None:
        """Return how many tokens each engine brings to the step that this one has offered; None: some have not offered
        theirs, after so long."""
        told = self.hear(timeout_ms)
        return None if told is None else [_TOKENS.unpack(message)[0] for message in told]

    def tell(self, message: bytes) -> None:
        """Tell all something, without waiting for them."""
        self._told[self.place].append(message)
        for socket in self._others:
            socket.send_multipart([bytes([self.place]), message])

    def hear(self, timeout_ms: int | None = None) -> list[bytes] | None:
        """Return what all have told in this round, in order; None: some have not yet, after so long. `timeout_ms` None:
        wait for ever, as whoever started the engines ends them all if one dies."""
        while not all(self._told):
            if not self._take(timeout_ms):
                return None
        return [told.popleft() for told in self._told]

    def _take(self, timeout_ms: int | None) -> bool:
        """Take in what has come; return whether anything has."""
        came = False
        while self.socket.poll(0 if came else timeout_ms):
            place, message = self.socket.recv_multipart()
            self._told[place[0]].append(message)
            came = True
        return came

    def close(self) -> None:
        self._context.destroy(linger=0)


class Together:
    """Runs the ranks of one of several engines that share their experts, as `executor` does, and returns the facts of
    all engines' ranks."""

    def __init__(self, executor: Executor, peers: Peers) -> None:
        self._executor = executor
        self._peers = peers
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[WorkerFacts])

    def load(self) -> list[WorkerFacts]:
        return self._of_all(self._computed(self._executor.load()))

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        return self._of_all(self._computed(self._executor.profile(config)))

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        return self._of_all(self._executor.initialize_cache(num_pages))

    def execute(self, step: SchedulerOutput) -> StepHandle:
        return self._executor.execute(step)

    def sample(self, masks: Masks) -> None:
        self._executor.sample(masks)

    def read_adapter(self, request: LoRARequest, dropped: Sequence[int]) -> None:
        self._executor.read_adapter(request, dropped)

    def adapter_error(self) -> str | None:
        return self._executor.adapter_error()

    def check(self) -> None:
        self._executor.check()

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _of_all(self, facts: list[WorkerFacts]) -> list[WorkerFacts]:
        self._peers.tell(self._encoder.encode(facts))
        told = self._peers.hear()
        assert told is not None
        return [fact for one in told for fact in self._decoder.decode(one)]

    @staticmethod
    def _computed(facts: list[WorkerFacts]) -> list[WorkerFacts]:
        """Return the facts of ranks that have computed their largest step. Raises OutOfMemoryError if one had no memory
        for it: then ranks of other engines wait inside it for ever, and nobody can try a smaller one."""
        for fact in facts:
            if fact.shortfall:
                raise OutOfMemoryError(
                    f"there is no memory for the largest step on {fact.device_name}: lower --max-num-batched-tokens or "
                    f"--max-num-seqs, as engines that share experts try no smaller ones by themselves: {fact.shortfall}"
                )
        return facts
