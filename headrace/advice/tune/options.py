"""Defines the flags of `headrace tune` beside the engine's: the load, the time it may take, and where results go."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.knobs import check_knobs, knob
from headrace.planner.profile import Workload


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Holds what the user asked of a tuning session; a trial reads the load from it."""

    input_len: int = knob(1024, "Tokens of a prompt.", minimum=1, group="tuning")
    output_len: int = knob(128, "Tokens of an answer.", minimum=1, group="tuning")
    num_prompts: int = knob(200, "Requests of each measurement.", minimum=1, group="tuning")
    request_rate: float | None = knob(
        None,
        "Also measure latencies at this many requests a second; default: under full load alone.",
        minimum=1e-9,
        group="tuning",
    )
    concurrency: int | None = knob(
        None,
        "Most requests in flight under full load; default: all at once.",
        minimum=1,
        aliases=("--max-concurrency",),
        group="tuning",
    )
    budget: str = knob("10m", "Start no trial that would end after this (90s, 10m, 1h).", group="tuning")
    knobs: str | None = knob(
        None,
        "What to vary, separated by commas: max_num_batched_tokens, max_num_seqs, cudagraph_mode, kv_cache_dtype, "
        "attention_backend, speculative_config; default: all. An fp8 cache is lossy: it is measured last, and wins "
        "under --objective throughput alone.",
        group="tuning",
    )
    output: str | None = knob(
        None, "Folder of trials.jsonl and report.html; default: in the cache folder.", group="tuning"
    )
    fresh: bool = knob(False, "Measure again what an earlier run has measured.", group="tuning")
    json: bool = knob(False, "Print JSON.", group="tuning")

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def requests_at_once(self) -> int:
        """The requests in flight under full load."""
        return min(self.num_prompts, self.concurrency or self.num_prompts)

    @property
    def workload(self) -> Workload:
        """The load as a profile keeps it."""
        return Workload(
            input_len=self.input_len,
            output_len=self.output_len,
            concurrency=self.concurrency,
            request_rate=self.request_rate,
        )
