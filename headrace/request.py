"""Holds one request in its forms: what crosses the socket, what the scheduler tracks, and what the user gets back."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from headrace.errors import HeadraceError, QueueFullError, RequestError
from headrace.lora import LoRARequest
from headrace.pooling import Pooled
from headrace.sampling_params import SamplingParams
from headrace.step import ExpertLoad, Logprobs


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Carries one choice of a request from the front end to the engine core: tokenized, validated and with n = 1."""

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
    """Seconds of the front end's time.monotonic(); orders requests of equal priority."""
    cache_salt: str | None = None
    client: str = ""
    """The client whose request it is, as a hash of the API key (never the key itself); clients take turns."""
    parent: str = ""
    """The HTTP request that it is part of; its choices take turns as one. Empty: it came alone."""
    grammar: str = ""
    """What holds its output, as structured_outputs/grammar.py writes it; empty: nothing does."""
    pools: str = ""
    """What it wants numbers for, of a model that pools: its `text` or its `tokens`; empty: it generates."""

    lora_request: LoRARequest | None = None
    """Its adapter; None: the model runs as it is."""

    @property
    def adapter(self) -> int:
        """The number of its adapter; 0: it has none."""
        return 0 if self.lora_request is None else self.lora_request.lora_int_id

    @property
    def needs_all_tokens(self) -> bool:
        """Tell whether each of its prompt tokens has to be computed, even if the prefix cache has it."""
        return self.params.prompt_logprobs is not None or self.pools == "tokens"


class FinishReason(enum.StrEnum):
    """Says why a request ended, in the words of OpenAI's API, and `error` for one that failed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Carries what one step added to one request from the engine core to the front end."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop_token_ids entry that ended it; None for eos and length."""
    completes_grammar: bool = False
    """It ended because its grammar allows nothing more: the last token is no stop token but part of the text."""
    new_logprobs: list[Logprobs] = []
    """Parallel to new_token_ids when asked for, else empty."""
    new_prompt_logprobs: list[Logprobs] = []
    """Entries of prompt tokens 1, 2, ... in order, as chunks complete."""
    pooled: list[Pooled] = []
    """What a model that pools made of it."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set in the first output."""
    scheduled_time: float = 0.0
    """Seconds of time.monotonic() when its first step was submitted; set in the first output."""
    error: str | None = None
    invalid: bool = False
    """With an error: what the request asks for is why, not the engine."""
    retry_after: int = 0
    """With an error: too much was asked of the engine at once, and after so many seconds to ask again; 0: another
    error."""

    @classmethod
    def failed(cls, request_id: str, error: str, invalid: bool = False, retry_after: int = 0) -> EngineCoreOutput:
        """Return the last output of a request that fails."""
        return cls(
            request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error=error, invalid=invalid,
            retry_after=retry_after,
        )  # fmt: skip

    def exception(self) -> HeadraceError:
        """Return the error of the last output of a request that has failed."""
        message = self.error or "the request failed in the engine"
        if self.retry_after:
            return QueueFullError(message, self.retry_after)
        return RequestError(message) if self.invalid else HeadraceError(message)


class RequestStatus(enum.Enum):
    """Says where a request is in its life. A preempted one waits too, but keeps the tokens that it has."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Matcher(Protocol):
    """Follows the output of one request through its grammar (structured_outputs/matcher.py)."""

    finished: bool
    """True once the output is complete and nothing may follow."""
    error: str
    """Why the grammar cannot be followed any further; empty while it can."""

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take new tokens in, up to the one with which the output is complete; return how many were taken."""
        ...


class Snapshot(NamedTuple):
    """Represents a copy of a request's recurrent state, made by a step whose result is not back yet."""

    num_tokens: int
    """Tokens that the state has seen."""
    group: int
    block: int


@dataclass(slots=True, eq=False)
class Request:
    """Tracks one request in the scheduler; mutable.

    `token_ids` are the tokens known to the host; `num_inflight` more are being sampled by steps whose results are not
    back. `num_computed_tokens` counts tokens whose KV is computed once all submitted steps have run. The gap to close
    is `num_tokens + num_inflight - num_computed_tokens`. Until the result of a step with drafts is back, both counts
    take every draft as accepted.
    """

    core_request: EngineCoreRequest
    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    """Shared with the prompt of other choices until the request is admitted and `own_tokens` is called."""
    num_prompt_tokens: int = field(init=False)
    stop_set: frozenset[int] = field(init=False)
    order: tuple[int, float, str] = field(init=False)
    """Unique sort key: priority (0 under fcfs) and arrival. The last in order is preempted first."""
    num_computed_tokens: int = 0
    num_inflight: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_positions_sent: int = 0
    """Positions of the prompt whose logprobs, or vectors, were sent."""
    max_total_tokens: int = 0
    """Most tokens of prompt and output together; set by the scheduler, which knows max_model_len."""
    admitted_step: int = -1
    """The step in which it last began to run, for the first time or after a preemption."""
    sampled_step: int = -1
    """The newest step that samples for it, whose result may not be back."""
    row: int = -1
    adapter_slot: int = -1
    """Where its adapter lies while it runs."""
    num_blocks: int = 0
    """Blocks that its tokens fill in every layer group, those behind a window included."""
    num_registered_blocks: int = 0
    """How many of its first blocks have been offered to the prefix cache."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Block ids of each layer group; empty while it waits. A group of recurrent states has one block."""
    first_blocks: list[int] = field(default_factory=list)
    """For each layer group, how many of the first `block_ids` are no longer its own."""
    snapshots: list[Snapshot] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    matcher: Matcher | None = None
    """None where no grammar holds the output, and once the request has ended."""
    drafts: Sequence[int] = ()
    """The drafts behind its newest token, where its masks depend on them; empty if it has not sampled since it last
    began to run."""
    num_guesses: int = 0
    """How many tokens are guessed behind its newest one, once all submitted steps have run."""
    guesses_right: float = 0.0
    """Its guesses that were right, earlier ones counting for less, and how many would be expected by those of all."""
    guesses_expected: float = 0.0

    def __post_init__(self) -> None:
        self.request_id = self.core_request.request_id
        self.token_ids = self.core_request.prompt_token_ids
        self.num_prompt_tokens = len(self.token_ids)
        self.stop_set = frozenset(self.core_request.stop_token_ids)
        self.order = (0, 0.0, self.request_id)

    def own_tokens(self) -> None:
        """Copy the token ids, so that tokens may be appended from now on."""
        self.token_ids = list(self.token_ids)

    def knows_drafts(self, count: int) -> bool:
        """Return False if its masks depend on `count` drafts, and there are not as many: it has not sampled since it
        last began to run, or nothing was guessed then."""
        return self.matcher is None or (self.num_guesses >= count and (self.num_inflight > 0 or len(self.drafts) > 0))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True)
