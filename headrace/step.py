"""Defines what the scheduler sends to the runner and gets back: plain integers, as msgspec structs.

A *row* is a place in the runner's permanent tables (token ids, block table, sampling parameters). A request owns one
row from admission until it finishes or is preempted. Steps run on the device in the order in which they were scheduled,
so a row or block freed by one step may be reused by the next.
"""

from __future__ import annotations

import msgspec

from headrace.cache_groups import CacheLayout
from headrace.pooling import Pooled
from headrace.sampling_params import SamplingParams

NO_TOKEN_ALLOWED = -1
"""Stands in RunnerOutput.token_ids where the request forbade every token (allowed_token_ids, its grammar, ...)."""
LOGITS_NOT_FINITE = -2
"""Stands there where the model gave the row NaN or Inf logits, whatever the request asked for."""


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """Fills a row. It is sent in the step in which the request is first scheduled or resumes after preemption."""

    row: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: list[int]
    """every token id that ends the request (eos included unless ignored), which min_tokens forbids; empty where a
    grammar decides when the request may end"""
    bad_words_token_ids: list[list[int]] = []
    seed: int = 0
    """always set: the user's seed, or a random one drawn by the input processor"""
    output_token_ids: list[int] = []
    """what was sampled before a preemption"""
    pools_tokens: bool = False
    """of a model that pools: the request wants something of each token, not of the whole text"""
    adapter_slot: int = -1
    """where its adapter lies on each rank; -1: it has none"""


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copies an adapter that the ranks have read into one of the slots from which steps use it."""

    slot: int
    adapter: int
    """LoRARequest.lora_int_id"""


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Sets the entries `start` to `start` + len(`block_ids`) of a row in the block table of one group of layers
    (cache_groups.py). Blocks before those that a sliding window still needs may belong to other requests by now."""

    row: int
    start: int
    block_ids: list[int]
    group: int = 0


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copies block `source` of a group of recurrent states to block `target`."""

    group: int
    source: int
    target: int


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """Describes one step.

    The lists from `rows` to `samples` are parallel: entry i is the i-th request of the batch. Decodes come first, then
    other requests that run one token.
    """

    step: int
    new_rows: list[NewRow] = []
    freed_rows: list[int] = []
    """rows whose request ended or was preempted since the last step; applied before `new_rows`. After a failed step a
    row may be freed twice, or without ever having been filled"""
    block_updates: list[BlockUpdate] = []
    rows: list[int] = []
    num_computed_tokens: list[int] = []
    """tokens whose KV is in the cache before this step, which is also the position of the first token computed in it;
    an upper bound where drafts of earlier steps are not accepted or rejected yet (the rows know the number)"""
    num_scheduled_tokens: list[int] = []
    samples: list[bool] = []
    """true where this step reaches the last known token, so that its logits give the next one"""
    cleared_pages: list[int] = []
    """pages of the arena that pass from one group of layers to another. They hold numbers of another type, which may
    read as NaN, and are zeroed before all else"""
    state_copies: list[StateCopy] = []
    """made in this order before the step computes: a snapshot of a state is taken, or a request begins with one"""
    num_drafts: list[int] = []
    """how many of each request's tokens, the last of them, are drafts: guesses, in its row, of what follows the last
    known token. Empty: no request has any"""
    masked: bool = False
    """a request that samples has a grammar: the step stops before it samples, until its Masks come"""
    num_guesses: int = 0
    """how many tokens to guess behind each request that samples, for later steps to verify"""
    adapter_loads: list[AdapterLoad] = []
    """made before the step computes; no earlier step's request is left in these slots"""
    engine_tokens: list[int] = []
    """how many tokens each engine has in the step that it takes at the same time as this one, where engines share the
    experts; empty: this one computes alone"""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    def without_drafts(self) -> SchedulerOutput:
        """Return the same step without drafts: each request that samples gets one token."""
        if not self.num_drafts:
            return self
        counts = [count - drafts for count, drafts in zip(self.num_scheduled_tokens, self.num_drafts, strict=True)]
        return msgspec.structs.replace(self, num_scheduled_tokens=counts, num_drafts=[])


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """Says which tokens a step may sample for requests that have a grammar. It follows the step while that computes."""

    step: int
    first_lines: dict[int, int] = {}
    """row -> the line of `bits` for its first sample; the lines of samples behind its drafts follow. Any token may be
    sampled for a row that has none"""
    num_words: int = 0
    """words of 32 bits in a line"""
    bits: memoryview = memoryview(b"")
    """line by line, little-endian: bit t % 32 of word t // 32 says that token t may be sampled. Tokens beyond a line
    may not. Whoever samples copies them at once: the masks of the next step take their place"""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Holds log-probabilities at one position, over the model's raw distribution (before penalties and temperature)."""

    token_ids: list[int]
    """first the token itself, then the k most likely ones, best first"""
    logprobs: list[float]
    rank: int
    """of the first token in the whole vocabulary; the most likely token has rank 1"""


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """Holds how many pairs of a token and an expert to which it goes there were, in the steps that were counted."""

    of_ranks: list[int] = []
    """by the rank that holds the expert, in all layers; empty: nothing is counted, as one rank holds all"""
    of_busiest: int = 0
    """those of each layer's busiest rank; with all ranks as busy it would be the mean of `of_ranks`"""

    def plus(self, other: ExpertLoad) -> ExpertLoad:
        """Return the sum of both."""
        if not (self.of_ranks and other.of_ranks):
            return self if self.of_ranks else other
        sums = [one + more for one, more in zip(self.of_ranks, other.of_ranks, strict=True)]
        return ExpertLoad(sums, self.of_busiest + other.of_busiest)


class RunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """Holds what one step computed."""

    step: int
    token_ids: list[int]
    """one for each True in `SchedulerOutput.samples`, in that order, each followed by the request's accepted drafts"""
    logprobs: list[Logprobs | None] = []
    """parallel to `token_ids`, or empty if no request of the step asked for logprobs"""
    prompt_logprobs: dict[int, list[Logprobs]] = {}
    """row -> entries for the prompt tokens that follow the positions computed in this step (position p gives the entry
    of prompt token p + 1), for rows that asked"""
    notes: list[str] = []
    """lines for the log at debug level (graphs captured)"""
    warnings: list[str] = []
    """lines for the log that call for attention (memory that was short)"""
    short_of_memory: bool = False
    """the step did not fit in memory as it was; later ones should be smaller"""
    graph_bytes: dict[str, int] = {}
    """kind of CUDA graph -> bytes that all graphs of it take; only where there are notes or warnings"""
    num_sampled: list[int] = []
    """parallel to `SchedulerOutput.rows`, for a step with drafts: how many of `token_ids` are each request's"""
    drafts: dict[int, list[int]] = {}
    """row -> the drafts behind its newest token, of rows that had masks: the next step's masks depend on them"""
    pooled: dict[int, Pooled] = {}
    """row -> what a model that pools made in this step: of its tokens, or of the text that the step completes"""
    expert_load: ExpertLoad | None = None
    """where this step's tokens went, if it was counted"""


class WorkerFacts(msgspec.Struct, frozen=True):
    """Holds what a rank reports to the engine core. Ranks report; only the core decides."""

    device: str
    device_name: str
    total_memory: int
    """bytes"""
    available_kv_memory: int
    """bytes that may go to the KV cache, after weights, the profiled peak of activations and CUDA graphs; negative: how
    much is missing without any cache"""
    layout: CacheLayout
    """of the KV cache on this rank"""
    weight_bytes: int
    attention_backend: str
    notes: list[str] = []
    """lines for the start-up log at debug level (what was passed over, demoted or shrunk, and why)"""
    step_times: list[tuple[int, float]] = []
    """(prompt tokens, milliseconds) of steps measured at load, smallest first; empty where none were"""
    step_bytes: int = 0
    """bytes that the largest step takes beyond weights while it runs; 0: not measured (so too the next three)"""
    table_bytes: int = 0
    """bytes of the rows' tables"""
    graph_bytes: int = 0
    """bytes that CUDA graphs are expected to take once every size is captured"""
    library_bytes: int = 0
    """bytes taken outside torch's allocator: context, kernels, communication"""
    warmup_sizes: list[tuple[int, int]] = []
    """(requests, tokens) of steps to run while idle so that their CUDA graphs are captured, in order"""
    kv_cache_error: float = 0.0
    """||difference|| / ||hidden states|| that an fp8 KV cache makes on this model; 0: the cache is not fp8"""
    kv_cache_remedy: str = ""
    """the cache types with which this model still works, where that error is too large"""
    demoted: list[str] = []
    """kernels, graphs and the like that disagreed with their references at load, and do not run"""
    shortfall: str = ""
    """the allocator's message, where what was last tried (the plan's largest step, or its cache) did not fit"""
