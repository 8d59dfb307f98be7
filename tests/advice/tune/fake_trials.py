"""Trials whose results are written down, in place of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.advice.tune.record import Load, Result, Trial

PLAN = {
    "device": "cuda",
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "num_gpu_blocks": 100_000,
}


def load(tok_s: float, itl: float = 10.0, ttft: float = 100.0) -> Load:
    return Load(tok_s, ttft / 2, ttft, itl / 2, itl, ttft + 100 * itl)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeRun:
    """Takes `seconds` a trial; `script`: trial id -> throughput, a Load, or what went wrong."""

    def __init__(self, clock: Clock, script: dict[str, Any], seconds: float = 10.0) -> None:
        self.clock, self.script, self.seconds = clock, script, seconds
        self.ran: list[dict[str, Any]] = []
        self.before: Callable[[Trial], None] = lambda trial: None

    def __call__(self, trial: Trial, limit: float) -> Result:
        self.before(trial)
        self.ran.append(trial.changes)
        self.clock.now += self.seconds
        found = self.script.get(trial.id, 1000.0)
        if isinstance(found, str):
            return Result(trial, "failed", self.seconds, found)
        measured = load(found) if isinstance(found, float) else found
        return Result(trial, "ok", self.seconds, "", measured, None, PLAN)
