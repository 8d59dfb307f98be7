"""Finds the layout, and its limits, that serve a workload best: every allowed layout is mapped, predicted and ranked.

The rules of models are in layouts.py, bytes in memory_map.py, times in predict.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headrace.planner.chips import GIB
from headrace.planner.cost import StepWork, step_model
from headrace.planner.decisions import mixed_step, sequences, token_budget
from headrace.planner.deployment import Deployment
from headrace.planner.engines import layout_gaps
from headrace.planner.layouts import PINS, layouts, name_of, reasons
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.parallel import Parallel
from headrace.planner.plan_request import PlanRequest
from headrace.planner.predict import CLOSED_ROUNDS, Limits, Prediction, Workload, predict
from headrace.planner.record import Decision
from headrace.planner.scenario import USUAL_CONCURRENCY, Scenario
from headrace.planner.shapes import expert_share
from headrace.planner.simulate import OPEN_SECONDS, Simulation, TooLongError, simulate

READING_PACE_MS = 50.0
"""Time between tokens that is twice as fast as people read."""
FIRST_TOKEN_MS = 2000.0
ABOUT_THE_SAME = 0.02
"""Of layouts that are predicted to be this near to each other, the simplest is taken."""
VLLM_BUDGETS = {"latency": (1024, 2048, 4096), "interactive": (2048, 4096, 8192), "throughput": (8192, 16384)}
"""Token budgets worth asking vLLM for; its steps with decodes are as large as its largest."""
SMALLER_BUDGETS = (8192, 4096, 2048, 1024)
"""Token budgets that are tried where the cache is short."""
SHORTENINGS = 8
"""How often a context that the cache does not hold is made shorter."""
MOST_SIMULATED = 1000
"""Requests of one rank, or steps with their prompts, whose simulation is worth waiting for unasked."""
PATIENCE = 100_000
"""Most requests gone through in such a simulation (simulate.py): a quarter of a second."""
MIXED_SIZES = (128, 256, 384, 512, 768, 1024, 2048)
"""as headrace measures them at load (runner/profile.py)"""


@dataclass(frozen=True)
class Candidate:
    """Holds a layout with its limits, and what it is predicted to give."""

    deployment: Deployment
    memory: MemoryMap
    workload: Workload
    limits: Limits
    """of one data-parallel rank"""
    max_model_len: int
    decisions: dict[str, Decision]
    """how the limits came about, by field"""
    prediction: Prediction

    @property
    def parallel(self) -> Parallel:
        return self.deployment.parallel

    @property
    def name(self) -> str:
        return name_of(self.parallel)


@dataclass(frozen=True)
class TooLarge:
    """Says by how much a layout exceeds the memory."""

    why: str
    missing: int
    """bytes on one GPU"""
    by_weights: bool
    """whether weights alone do, so that no smaller step makes room"""


@dataclass(frozen=True)
class SearchResult:
    """Ranks the layouts that run, and says why the others do not."""

    ranked: list[Candidate]
    """best first; empty: nothing runs"""
    passed_over: dict[str, str] = field(default_factory=dict)
    """layout -> why it does not run"""
    too_large: list[str] = field(default_factory=list)
    """those of `passed_over` that only memory forbids; the one nearest to fitting is first"""

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


def search(scenario: Scenario) -> SearchResult:
    """Rank every layout of `scenario.num_gpus` GPUs that rules, pins and memory allow."""
    request = scenario.request
    passed_over: dict[str, str] = {}
    missing: dict[str, int] = {}
    candidates: list[Candidate] = []
    ranks = request.data_parallel_size or (None if request.request_rate else scenario.concurrency)
    every = layouts(scenario.num_gpus, scenario.shape, ranks)
    pinned = {ours: getattr(request, name) for name, ours in PINS.items() if getattr(request, name) is not None}
    allowed = [one for one in every if all(getattr(one, name) == value for name, value in pinned.items())]
    for stages in sorted({parallel.pp for parallel in allowed}):
        # Pipeline stages wait for each other, so more of them are looked at only where fewer do not fit.
        for parallel in allowed:
            if parallel.pp != stages:
                continue
            name, why = name_of(parallel), reasons(parallel, scenario.shape, scenario.chip)
            if scenario.engine == "headrace":
                why += layout_gaps(parallel, scenario.chip)
            if why:
                passed_over[name] = "; ".join(why)
                continue
            outcome = evaluate(scenario, parallel)
            if isinstance(outcome, Candidate):
                candidates.append(outcome)
            else:
                passed_over[name], missing[name] = outcome.why, outcome.missing
        if candidates:
            break
    too_large = [f"{name}: {passed_over[name]}" for name in sorted(missing, key=lambda name: missing[name])]
    return SearchResult(_ranked(scenario, candidates), passed_over, too_large)


def evaluate(scenario: Scenario, parallel: Parallel) -> Candidate | TooLarge:
    """Return the best candidate of a layout, or why there is none.

    Of requests that come at a rate, as many run at once as come while one is answered, and as many again.
    """
    outcome = _with_best_budget(scenario, parallel)
    rate = None if scenario.request.concurrency else scenario.request.request_rate
    if rate is None:
        return outcome
    coming = USUAL_CONCURRENCY["interactive"]
    if isinstance(outcome, Candidate):
        coming = math.ceil(2 * rate * outcome.prediction.e2e_s)
        if coming >= outcome.workload.concurrency:
            return outcome
    return _with_best_budget(scenario.asking(concurrency=coming), parallel)


def _with_best_budget(scenario: Scenario, parallel: Parallel) -> Candidate | TooLarge:
    """Where the cache is what bounds a layout, smaller steps leave more of it."""
    request = scenario.request
    deployment = Deployment(
        scenario.shape, scenario.chip, parallel, scenario.weight_format, scenario.kv_bytes, scenario.engine,
        scenario.draft,
    )  # fmt: skip
    usual = _budget(scenario, deployment)
    best = _with_budget(scenario, deployment, usual)
    fixed = usual.source == "user" or not request.enable_chunked_prefill or scenario.chip.vendor == "cpu"
    if fixed or (isinstance(best, TooLarge) and best.by_weights):
        return best
    for size in SMALLER_BUDGETS:
        if isinstance(best, Candidate) and not best.decisions["max_num_seqs"].runner_up:
            break
        if (request.max_num_seqs or 0) <= size < usual.value:
            why = f"the cache is short, and a step of {usual.value} tokens takes more from it"
            smaller = _with_budget(scenario, deployment, Decision(usual.field, size, why, str(usual.value)))
            if isinstance(smaller, Candidate) and (isinstance(best, TooLarge) or _beats(request, smaller, best)):
                best = smaller
    return best


def _beats(request: PlanRequest, one: Candidate, other: Candidate) -> bool:
    reached = score(request.objective, other.prediction)
    return score(request.objective, one.prediction) - reached > ABOUT_THE_SAME * abs(reached)


def _with_budget(scenario: Scenario, deployment: Deployment, budget: Decision) -> Candidate | TooLarge:
    request, ranks = scenario.request, deployment.parallel.dp
    concurrency = scenario.concurrency
    expected = None if concurrency is None else -(-concurrency // ranks)
    seqs = Decision("max_num_seqs", request.max_num_seqs, "given", source="user")
    if request.max_num_seqs is None:
        seqs = Decision("max_num_seqs", *sequences(scenario.chip.device_type, budget.value, expected))
    memory = _map(scenario, deployment, budget.value, seqs.value, scenario.longest)
    if not memory.fits:
        return TooLarge(_why_too_large(scenario, memory), memory.missing, memory.weight_bytes > memory.usable)
    memory = _with_longest_context(scenario, deployment, budget.value, seqs.value)
    # Of longer sequences the cache holds more, where windows give back what they have passed.
    size = scenario.block_size
    kv_tokens = max(-(-scenario.tokens // size) * size, memory.tokens_in(scenario.tokens))
    held = max(1, int(kv_tokens / (request.prompt_len + request.answer_len / 2)))
    if request.max_num_seqs is None and held < seqs.value:
        why = "requests that the cache holds, each with its prompt and half its answer; more would preempt others"
        seqs = Decision("max_num_seqs", held, why, str(seqs.value))
    if concurrency is None:
        concurrency = seqs.value * ranks
    workload = Workload(request.prompt_len, request.answer_len, concurrency, request.num_prompts, request.request_rate)
    decisions = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    if scenario.engine == "headrace" and request.enable_chunked_prefill:
        sizes = [size for size in MIXED_SIZES if size <= budget.value] or [budget.value]
        times = _step_times(deployment, sizes, request.prompt_len)
        decisions["mixed_step_tokens"] = mixed_step(times, request.objective, "derived")
    limits = Limits(
        max_num_seqs=seqs.value,
        max_num_batched_tokens=budget.value,
        kv_tokens=kv_tokens,
        block_size=size,
        mixed_step_tokens=decisions["mixed_step_tokens"].value if "mixed_step_tokens" in decisions else None,
        enable_chunked_prefill=request.enable_chunked_prefill,
    )
    prediction = predict(deployment, workload, limits)
    return Candidate(deployment, memory, workload, limits, memory.longest, decisions, prediction)


def simulated(candidate: Candidate, full: bool) -> tuple[Candidate, Simulation | None]:
    """Return the candidate with what the scheduler makes of the workload, step by step if `full`.

    Where the simulation would take too long, the candidate stays as it was predicted.
    """
    workload, limits = candidate.workload, candidate.limits
    coming = workload.request_rate * OPEN_SECONDS if workload.request_rate else CLOSED_ROUNDS * workload.concurrency
    requests = (workload.num_prompts or coming) / candidate.parallel.dp
    chunks = workload.input_len / min(limits.max_num_batched_tokens, limits.mixed_step_tokens or math.inf)
    if not full and requests * max(1.0, chunks) > MOST_SIMULATED:
        return candidate, None
    # No more cache than can ever be in use, as blocks cost the simulator time.
    blocks = -(-(workload.input_len + workload.output_len) // limits.block_size) + 1
    most = min(limits.max_num_seqs, workload.concurrency if workload.request_rate is None else limits.max_num_seqs)
    useful = replace(limits, kv_tokens=min(limits.kv_tokens, (most + 1) * blocks * limits.block_size))
    patience = math.inf if full else PATIENCE
    try:
        run = simulate(candidate.deployment, workload, useful, full=full, patience=patience)
    except TooLongError:
        return candidate, None
    prediction = replace(
        candidate.prediction,
        ttft_ms=1000 * run.ttft.p50,
        itl_ms=1000 * run.itl.mean,
        e2e_s=run.e2e.mean,
        output_tok_s=run.output_tok_s,
        total_tok_s=run.total_tok_s,
    )
    return replace(candidate, prediction=prediction), run


def _with_longest_context(scenario: Scenario, deployment: Deployment, budget: int, seqs: int) -> MemoryMap:
    """The map for the longest sequence that the cache holds, at most the context. One of `scenario.longest` fits."""
    length = scenario.context
    for _ in range(SHORTENINGS):
        memory = _map(scenario, deployment, budget, seqs, length)
        if memory.fits:
            return memory
        if memory.kv_tokens <= scenario.longest:
            break
        length = min(memory.kv_tokens, length - scenario.block_size)
    return _map(scenario, deployment, budget, seqs, scenario.longest)


def _map(scenario: Scenario, deployment: Deployment, budget: int, seqs: int, longest: int) -> MemoryMap:
    request = scenario.request
    return memory_map(
        deployment,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        gpu_memory_utilization=request.gpu_memory_utilization,
        block_size=scenario.block_size,
        graph_mode=scenario.graph_mode,
        speculates=bool(request.speculative_config) and scenario.shape.spec.draft_weights > 0,
        decode_lens=scenario.decode_lens,
    )


def _why_too_large(scenario: Scenario, memory: MemoryMap) -> str:
    usable = f"{memory.usable / GIB:.0f} GiB of each GPU may be used"
    if memory.weight_bytes > memory.usable:
        return f"weights take {memory.weight_bytes / GIB:.0f} GiB on each GPU; {usable}"
    return (
        f"{memory.missing / GIB:.1f} GiB are missing on each GPU for one sequence of {scenario.longest} tokens; the "
        f"cache has room for {memory.kv_tokens}"
    )


def _budget(scenario: Scenario, deployment: Deployment) -> Decision:
    request, chip, field = scenario.request, scenario.chip, "max_num_batched_tokens"
    if request.max_num_batched_tokens is not None:
        return Decision(field, request.max_num_batched_tokens, "given", source="user")
    chunked, seqs = request.enable_chunked_prefill, request.max_num_seqs
    if scenario.engine == "headrace" or chip.vendor == "cpu" or not chunked:
        share = expert_share(scenario.shape.spec)
        return Decision(field, *token_budget(chip.device_type, chunked, scenario.context, seqs, share))
    sizes = [size for size in VLLM_BUDGETS[request.objective] if size >= (seqs or 0)]
    if not sizes:
        return Decision(field, seqs, "every running request gets a token in every step")
    return mixed_step(_step_times(deployment, sizes, request.prompt_len), request.objective, "derived", field)


def _step_times(deployment: Deployment, sizes: Iterable[int], input_len: int) -> dict[int, float]:
    """Milliseconds of steps with so many prompt tokens on each rank."""
    model, ranks = step_model(deployment), deployment.parallel.dp

    def milliseconds(size: int) -> float:
        work = StepWork(0, 0.0, size, min(size, input_len) / 2, -(-size // input_len))
        return 1000 * model.seconds(work.times(ranks))

    return {size: milliseconds(size) for size in sizes}


def _ranked(scenario: Scenario, candidates: list[Candidate]) -> list[Candidate]:
    """Best first; of those about as good as the best, the simplest is first."""
    if not candidates:
        return []

    def reached(candidate: Candidate) -> float:
        return score(scenario.request.objective, candidate.prediction)

    def waits(candidate: Candidate) -> tuple[int, ...]:
        """Fewer ranks that wait for each other come first, then fewer GPUs."""
        parallel = candidate.parallel
        return parallel.pp, parallel.dp_attention + parallel.ep, parallel.tp, parallel.gpus

    ordered = sorted(candidates, key=reached, reverse=True)
    first = ordered[0]
    enough = reached(first) - ABOUT_THE_SAME * abs(reached(first))
    best = min((one for one in ordered if reached(one) >= enough), key=waits)
    return [best, *(candidate for candidate in ordered if candidate is not best)]


def score(objective: str, prediction: Prediction) -> float:
    """Score how well a prediction meets an objective; higher is better.

    For interactive use a layout that keeps the reading pace scores its throughput, and one that does not scores below
    zero, the less the further it is behind.
    """
    if objective == "latency":
        return -prediction.e2e_s
    if objective == "throughput":
        return prediction.output_tok_s
    behind = max(prediction.itl_ms / READING_PACE_MS, prediction.ttft_ms / FIRST_TOKEN_MS)
    return prediction.output_tok_s if behind <= 1 else -behind
