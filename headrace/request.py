"""The life of one request as data: what crosses the socket, what the scheduler tracks, what a user gets back.

Knows nothing of tokenizers, devices or HTTP.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    client: str = ""
    """Whose it is: clients take turns. Never a key itself, only its digest; empty: nobody's in particular."""
    parent: str = ""
    """Requests with the same one came together and have turns as one; empty: it came alone."""


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


class Snapshot(NamedTuple):
    """A copy of a request's state that a step under way makes."""

    num_tokens: int
    """that the state has seen"""
    group: int
    block: int


class Request:
    """The scheduler's mutable record of one request.

    `token_ids` are the tokens known to the host; `num_inflight` more have been sampled on the device by steps whose
    output has not come back. The gap to close is `num_tokens + num_inflight - num_computed_tokens`. Both count every
    draft of a step as accepted until its result is there.
    """

    __slots__ = (
        "admitted_step",
        "block_hashes",
        "block_ids",
        "core_request",
        "finish_reason",
        "first_blocks",
        "max_total_tokens",
        "num_blocks",
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
        "snapshots",
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
        """unique: priority (0 under fcfs) and arrival; who is last is preempted first"""
        self.admitted_step = -1
        """the step that last put it among the running ones, anew or resumed"""
        self.num_registered_blocks = 0
        """leading blocks that need not be offered to the prefix cache any more"""
        self.row = -1
        self.num_blocks = 0
        """that its tokens have room in, in every group of layers: those behind a window count"""
        self.block_ids: list[list[int]] = []
        """of each group; empty while it waits. One of a state has its one block."""
        self.first_blocks: list[int] = []
        """of each group: what stands before in `block_ids` is not its own any more"""
        self.snapshots: list[Snapshot] = []
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


@dataclass(frozen=True)
class RequestMetrics:
    """When one request came to what, under the names of vLLM's RequestStateStats and of its older RequestMetrics.

    Names ending in `_ts` are seconds of time.monotonic(), 0.0 where the request did not come so far. Those in `_time`
    are seconds since 1970, None where it did not; they are made of the others, and so never run backwards.
    """

    arrival_time: float
    queued_ts: float
    """the same moment as arrival_time"""
    scheduled_ts: float = 0.0
    """its first step began"""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    """its last output was handed out"""
    num_generation_tokens: int = 0
    """of all its choices"""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to first token; 0.0 without one."""
        return self.first_token_ts - self.queued_ts if self.first_token_ts else 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to first step."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None

    @property
    def first_scheduled_time(self) -> float | None:
        return self._wall(self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        return self._wall(self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        return self._wall(self.last_token_ts)

    @property
    def finished_time(self) -> float | None:
        return self._wall(self.finished_ts)

    def _wall(self, moment: float) -> float | None:
        return self.arrival_time + (moment - self.queued_ts) if moment else None


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
    lora_request: None = None
    """vLLM's; adapters are not served yet"""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """What a request brought: all of it, or what came since the last output. Attributes are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Per prompt token; the first is None, as nothing precedes it."""
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    """None until the request has finished"""
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    """vLLM's, for what is not served here: adapters, encoders and KV caches of other servers"""


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
    """preempted ones included"""
    num_waiting_tokens: int = 0
    """prompt tokens of those"""
    num_received: int = 0
    """requests since start, refused ones included"""
    num_received_tokens: int = 0
    """their prompt tokens"""
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
