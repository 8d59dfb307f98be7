"""Measures decode steps with drafts, and tokens where a known share of the drafts is right."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from statistics import median
from typing import Any

from msgspec import structs

from h200_parts.offline import INPUT, OUTPUT, Bench
from h200_parts.rows import Result
from headrace.planner.draft_costs import DraftCosts
from headrace.planner.served import deployment_of
from headrace.sampling_params import SamplingParams
from headrace.scheduler.draft_length import DraftLength
from headrace.spec_decode.drafter import rows_of
from headrace.spec_decode.ngram import NgramDrafter

BATCHES = (1, 8, 32)
LOADED = (128, 256)
"""Requests at once for which it depends on what is right whether guessing pays"""
ADAPTIVE, RATE = (0, 2, 3), 0.4
"""Numbers of guesses that a step may have, and how often one is right if those before it were"""
LOOKED_UP = 5
ALLOWED, OTHER = 7, 11
"""Tokens: the one that a forced request writes, and one that it does not."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
RANDOM = SamplingParams(temperature=1.0, seed=0, ignore_eos=True, detokenize=False)
"""Writes what cannot be looked up: a model of random weights draws any of its tokens"""
FORCED = SamplingParams(temperature=0.0, allowed_token_ids=[ALLOWED], ignore_eos=True, detokenize=False)


