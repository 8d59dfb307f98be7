"""Connects a core to its front ends: one, or several HTTP processes, each of which gets the outputs that it asked for.

With several, each is also told at short intervals what the core has of the others, so that all know how busy it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import zmq

from headrace.distributed.network import Keys, connect
from headrace.engine.messages import Add, Command, Join, Reply, Stepped
from headrace.request import EngineCoreOutput, EngineCoreOutputs, OtherFrontEnds

LOAD_SECONDS = 0.05
"""While the core steps, a front end that gets no outputs is told the core's load about as often."""


@dataclass(eq=False)
class FrontEnd:
    """Holds one front end's sockets, and counts what the core has of it."""

    requests: zmq.Socket[bytes]
    replies: zmq.Socket[bytes]
    last_sent: float = 0.0
    """seconds of time.monotonic()"""
    num_open: int = 0
    num_pending_tokens: int = 0
    num_received: int = 0
    num_received_tokens: int = 0


@dataclass
class _Asked:
    """Holds whose a request is, and its prompt tokens until its first token comes."""

    front_end: FrontEnd
    num_pending_tokens: int


class FrontEnds:
    """Holds the front ends of a core, the one first that started it. To be used from one thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], requests: str, replies: str, keys: Keys | None = None
    ) -> None:
        """`requests`, `replies`: addresses of the first front end's sockets; `keys`: see CoreConfig."""
        self._context = context
        self._keys = keys
        self._poller = zmq.Poller()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._all: list[FrontEnd] = []
        self._asked: dict[str, _Asked] = {}
        """Request id -> whose it is, of those that came while there were several; others are the first one's."""
        self._first = self._connect(requests, replies)

    def join(self, command: Join, answer: Reply) -> None:
        """Take a further front end, and send it `answer`."""
        self._send(self._connect(command.requests, command.replies), answer)

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Let `poll` return for messages of this socket too."""
        self._poller.register(socket, zmq.POLLIN)

    def poll(self, milliseconds: int) -> bool:
        """Wait at most so long for messages; return whether there are any."""
        return bool(self._poller.poll(milliseconds))

    def commands(self) -> Iterator[Command]:
        """Yield every command that has arrived."""
        for front_end in [*self._all]:
            while True:
                try:
                    command = self._decoder.decode(front_end.requests.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self._note(front_end, command)
                yield command

    def send(self, reply: Reply) -> None:
        """Send a message to all."""
        for front_end in self._all:
            self._send(front_end, reply)

    def send_snapshot(self, outputs: EngineCoreOutputs, busy: bool) -> None:
        """Send all front ends the statistics of a moment without outputs."""
        for front_end in self._all:
            self._send_part(front_end, outputs, [], busy)

    def send_outputs(self, outputs: EngineCoreOutputs, busy: bool) -> None:
        """Send each front end the outputs that it asked for."""
        if len(self._all) == 1:
            self._send(self._first, Stepped(outputs, busy))
            return
        parts: dict[FrontEnd, list[EngineCoreOutput]] = {front_end: [] for front_end in self._all}
        for output in outputs.outputs:
            asked = self._asked.get(output.request_id)
            if asked is None:
                parts[self._first].append(output)
                continue
            parts[asked.front_end].append(output)
            if asked.num_pending_tokens:
                asked.front_end.num_pending_tokens -= asked.num_pending_tokens
                asked.num_pending_tokens = 0
            if output.finish_reason is not None:
                self._forget(output.request_id)
        now = time.monotonic()
        for front_end, part in parts.items():
            if part or now - front_end.last_sent > LOAD_SECONDS:
                self._send_part(front_end, outputs, part, busy)

    @property
    def last_sent(self) -> float:
        """Return when the front end was sent something that has heard nothing for longest (time.monotonic())."""
        return min(front_end.last_sent for front_end in self._all)

    def _connect(self, requests: str, replies: str) -> FrontEnd:
        receiver, sender = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        receiver.set(zmq.RCVHWM, 0)
        sender.set(zmq.SNDHWM, 0)
        connect(receiver, requests, self._keys)
        connect(sender, replies, self._keys)
        self._poller.register(receiver, zmq.POLLIN)
        self._all.append(FrontEnd(receiver, sender))
        return self._all[-1]

    def _send(self, front_end: FrontEnd, reply: Reply) -> None:
        front_end.replies.send(self._encode(reply))
        front_end.last_sent = time.monotonic()

    def _send_part(
        self, front_end: FrontEnd, outputs: EngineCoreOutputs, part: list[EngineCoreOutput], busy: bool
    ) -> None:
        others = [each for each in self._all if each is not front_end]
        outputs.stats.others = OtherFrontEnds(
            sum(each.num_open for each in others),
            sum(each.num_pending_tokens for each in others),
            sum(each.num_received for each in others),
            sum(each.num_received_tokens for each in others),
        )
        own = EngineCoreOutputs(outputs=part, stats=outputs.stats, timestamp=outputs.timestamp)
        self._send(front_end, Stepped(own, busy))

    def _note(self, front_end: FrontEnd, command: Command) -> None:
        """Count what a front end asks for."""
        if isinstance(command, Add):
            count, tokens = len(command.requests), len(command.prompt_token_ids)
            front_end.num_received += count
            front_end.num_received_tokens += count * tokens
            if len(self._all) > 1:
                front_end.num_open += count
                front_end.num_pending_tokens += count * tokens
                self._asked |= {request.request_id: _Asked(front_end, tokens) for request in command.requests}
        elif not isinstance(command, Join):
            for abort in command.aborts:
                self._forget(abort.request_id)

    def _forget(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.front_end.num_open -= 1
            asked.front_end.num_pending_tokens -= asked.num_pending_tokens
