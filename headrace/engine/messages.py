"""What the front end and the engine core say to each other over their sockets, as msgspec structs."""

from __future__ import annotations

import msgspec
from msgspec import structs

from headrace.config import EngineConfig
from headrace.planner.record import Decision
from headrace.request import EngineCoreOutputs, EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.step import WorkerFacts

_NO_PARAMS = SamplingParams()


class CoreConfig(msgspec.Struct, frozen=True):
    """What the core's process reads from its inherited descriptor."""

    config: EngineConfig
    folder: str
    requests: str
    """zmq address on which the core receives"""
    replies: str
    """zmq address to which the core sends"""
    executor: str | None = None
    """`module:attribute` of a function like `make_executor`, in place of it."""


class CoreFacts(msgspec.Struct, frozen=True):
    """What the core found out and settled while it started."""

    config: EngineConfig
    """resolved: nothing is None that the core needs"""
    decisions: list[Decision]
    workers: list[WorkerFacts]
    num_pages: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """The choices of one request. Their prompt and parameters travel, and lie in the core's memory, once."""

    prompt_token_ids: list[int]
    params: SamplingParams
    """the first choice's; the others differ in that they do not score the prompt"""
    requests: list[EngineCoreRequest]
    """without these two"""

    @classmethod
    def of(cls, requests: list[EngineCoreRequest]) -> Add:
        first = requests[0]
        bare = [structs.replace(request, prompt_token_ids=[], params=_NO_PARAMS) for request in requests]
        return cls(first.prompt_token_ids, first.params, bare)

    def whole(self) -> list[EngineCoreRequest]:
        others = structs.replace(self.params, prompt_logprobs=None) if len(self.requests) > 1 else self.params
        return [
            structs.replace(request, prompt_token_ids=self.prompt_token_ids, params=others if index else self.params)
            for index, request in enumerate(self.requests)
        ]


class Abort(msgspec.Struct, frozen=True):
    request_id: str
    num_output_tokens_kept: int | None = None
    """Where a stop string cut the output; None: nobody wants the output."""


class AbortMany(msgspec.Struct, frozen=True, tag=True):
    aborts: list[Abort]


Command = Add | AbortMany


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: CoreFacts


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The loop went round. Sent with each step's outputs, and without any at least once a second."""

    outputs: EngineCoreOutputs
    busy: bool
    """A step is under way on the device: the next message may take as long as that step."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core could not start, or cannot go on. The process ends after it."""

    error_class: str
    message: str


Reply = Ready | Stepped | Failed
