"""Measures decode steps with drafts: what a step of 8 requests costs where each verifies three drafted tokens."""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median
from typing import Any

from h200_parts.offline import INPUT, OUTPUT, Bench
from h200_parts.rows import Result

BATCH = 8
NUM_DRAFTS = (0, 3)


class StaleDrafter:
    """Drafts whatever its rows held before, at no cost: the step is measured, not a drafter."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def propose(self, batch: Any, state: Any, hidden: Any) -> None:
        pass


def draft_rows(bench: Bench) -> None:
    """Time steps without and with drafts. Leaves the engine with drafts, so it comes last.

    Time and steps are of the same runs: a stale draft may be accepted by chance, and then a run takes fewer steps.
    """
    settings, name = bench.settings, bench.model.name
    input_len, output_len = settings.tokens(INPUT), settings.tokens(OUTPUT)
    for num_drafts in NUM_DRAFTS:
        use_drafts(bench.core, num_drafts)
        prompts = bench.prompts(settings.requests(BATCH), input_len)
        for length in (1, output_len, 1, output_len):  # a graph size is captured at its second use
            bench.run(prompts, length)
        samples, steps = [], 0
        for _ in range(settings.repeats):
            first, _ = timed(bench, prompts, 1)
            whole, count = timed(bench, prompts, output_len)
            samples.append(1000 * (whole - first) / (count - 1))
            steps += count - 1
        tokens = len(prompts) * (output_len - 1) * settings.repeats
        notes = [f"{tokens / steps / len(prompts):.2f} tokens a request and step"]
        bench.emit(Result(f"drafts/{name}/{num_drafts}", median(samples), samples, {"output": tokens}, notes=notes))


def timed(bench: Bench, prompts: list[list[int]], output_len: int) -> tuple[float, int]:
    """Return the seconds and steps of a run. Steps in flight when the last request ended compute nothing of it."""
    before: int = bench.core.scheduler._next_step
    seconds, _ = bench.run(prompts, output_len)
    return seconds, bench.core.scheduler._next_step - before


def use_drafts(core: Any, num_drafts: int) -> None:
    """Give the core of an idle engine a new runner, whose rows and graphs have `num_drafts` drafts a decode."""
    from headrace.runner.model_runner import ModelRunner

    worker = core._executor._worker
    runner, config = worker.runner, core.scheduler.config
    graphs = runner.graph_settings and replace(runner.graph_settings, decode_len=1 + num_drafts)
    given = runner.model, runner.kernels, runner.shape, runner.limits, runner.device, graphs
    runner.graphs = None  # they refer to the runner, and so would keep its cache
    worker.runner = runner = None
    gc.collect()
    worker.memory.empty_cache()
    worker.runner = ModelRunner(*given, drafter=StaleDrafter(num_drafts) if num_drafts else None)
    worker.runner.allocate(config.num_pages)
    core.scheduler.config = replace(config, num_drafts=num_drafts)
