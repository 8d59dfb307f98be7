"""Holds the limits and policies of a scheduler, and the arithmetic that follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cache_groups import CacheLayout
from headrace.errors import ConfigError

POLICIES = ("fcfs", "priority")
BACKLOG_STEPS = 6
"""A step with decodes may take 1 / BACKLOG_STEPS of all prompt tokens that wait, once that is at least
BACKLOG_FACTOR times `mixed_step_tokens`."""
BACKLOG_FACTOR = 2


@dataclass(frozen=True)
class SchedulerConfig:
    """Holds the scheduler's limits. Raises ConfigError for limits under which some request could never run."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    layout: CacheLayout
    num_pages: int
    """Pages of the KV cache, on each rank."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    mixed_step_tokens: int | None = None
    """Tokens of a step in which requests decode, while few prompt tokens wait; None: max_num_batched_tokens."""
    look_ahead: bool = True
    """Admit a request only if it is expected to run to its end beside the others. False: admit what fits now and
    preempt later, as vLLM does."""
    num_drafts: int = 0
    """Most draft tokens that each decode computes behind its last known one."""
    draft_places: int = 0
    """Places behind the tokens of a step to which what guesses tokens may write keys and values of its own."""
    max_loras: int = 0
    """Most different adapters of a step's requests; 0: no request has one."""
    num_stages: int = 1
    """Pipeline stages, each of which computes another step at the same time."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mixed_step_tokens is not None and self.mixed_step_tokens < 1:
            raise ConfigError(f"mixed_step_tokens must be at least 1, got {self.mixed_step_tokens}")
        if self.policy not in POLICIES:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}; got {self.policy!r}")
        if self.num_drafts < 0:
            raise ConfigError(f"num_drafts must not be negative, got {self.num_drafts}")
        if self.max_num_seqs * (1 + self.num_drafts) > self.max_num_batched_tokens:
            tokens = f"a token and {self.num_drafts} drafts" if self.num_drafts else "a token"
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request gets {tokens} in every step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}) when chunked prefill is off: a prompt then runs in one step"
            )

    def end_of_decode(self, computed: int, num_drafts: int) -> int:
        """Return how many tokens a request with `computed` ones has computed after one more decode, drafts included. A
        decode goes without drafts where these would pass max_model_len: block tables and positions end there."""
        end = computed + 1 + num_drafts
        return end if end <= self.max_model_len else computed + 1

    @property
    def step_places(self) -> int:
        """Return the most places that a step writes of one request."""
        return self.max_num_batched_tokens + self.draft_places

    def places(self, end: int) -> int:
        """Return how many places a request needs in the cache that has computed `end` tokens after a step."""
        return max(end, min(end + self.draft_places, self.max_model_len))

    def prompt_budget(self, decode_tokens: int, backlog: int, num_prompts: int) -> int:
        """Return how many prompt tokens a step may compute beside `decode_tokens`.

        Every decode waits for the whole step. So a step with decodes is kept to `mixed_step_tokens`, of which prompts
        get at least half, and each of the `num_prompts` prompts at least one token. A `backlog` of many waiting prompt
        tokens raises the limit, because otherwise prompts would wait longer in all than decodes gain. It is raised by
        a factor or not at all: a step slightly over `mixed_step_tokens` has no CUDA graph and takes the host as long
        as one of twice the size. Without decodes nobody waits, and without chunked prefill a prompt that is longer
        than the limit would never run: then the whole step may be filled.
        """
        most = self.max_num_batched_tokens - decode_tokens
        if not decode_tokens or self.mixed_step_tokens is None or not self.enable_chunked_prefill:
            return most
        limit = backlog // BACKLOG_STEPS
        if limit < BACKLOG_FACTOR * self.mixed_step_tokens:
            limit = self.mixed_step_tokens
        return min(most, max(limit - decode_tokens, -(-limit // 2), num_prompts))
