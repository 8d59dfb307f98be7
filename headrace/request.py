"""The life of one request as data: what crosses the socket, what the scheduler tracks, what a user gets back.

Knows nothing of tokenizers, devices or HTTP.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.sampling_params import SamplingParams
from headrace.step import Logprobs


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Front end -> engine core: already tokenized and validated, `n` already fanned out to requests of one."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved against max_model_len: never None."""
    seed: int
    stop_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    priority: int = 0
    """Lower runs earlier (`--scheduling-policy priority`)."""
    arrival_time: float = 0.0
    """seconds, time.monotonic() of the front end; orders requests of equal priority"""
    cache_salt: str | None = None


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Engine core -> front end: what one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop_token_ids entry that ended it; None for eos and length."""
    new_logprobs: list[Logprobs] = []
    """Parallel to new_token_ids when asked for, else empty."""
    new_prompt_logprobs: list[Logprobs] = []
    """Entries of prompt tokens 1, 2, ... in order, as chunks complete."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set in the first output."""
    scheduled_time: float = 0.0
    """seconds, time.monotonic() of the first step it was part of; set in the first output"""
    error: str | None = None


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """The scheduler's mutable record of one request.

    `token_ids` are the tokens known to the host; `num_inflight` more have been sampled on the device by steps whose
    output has not come back. The gap to close is `num_tokens + num_inflight - num_computed_tokens`.
    """

    __slots__ = (
        "admitted_step",
        "block_hashes",
        "block_ids",
        "core_request",
        "finish_reason",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_inflight",
        "num_preemptions",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_registered_blocks",
        "order",
        "request_id",
        "row",
        "status",
        "stop_set",
        "token_ids",
    )

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self.core_request = core_request
        self.request_id = core_request.request_id
        self.token_ids: list[int] = core_request.prompt_token_ids
        """the prompt that other choices share, until this one is admitted and `own_tokens` is called"""
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_inflight = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs_sent = 0
        self.max_total_tokens = 0
        """prompt and output together; set when the scheduler, which knows max_model_len, accepts it"""
        self.order: tuple[int, float, str] = (0, 0.0, self.request_id)
        """unique; the scheduling policy's rank of this request, lowest first"""
        self.admitted_step = -1
        """the step that last put it among the running ones, anew or resumed"""
        self.num_registered_blocks = 0
        """leading blocks of `block_ids` that need not be offered to the prefix cache any more"""
        self.row = -1
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_set = frozenset(core_request.stop_token_ids)

    def own_tokens(self) -> None:
        """From now on tokens may be appended."""
        self.token_ids = list(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy."""
        return (self.core_request.priority, self.core_request.arrival_time, self.request_id)


@dataclass(frozen=True)
class Logprob:
    """One alternative at one position, as vLLM's `Logprob`."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: token id -> Logprob, the sampled token first."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Per prompt token; the first is None, as nothing precedes it."""
    num_cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """arrival_time, first_token_time, finished_time: seconds, monotonic"""


class StepTimes(msgspec.Struct):
    """Of steps of one kind, since start."""

    steps: int = 0
    observed: float = 0.0
    predicted: float = 0.0
    """seconds in all"""


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Counters and gauges the core sends with each step's outputs."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    """blocks not held by a request (cached ones count as free: they can be evicted)"""
    num_preemptions: int = 0
    """since start"""
    prefix_cache_queries: int = 0
    """prompt tokens looked up since start"""
    prefix_cache_hits: int = 0
    """prompt tokens found since start"""
    num_short_steps: int = 0
    """steps that found no memory, since start"""
    graph_bytes: dict[str, int] = {}
    """kind of CUDA graph -> memory that all of it take"""
    step_times: dict[str, StepTimes] = {}
    """kind of step -> what they took; empty where nothing is predicted"""
    problem: str = ""
    """why /health is red although the core steps: steps fail one after the other; empty: they do not"""


class EngineCoreOutputs(msgspec.Struct, kw_only=True):
    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float = 0.0
    """seconds, time.monotonic()"""