class Logprob:
    """Holds the log-probability of one token at one position, as vLLM's `Logprob` does."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True)
class RequestMetrics:
    """Holds the moments of one request, under the names of vLLM's RequestStateStats and of its older RequestMetrics.
    Names ending in `_ts` are seconds of time.monotonic(), or 0.0 for a moment that did not come. Names ending in
    `_time` are seconds since 1970, or None; they are computed from the others, so that they never run backwards."""

    arrival_time: float
    queued_ts: float
    """The same moment as arrival_time."""
    scheduled_ts: float = 0.0
    """When its first step was submitted."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_ts: float = 0.0
    """When its last output was handed out."""
    num_generation_tokens: int = 0
    """Generated tokens of all its choices."""

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
    """Holds one choice of a request's output: all of it, or what came since the last output."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: token id -> Logprob, the sampled token first."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pooled: list[Pooled] = field(default_factory=list)
    """What a model that pools made of the prompt, instead of text."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """Holds a request's output: all of it, or what came since the last output. Attributes are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Per prompt token; the first is None, as nothing precedes it."""
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    """None until the request has finished."""
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    """As in vLLM, for what is not served here: encoders and KV caches of other servers."""


class StepTimes(msgspec.Struct):
    """Sums the times of all steps of one kind since start, in seconds."""

    steps: int = 0
    observed: float = 0.0
    predicted: float = 0.0


class DraftCounts(msgspec.Struct, frozen=True):
    """Counts what was guessed, since start, and how much of it was right."""

    num_drafts: int = 0
    """Decodes that verified guesses."""
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """How often the first guess was accepted, the second, ..."""

    def after(self, num_drafts: int, num_accepted: int) -> DraftCounts:
        """Return the counts after a decode with `num_drafts` guesses, of which so many were accepted."""
        places = max(num_drafts, len(self.accepted_at))
        counts = (*self.accepted_at, *[0] * (places - len(self.accepted_at)))
        return DraftCounts(
            self.num_drafts + 1,
            self.num_tokens + num_drafts,
            self.num_accepted + num_accepted,
            tuple(count + (place < num_accepted) for place, count in enumerate(counts)),
        )


class OtherFrontEnds(msgspec.Struct, frozen=True):
    """Counts what a core has of the front ends beside the one that it tells."""

    num_open: int = 0
    """Requests that have not ended."""
    num_pending_tokens: int = 0
    """Prompt tokens of those without a first token."""
    num_received: int = 0
    """Requests that came since start, and their prompt tokens."""
    num_received_tokens: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Holds the counters and gauges that the core sends with each step's outputs. Counters count since start."""

    num_running: int = 0
    num_waiting: int = 0
    """Waiting requests; those that are preempted, or whose grammars are being compiled, included."""
    num_waiting_tokens: int = 0
    """Prompt tokens of the waiting requests."""
    num_received: int = 0
    """Requests that came, refused ones included."""
    num_received_tokens: int = 0
    """Prompt tokens of the requests that came."""
    others: OtherFrontEnds = OtherFrontEnds()
    """What of all this is other front ends', where several share the core."""
    num_blocks: int = 0
    """Pages of the KV cache."""
    num_free_blocks: int = 0
    """Pages that no request holds. Cached ones count as free, as they can be evicted."""
    num_preemptions: int = 0
    drafts: DraftCounts = DraftCounts()
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    num_short_steps: int = 0
    """Steps for which there was no memory."""
    graph_bytes: dict[str, int] = {}
    """Kind of CUDA graph -> bytes that all of them take."""
    step_times: dict[str, StepTimes] = {}
    """Kind of step -> their times; empty where nothing is predicted."""
    num_grammars: int = 0
    """Grammars that were compiled."""
    mask_seconds: float = 0.0
    """Time in which a step's masks were made, while the device computed the step."""
    expert_load: ExpertLoad = ExpertLoad()
    """Where tokens went, in the steps that were counted."""
    problem: str = ""
    """Why the engine is unhealthy although it steps: the last steps all failed. Empty while it is healthy."""


class EngineCoreOutputs(msgspec.Struct, kw_only=True):
    """Carries what one or more steps brought from the engine core to the front end."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float = 0.0
    """Seconds of the core's time.monotonic()."""