class StaleDrafter:
    """Drafts whatever its rows held before, at no cost: the step is measured, not a drafter."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.num_layers = 0
        self.taps = False

    def hidden_states(self, num_tokens: int, device: Any) -> None:
        pass

    def fill(self, input_ids: Any, metadata: Any, tables: Any) -> None:
        pass

    def propose(self, tables: Any, batch: Any, sampled: Any) -> None:
        pass


class ForcedDrafter(StaleDrafter):
    """Drafts of which `right` are what a FORCED request writes, and the next is not, at the cost of three kernels."""

    def __init__(self, num_drafts: int, right: int) -> None:
        super().__init__(num_drafts)
        self.guesses = [ALLOWED] * right + [OTHER] * (num_drafts - right)

    def propose(self, tables: Any, batch: Any, sampled: Any) -> None:
        import torch

        if isinstance(self.guesses, list):
            self.guesses = torch.tensor(self.guesses, dtype=torch.int32, device=batch.rows.device)
            self.places = torch.arange(self.num_drafts, device=batch.rows.device)
        rows = rows_of(batch, sampled).long()
        tables.token_table[rows[:, None], tables.num_known[rows, None] + self.places] = self.guesses


class ChanceDrafter(ForcedDrafter):
    """Drafts of which each is what a FORCED request writes with a chance of `rate`, at the cost of some kernels."""

    def __init__(self, num_drafts: int, rate: float) -> None:
        super().__init__(num_drafts, 0)
        self.rate = rate

    def propose(self, tables: Any, batch: Any, sampled: Any) -> None:
        import torch

        rows = rows_of(batch, sampled).long()
        chance = torch.rand(len(rows), self.num_drafts, device=rows.device)
        places = tables.num_known[rows, None] + torch.arange(self.num_drafts, device=rows.device)
        tables.token_table[rows[:, None], places] = torch.where(chance < self.rate, ALLOWED, OTHER).int()


def draft_rows(bench: Bench) -> None:
    """Time steps without and with drafts, and tokens where a known share of guesses is right. Leaves the engine with
    drafts, so it comes last.

    Time and steps are of the same runs: a stale draft may be accepted by chance, and then a run takes fewer steps.
    """
    name = bench.model.name
    for num_drafts in (0, 3):
        use_drafts(bench.core, StaleDrafter(num_drafts) if num_drafts else None)
        for batch in BATCHES:
            time_steps(bench, f"drafts/{name}/{num_drafts}/{batch}", batch, GREEDY)
    for right in (0, 1, 2):
        use_drafts(bench.core, ForcedDrafter(3, right))
        for batch in BATCHES:
            time_steps(bench, f"drafts/{name}/right-{right}-of-3/{batch}", batch, FORCED)
    propose = bench.core._executor._worker.kernels.propose_ngram
    for drafter, label in ((None, "plain"), (NgramDrafter(LOOKED_UP, 2, 4, propose), "ngram")):
        use_drafts(bench.core, drafter)
        time_steps(bench, f"drafts/{name}/{label}-none/1", 1, RANDOM)
        time_steps(bench, f"drafts/{name}/{label}-all/1", 1, FORCED)
        for batch in BATCHES[1:] if drafter is None else ():
            time_steps(bench, f"drafts/{name}/{label}-all/{batch}", batch, FORCED)
    for batch in LOADED:
        use_drafts(bench.core, None)
        time_tokens(bench, f"drafts/{name}/plain/{batch}", batch)
        use_drafts(bench.core, ChanceDrafter(ADAPTIVE[-1], RATE), adapts(bench))
        time_tokens(bench, f"drafts/{name}/adaptive/{batch}", batch)


def time_steps(bench: Bench, name: str, batch: int, params: SamplingParams) -> None:
    """Emit the milliseconds of a step; its note says the tokens of a step and the milliseconds of a token."""
    settings = bench.settings
    output_len = settings.tokens(OUTPUT)
    prompts = bench.prompts(settings.requests(batch), settings.tokens(INPUT))
    for length in (1, output_len, 1, output_len):  # a graph size is captured at its second use
        timed(bench, prompts, length, params)
    samples, steps = [], 0
    for _ in range(settings.repeats):
        first, _ = timed(bench, prompts, 1, params)
        whole, count = timed(bench, prompts, output_len, params)
        samples.append(1000 * (whole - first) / (count - 1))
        steps += count - 1
    tokens = len(prompts) * (output_len - 1) * settings.repeats
    each = tokens / steps / len(prompts)
    notes = [f"{each:.2f} tokens a request and step, {median(samples) / each:.3f} ms a token"]
    bench.emit(Result(name, median(samples), samples, {"output": tokens}, notes=notes))


def time_tokens(bench: Bench, name: str, batch: int) -> None:
    """Emit output tokens a second of forced requests, and the 99th percentile of steps: the median of runs that are
    four times as long as others, since it takes a while until it is known what pays."""
    settings = bench.settings
    output_len = 4 * settings.tokens(OUTPUT)
    prompts = bench.prompts(settings.requests(batch), settings.tokens(INPUT))
    watch, seconds = bench.core._watch, []
    finished = watch.finished
    rates = []
    for repeat in range(1 + settings.repeats):  # the first captures graphs
        first, _ = timed(bench, prompts, 1, FORCED)
        watch.finished = lambda *given: seconds.append(finished(*given)) or seconds[-1]
        seconds.clear()
        whole, _ = timed(bench, prompts, output_len, FORCED)
        del watch.finished
        if repeat:
            rates.append(len(prompts) * (output_len - 1) / (whole - first))
    slow = sorted(seconds)[int(0.99 * len(seconds))]
    notes = [f"99% of steps take at most {1000 * slow:.2f} ms"]
    bench.emit(Result(name, median(rates), rates, {"output": len(prompts) * output_len}, notes=notes))


def adapts(bench: Bench) -> DraftLength:
    """Return what chooses how many tokens a step guesses, by what steps cost here."""
    facts = bench.core.facts
    deployment = deployment_of(facts.config, bench.llm.model_config, facts.workers)
    return DraftLength(ADAPTIVE, DraftCosts(deployment))


def timed(bench: Bench, prompts: list[list[int]], output_len: int, params: SamplingParams) -> tuple[float, int]:
    """Return the seconds and steps of a run. Steps in flight when the last request ended compute nothing of it."""
    before: int = bench.core.scheduler._next_step
    start = time.perf_counter()
    bench.llm.generate(prompts, structs.replace(params, max_tokens=output_len), use_tqdm=False)
    return time.perf_counter() - start, bench.core.scheduler._next_step - before


def use_drafts(core: Any, drafter: Any, length: DraftLength | None = None) -> None:
    """Give the core of an idle engine a new runner, with that drafter, or none. `length`: what chooses how many tokens
    a step guesses; None: it is always as many."""
    from headrace.runner.model_runner import ModelRunner

    worker = core._executor._worker
    runner, config, num_drafts = worker.runner, core.scheduler.config, drafter.num_drafts if drafter else 0
    lengths = (num_drafts,) if length is None else length.lengths
    decode_lens = tuple(1 + one for one in lengths)
    graphs = runner.graph_settings and replace(runner.graph_settings, decode_lens=decode_lens)
    given = runner.model, runner.kernels, runner.shape, runner.limits, runner.device, graphs
    runner.graphs = None  # they refer to the runner, and so would keep its cache
    worker.runner = runner = None
    gc.collect()
    worker.memory.empty_cache()
    worker.runner = ModelRunner(*given, drafter=drafter)
    worker.runner.allocate(config.num_pages)
    core.scheduler.config = replace(config, num_drafts=num_drafts)
    core.scheduler.draft_length = length
