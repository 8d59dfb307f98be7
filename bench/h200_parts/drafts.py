"""Measures decodes whose next tokens an EAGLE-3 head or n-grams guess, where a script says how many guesses are right:
weights are random, so that none would be by itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from msgspec import structs

from h200_parts.offline import INPUT, OUTPUT, Bench
from h200_parts.rows import Result
from headrace.planner.draft_costs import DraftCosts
from headrace.planner.served import deployment_of
from headrace.sampling_params import SamplingParams
from headrace.scheduler.draft_length import DraftLength
from headrace.spec_decode.drafter import Drafter, rows_of, shortened
from headrace.spec_decode.ngram import NgramDrafter

ADAPTIVE, RATE = (0, 2, 3), 0.4
"""Numbers of guesses that a step may have, and how often one is right if those before it were"""
GUESSES, LOOKED_UP = 3, 5
"""tokens that a head guesses, and that are looked up"""
ALLOWED, OTHER = 7, 11
"""Tokens: the one that a forced request writes, and one that it does not."""
FORCED = SamplingParams(temperature=0.0, allowed_token_ids=[ALLOWED], ignore_eos=True, detokenize=False)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
RANDOM = SamplingParams(temperature=1.0, seed=0, ignore_eos=True, detokenize=False)
"""Writes what cannot be looked up: a model of random weights draws any of its tokens"""
Script = Callable[[Any, Any], Any]
"""(numbers from 0 to 65535 that look random # [R, k], places 0 to k - 1 # [k]) -> which guesses are right # [R, k]"""


class Scripted:
    """Lets a drafter guess, at its cost and that of some small kernels, and then puts in place of its guesses such that
    a FORCED request accepts those that the script calls right."""

    def __init__(self, drafter: Drafter, script: Script) -> None:
        self.drafter, self.script, self.num_drafts = drafter, script, drafter.num_drafts
        self.num_layers, self.taps, self.most_lag = drafter.num_layers, drafter.taps, drafter.most_lag
        self.hidden_states, self.fill, self.catch_up = drafter.hidden_states, drafter.fill, drafter.catch_up

    def propose(self, tables: Any, batch: Any, sampled: Any) -> Any:
        import torch

        last = shortened(self.drafter, self.num_drafts).propose(tables, batch, sampled)
        if self.num_drafts:
            rows = rows_of(batch, sampled).long()[:, None]
            place = torch.arange(self.num_drafts, device=rows.device)
            known = tables.num_known[rows] + place
            mixed = known * 2654435761 + rows * 40503  # so that no graph needs a generator of random numbers
            mixed = ((mixed ^ (mixed >> 15)) * 2246822519 >> 16) & 0xFFFF
            wrong = ~self.script(mixed, place)
            tables.token_table[rows, known] = (ALLOWED + (OTHER - ALLOWED) * wrong).int()
        return last


def first_right(count: int, mixed: Any, place: Any) -> Any:
    """Call the first `count` guesses right."""
    return (mixed >= 0) & (place < count)


def one_or_two_right(mixed: Any, place: Any) -> Any:
    """Call one guess right or, as often, two: 2.5 tokens a step."""
    return place < 1 + (mixed[:, :1] & 1)


def with_chance(rate: float, mixed: Any, place: Any) -> Any:
    """Call each guess right with a chance of `rate`."""
    return mixed < int(rate * 65536)


def draft_rows(bench: Bench) -> None:
    """Time steps and tokens without and with guesses of a head. Leaves the engine with guesses, so it comes last."""
    name, core = bench.model.name, bench.core
    head = head_of(core)
    for batch in bench.model.drafted:
        use_drafts(core, None)
        time_steps(bench, f"drafts/{name}/0/{batch}", batch)
        time_tokens(bench, f"drafts/{name}/plain/{batch}", batch, FORCED)
        # whatever the rows held before, at no cost: the step is measured, not a drafter
        use_drafts(core, NgramDrafter(GUESSES, 2, 4, lambda *_: None))
        verifying = time_steps(bench, f"drafts/{name}/3/{batch}", batch)
        use_drafts(core, head)
        both = time_steps(bench, f"drafts/{name}/3-by-head/{batch}", batch)
        bench.emit(Result(f"drafts/{name}/pass/{batch}", (both - verifying) / GUESSES))
        use_drafts(core, Scripted(head, one_or_two_right))
        time_tokens(bench, f"drafts/{name}/eagle3/{batch}", batch, FORCED)
    if bench.model.loaded:
        seldom_right_rows(bench, (*bench.model.drafted, *bench.model.loaded))
        looked_up_rows(bench, name)


def seldom_right_rows(bench: Bench, batches: tuple[int, ...]) -> None:
    """Time tokens where few guesses are right: with as many guesses in every step, and with as many as pay."""
    name, core = bench.model.name, bench.core
    drafter = Scripted(head_of(core), partial(with_chance, RATE))
    for batch in batches:
        times = 1
        if batch in bench.model.loaded:
            times = 4
            use_drafts(core, None)
            warm_up(core, batch)
            time_tokens(bench, f"drafts/{name}/plain/{batch}", batch, FORCED, times)
        for kind, length in (("fixed", None), ("adaptive", adapts(bench))):
            use_drafts(core, drafter, length)
            if times > 1:
                warm_up(core, batch)
            time_tokens(bench, f"drafts/{name}/{kind}/{batch}", batch, FORCED, times)
            if length is not None:
                found = {key: (one.steps, round(one.ratio, 2)) for key, one in length._observed.items()}
                print(f"by (guesses, bits of the requests), steps observed, and their seconds over predicted: {found}")


def warm_up(core: Any, most: int) -> None:
    """Capture decodes of up to `most` requests, as a server does while it is idle: some requests end before others
    where guesses are right, and numbers of requests come up that did not before."""
    settings = core._executor._worker.runner.graph_settings
    if settings is not None:
        sizes = [size for size in settings.decode_sizes if size <= most]
        core._warmup_sizes.clear()  # of the sizes that the engine began with most do not come up here
        core._warmup_sizes.extend((size, size * length) for length in settings.decode_lens for size in sizes[::-1])
        while core.warm_up():
            pass


def looked_up_rows(bench: Bench, name: str) -> None:
    """Time tokens of one request that are looked up: of 5 guesses 4 are right; or none, as what it draws is nowhere."""
    core = bench.core
    looks_up = NgramDrafter(LOOKED_UP, 2, 4, core._executor._worker.kernels.propose_ngram)
    use_drafts(core, Scripted(looks_up, partial(first_right, 4)))
    time_tokens(bench, f"drafts/{name}/ngram-4-of-5/1", 1, FORCED)
    use_drafts(core, None)
    time_tokens(bench, f"drafts/{name}/plain-random/1", 1, RANDOM)
    use_drafts(core, looks_up)
    time_tokens(bench, f"drafts/{name}/ngram-none/1", 1, RANDOM)


def head_of(core: Any) -> Any:
    """Return the drafter of the engine's head."""
    from headrace.spec_decode.head import HeadDrafter

    worker = core._executor._worker
    context = worker.draft_context
    return HeadDrafter(worker.draft, context.specs, GUESSES, context.dtype, worker.kernels)


def time_steps(bench: Bench, name: str, batch: int) -> float:
    """Emit and return the milliseconds of a step of GREEDY requests. Time and steps are of the same runs, for a guess
    may be right by chance, and then a run takes fewer steps."""
    runs = several(bench, batch, GREEDY)
    samples = [1000 * seconds / steps for seconds, steps in runs.timed]
    bench.emit(Result(name, median(samples), samples, {"output": runs.tokens}, notes=[runs.note]))
    return median(samples)


def time_tokens(bench: Bench, name: str, batch: int, params: SamplingParams, times: int = 1) -> None:
    """Emit output tokens a second of runs that are `times` as long as others: where guesses adapt it takes a while
    until it is known what pays."""
    runs = several(bench, batch, params, times)
    rates = [runs.tokens / len(runs.timed) / seconds for seconds, _ in runs.timed]
    bench.emit(Result(name, median(rates), rates, {"output": runs.tokens}, notes=[runs.note]))


@dataclass(frozen=True)
class Runs:
    """Holds what some runs of the same requests took, without their prompts."""

    timed: list[tuple[float, int]]
    """seconds and steps of each"""
    tokens: int
    """of all runs together"""
    note: str


def several(bench: Bench, batch: int, params: SamplingParams, times: int = 1) -> Runs:
    """Run `batch` requests some times, and twice before to warm up: a graph size is captured at its second use."""
    settings, watch = bench.settings, bench.core._watch
    output_len = times * settings.tokens(OUTPUT)
    prompts = bench.prompts(settings.requests(batch), settings.tokens(INPUT))
    finished, seconds, found = watch.finished, list[float](), []
    for _ in range(2 + settings.repeats):
        first, _ = timed(bench, prompts, 1, params)
        seconds.clear()
        watch.finished = partial(kept_of, seconds, finished)
        whole, count = timed(bench, prompts, output_len, params)
        del watch.finished
        found.append((whole - first, count - 1))
    kept = found[2:]
    tokens = len(kept) * len(prompts) * (output_len - 1)
    each, slow = tokens / sum(steps for _, steps in kept) / len(prompts), sorted(seconds)[int(0.99 * len(seconds))]
    note = f"{each:.2f} tokens a request and step; of the last run's steps 99% take at most {1000 * slow:.2f} ms"
    return Runs(kept, tokens, note)


def kept_of(times: list[float], finished: Callable[..., float], *step: Any) -> float:
    """Return the seconds of a finished step, which `times` keeps."""
    times.append(finished(*step))
    return times[-1]


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
