"""Rows of decodes with drafts: what a step of 8 requests costs where each runs three guessed tokens beside its last."""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median
from typing import Any

from h200_parts.offline import INPUT, OUTPUT, Bench, Emit
from h200_parts.rows import Result

BATCH = 8
NUM_DRAFTS = (0, 3)


class Unwritten:
    """Guesses whatever its rows held before, at no cost: what is measured is the step, not a drafter."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def propose(self, batch: Any, state: Any, hidden: Any) -> None:
        pass


def draft_rows(bench: Bench, emit: Emit) -> None:
    """Leaves the engine with drafts, so it comes last."""
    settings, name = bench.settings, bench.model.name
    input_len, output_len = settings.tokens(INPUT), settings.tokens(OUTPUT)
    for num_drafts in NUM_DRAFTS:
        use_drafts(bench.llm, num_drafts)
        prompts = bench.prompts(settings.requests(BATCH), input_len)
        whole, first = bench.whole_and_first(prompts, output_len, settings.repeats)
        steps = count_steps(bench, prompts, output_len) - count_steps(bench, prompts, 1)
        samples = [1000 * (end - start) / steps for end, start in zip(whole, first, strict=True)]
        tokens = len(prompts) * (output_len - 1)
        notes = [f"{tokens / steps / len(prompts):.2f} tokens a request and step"]
        emit(Result(f"drafts/{name}/{num_drafts}", median(samples), samples, {"output": tokens}, notes=notes))


def use_drafts(llm: Any, num_drafts: int) -> None:
    """Give an engine that is idle other rows, graphs and as many guesses a decode."""
    from headrace.runner.model_runner import ModelRunner

    core = llm._client._core
    worker = core._executor._worker
    runner, config = worker.runner, core.scheduler.config
    graphs = runner.graph_settings and replace(runner.graph_settings, decode_len=1 + num_drafts)
    given = runner.model, runner.kernels, runner.shape, runner.limits, runner.device, graphs
    runner.graphs = None  # which know the runner, and keep its cache
    worker.runner = runner = None
    gc.collect()
    worker.memory.give_back()
    worker.runner = ModelRunner(*given, drafter=Unwritten(num_drafts) if num_drafts else None)
    worker.runner.allocate(config.num_pages)
    core.scheduler.config = replace(config, num_drafts=num_drafts)


def count_steps(bench: Bench, prompts: list[list[int]], output_len: int) -> int:
    scheduler = bench.llm._client._core.scheduler
    before: int = scheduler._next_step
    bench.run(prompts, output_len)
    after: int = scheduler._next_step
    return after - before
