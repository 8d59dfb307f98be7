"""The one contract between deciding (scheduler) and computing (runner): plain integers, sent as msgspec.

A *row* is a slot in the runner's permanent tables (token ids, block table, sampling parameters). A request owns one
row from admission until it finishes or is preempted. Steps run on the device in the order in which they were scheduled,
so a row or block freed by one step may be reused by the next.
"""

from __future__ import annotations

import msgspec

from headrace.cache_groups import CacheLayout
from headrace.sampling_params import SamplingParams

NO_TOKEN_ALLOWED = -1
"""In RunnerOutput.token_ids: the request itself forbade every token (allowed_token_ids, bad_words and the like)."""
LOGITS_NOT_FINITE = -2
"""... the model gave this row NaN or Inf logits, whatever the request asked for."""


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """Fill a row: sent in the step in which the request is first scheduled, and when it resumes after preemption."""

    row: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_token_ids: list[int]
    """Every token id that ends the request (eos included unless ignored): what min_tokens forbids."""
    bad_words_token_ids: list[list[int]] = []
    seed: int = 0
    """Always set: the user's seed, or a random one drawn by the input processor."""
    output_token_ids: list[int] = []
    """what was sampled before a preemption"""


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True):
    """block_table[row, start : start + len(block_ids)] = block_ids, in the table of one group of layers
    (cache_groups.py). What stands before the blocks that a window still needs may belong to others by now."""

    row: int
    start: int
    block_ids: list[int]
    group: int = 0


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """Block `target` of a group of states becomes what block `source` is."""

    group: int
    source: int
    target: int


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step. The lists from `rows` on are parallel: entry i is the i-th request of the batch; decodes come first,
    then what else runs one token."""

    step: int
    new_rows: list[NewRow]
    freed_rows: list[int]
    """Rows whose request ended or was preempted since the last step: drop their state. Applied before `new_rows`. After
    a failed step some may be told again, or never have been filled."""
    block_updates: list[BlockUpdate]
    rows: list[int]
    num_computed_tokens: list[int]
    """Tokens whose KV is in the cache before this step; also the position of the first token computed in it. The most
    that it can be, where drafts of earlier steps have not been accepted or rejected yet; the rows know how many."""
    num_scheduled_tokens: list[int]
    samples: list[bool]
    """True where this step reaches the last known token, so that its logits give the next one."""
    cleared_pages: list[int] = []
    """Pages of the arena that went from one group to another: they hold numbers of another type, which may read as NaN,
    and are zeroed before all else. Empty where all layers keep alike, as is the next."""
    state_copies: list[StateCopy] = []
    """made in this order before the step computes: a snapshot is taken, or a request begins with one"""
    num_drafts: list[int] = []
    """How many of each request's tokens, the last of them, are drafts: guesses, in its row, of what follows the last
    known token. Empty: nobody has any."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    def without_drafts(self) -> SchedulerOutput:
        """The same step, in which each request that samples gets one token."""
        if not self.num_drafts:
            return self
        counts = [count - drafts for count, drafts in zip(self.num_scheduled_tokens, self.num_drafts, strict=True)]
        return msgspec.structs.replace(self, num_scheduled_tokens=counts, num_drafts=[])


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, over the model's raw distribution (before penalties and temperature)."""

    token_ids: list[int]
    """First the token itself, then the k most likely ones, best first."""
    logprobs: list[float]
    rank: int
    """1-based rank of the first token in the whole vocabulary."""


class RunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step computed. `token_ids` has one entry for each True in `SchedulerOutput.samples`, in that order, and
    after it one for each of that request's drafts that was accepted."""

    step: int
    token_ids: list[int]
    logprobs: list[Logprobs | None] = []
    """Parallel to `token_ids`, or empty if no request of the step asked for logprobs."""
    prompt_logprobs: dict[int, list[Logprobs]] = {}
    """row -> entries for the prompt tokens that follow the positions computed in this step: position p gives the entry
    of prompt token p + 1. Only rows that asked."""
    notes: list[str] = []
    """Lines for the log at debug level (graphs captured)."""
    warnings: list[str] = []
    """... and those that somebody should read (memory that was short)."""
    short_of_memory: bool = False
    """There was no memory for the step as it was: later ones should be smaller."""
    graph_bytes: dict[str, int] = {}
    """kind of CUDA graph -> memory that all of it take; only where there are notes or warnings"""
    num_sampled: list[int] = []
    """Parallel to `SchedulerOutput.rows`, of a step with drafts: how many of `token_ids` are each request's"""


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a rank reports upwards; ranks never decide."""

    device: str
    device_name: str
    total_memory: int
    """bytes"""
    available_kv_memory: int
    """bytes that may go to the KV cache, after weights, the profiled peak of activations and CUDA graphs; below 0:
    what is missing without any cache"""
    layout: CacheLayout
    """of the KV cache on this rank"""
    weight_bytes: int
    attention_backend: str
    notes: list[str] = []
    """Lines for the start-up log at debug level (what was passed over, demoted or shrunk, and why)."""
    step_times: list[tuple[int, float]] = []
    """(prompt tokens, milliseconds) of steps measured at load, smallest first; empty where none were."""
    step_bytes: int = 0
    """what the largest step takes beyond weights for as long as it runs; 0: not measured, as the next three"""
    table_bytes: int = 0
    """tables of rows"""
    graph_bytes: int = 0
    """what CUDA graphs are expected to take, of those that can be captured"""
    library_bytes: int = 0
    """taken beside the allocator: context, kernels, communication"""
    warmup_sizes: list[tuple[int, int]] = []
    """(requests, tokens) of steps to run while idle so that their CUDA graphs are captured, in order."""
    kv_cache_error: float = 0.0
    """||difference|| / ||hidden states|| that an fp8 KV cache makes on this model; 0: the cache is not fp8"""
    kv_cache_remedy: str = ""
    """the types of cache that this model can live with, where that is too far"""
    demoted: list[str] = []
    """Kernels, graphs and the like that disagreed with their references at load, and do not serve."""
    shortfall: str = ""
    """What the allocator said to what was last tried (the plan's largest step, or its cache); empty: it fits."""
