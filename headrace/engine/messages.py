"""Defines the messages between front ends and the engine core's process, as msgspec structs."""

from __future__ import annotations

import msgspec
from msgspec import structs

from headrace.config import EngineConfig
from headrace.distributed.network import Keys
from headrace.planner.record import Decision
from headrace.request import EngineCoreOutputs, EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.step import WorkerFacts

_NO_PARAMS = SamplingParams()


class CoreConfig(msgspec.Struct, frozen=True):
    """Holds what the core's process reads from its inherited file descriptor when it starts."""

    config: EngineConfig
    folder: str
    requests: str
    """ZeroMQ address on which the core receives."""
    replies: str
    """ZeroMQ address to which the core sends."""
    executor: str | None = None
    """`module:attribute` of a function like `make_executor`, in place of it."""
    name: str = "core"
    """how the log calls it"""
    meeting: str = ""
    """folder in which the cores meet that share their experts; empty: this one computes alone"""
    keys: Keys | None = None
    """of its addresses, if the front end is on another machine"""


class CoreFacts(msgspec.Struct, frozen=True):
    """Holds what the core measured and decided while it started."""

    config: EngineConfig
    """The resolved config: nothing that the core needs is None."""
    decisions: list[Decision]
    workers: list[WorkerFacts]
    num_pages: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """Adds all choices of one request. Their prompt, parameters and grammar are sent, and kept in the core's memory,
    only once."""

    prompt_token_ids: list[int]
    params: SamplingParams
    """Those of the first choice. The others differ in one point: they do not score the prompt."""
    requests: list[EngineCoreRequest]
    """The choices, without prompt, parameters and grammar."""
    grammar: str

    @classmethod
    def of(cls, requests: list[EngineCoreRequest]) -> Add:
        """Return the message for the choices of one request."""
        first = requests[0]
        none = {"prompt_token_ids": [], "params": _NO_PARAMS, "grammar": ""}
        bare = [structs.replace(request, **none) for request in requests]
        return cls(first.prompt_token_ids, first.params, bare, first.grammar)

    def whole(self) -> list[EngineCoreRequest]:
        """Return the choices as they were given to `of`."""
        others = structs.replace(self.params, prompt_logprobs=None) if len(self.requests) > 1 else self.params
        common = {"prompt_token_ids": self.prompt_token_ids, "grammar": self.grammar}
        return [
            structs.replace(request, params=others if index else self.params, **common)
            for index, request in enumerate(self.requests)
        ]


class Abort(msgspec.Struct, frozen=True):
    """Ends one request of the core."""

    request_id: str
    num_output_tokens_kept: int | None = None
    """How many output tokens count, where a stop string ended the request; None: nobody wants the output."""


class AbortMany(msgspec.Struct, frozen=True, tag=True):
    """Ends several requests of the core."""

    aborts: list[Abort]


class Join(msgspec.Struct, frozen=True, tag=True):
    """Tells the core of a further front end, which has bound two sockets for it. The core answers it with Ready."""

    requests: str
    """ZeroMQ address from which the core receives."""
    replies: str
    """ZeroMQ address to which the core sends."""


Command = Add | AbortMany | Join


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Says that the core can take requests."""

    facts: CoreFacts
    pid: int
    """that of the core's process"""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """Carries a step's outputs. Without outputs it is a heartbeat, sent at least every second."""

    outputs: EngineCoreOutputs
    busy: bool
    """Whether a step is under way on the device; the next message may then take as long as that step."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Says that the core could not start or cannot go on. Its process ends after this message."""

    error_class: str
    message: str


Reply = Ready | Stepped | Failed
