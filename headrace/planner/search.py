"""Which layout, and which limits, serve a workload best: every allowed one is mapped, predicted and ranked.

The rules of models are layouts.py's, bytes memory_map.py's, times predict.py's; here they meet. Knows nothing of how a
plan is printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headrace.planner.chips import Chip
from headrace.planner.cost import Deployment, Parallel, StepWork, step_model
from headrace.planner.decisions import mixed_step, sequences, token_budget
from headrace.planner.engines import layout_gaps
from headrace.planner.layouts import MANY_REQUESTS, copies_latent, layouts, name_of, reasons
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.plan_request import PlanRequest
from headrace.planner.predict import Prediction, Workload, predict
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape
from headrace.planner.simulate import CLOSED_ROUNDS, OPEN_SECONDS, Limits, Simulation, TooLongError, simulate

READING_PACE_MS = 50.0
"""between tokens: as fast as people read along, twice over"""
FIRST_TOKEN_MS = 2000.0
ABOUT_THE_SAME = 0.02
"""Of layouts that are predicted this near to each other, the simplest is taken."""
USUAL_CONCURRENCY = {"latency": 1, "interactive": 32}
VLLM_BUDGETS = {"latency": (1024, 2048, 4096), "interactive": (2048, 4096, 8192), "throughput": (8192, 16384)}
"""Token budgets worth asking vLLM for; its steps with decodes are as large as its largest."""
SMALLER_BUDGETS = (8192, 4096, 2048, 1024)
SHORTENINGS = 8
MOST_SIMULATED = 1000
"""Requests of one rank, or steps with their prompts, whose simulation is worth waiting for unasked,"""
PATIENCE = 100_000
"""and what it may come to in simulate.py's count: a quarter of a second"""
MIXED_SIZES = (128, 256, 384, 512, 768, 1024, 2048)
"""as headrace measures them at load (runner/step_times.py)"""


@dataclass(frozen=True)
class Terms:
    """What all candidates have in common."""

    request: PlanRequest
    shape: ModelShape
    """in the weight format of the plan"""
    chip: Chip
    num_gpus: int
    weight_format: str
    kv_dtype: str
    block_size: int
    graph_mode: str
    served_by_headrace: bool = False
    """Only layouts that headrace has today."""

    @property
    def engine(self) -> str:
        return self.request.engine

    @property
    def kv_bytes(self) -> float:
        return 1.0 if self.kv_dtype.startswith("fp8") else 4.0 if self.kv_dtype == "float32" else 2.0

    @property
    def concurrency(self) -> int | None:
        """over all replicas; None: as much as the cache holds"""
        usual = None if self.request.request_rate else USUAL_CONCURRENCY.get(self.request.objective)
        return self.request.concurrency or usual

    @property
    def tokens(self) -> int:
        """of one request at its end"""
        return self.request.prompt_len + self.request.answer_len

    @property
    def mean_tokens(self) -> float:
        """of one request over its life"""
        return self.request.prompt_len + self.request.answer_len / 2

    @property
    def longest(self) -> int:
        """The sequence that has to fit."""
        return max(self.request.max_model_len or 0, self.tokens)

    @property
    def context(self) -> int:
        return self.request.max_model_len or self.shape.spec.max_position_embeddings


@dataclass(frozen=True)
class Candidate:
    """A layout with its limits, and what it is predicted to give."""

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
class Short:
    """A layout for which there is not enough memory."""

    why: str
    missing: int
    """bytes on one GPU"""


@dataclass(frozen=True)
class Found:
    ranked: list[Candidate]
    """best first; empty: nothing runs"""
    passed_over: dict[str, str] = field(default_factory=dict)
    """layout -> why not"""
    short: list[str] = field(default_factory=list)
    """of these, what memory alone forbids; the nearest to fitting is first"""

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


def search(terms: Terms) -> Found:
    """Every layout of `terms.num_gpus` that rules, pins and memory allow, best first."""
    passed_over: dict[str, str] = {}
    short: dict[str, int] = {}
    candidates: list[Candidate] = []
    ranks = None if terms.request.request_rate else terms.concurrency
    if terms.request.data_parallel_size is not None:
        ranks = terms.request.data_parallel_size
    every = layouts(terms.num_gpus, terms.shape, ranks)
    everything = [parallel for parallel in every if _pinned(parallel, terms.request)]
    for stages in sorted({parallel.pp for parallel in everything}):
        # Stages cost waiting, so more of them are looked at only where fewer do not fit.
        for parallel in everything:
            if parallel.pp != stages:
                continue
            name, why = name_of(parallel), reasons(parallel, terms.shape, terms.chip)
            if terms.served_by_headrace:
                why += layout_gaps(parallel)
            if why:
                passed_over[name] = "; ".join(why)
                continue
            found = evaluate(terms, parallel)
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                passed_over[name], short[name] = found.why, found.missing
        if candidates:
            break
    nearest = sorted(short, key=lambda name: short[name])
    return Found(_ranked(terms, candidates), passed_over, [f"{name}: {passed_over[name]}" for name in nearest])


def _pinned(parallel: Parallel, request: PlanRequest) -> bool:
    """Whether a layout is what the user asked for."""
    wanted = (
        (request.tensor_parallel_size, parallel.tp),
        (request.pipeline_parallel_size, parallel.pp),
        (request.data_parallel_size, parallel.dp),
        (request.enable_expert_parallel, parallel.ep),
        (request.enable_dp_attention, parallel.dp_attention),
    )
    return all(given is None or given == value for given, value in wanted)


def evaluate(terms: Terms, parallel: Parallel) -> Candidate | Short:
    """The candidate of a layout; or why there is none. Requests that come at a rate are as many at once as come while
    one is answered, and as many again."""
    found = _evaluate(terms, parallel)
    rate = None if terms.request.concurrency else terms.request.request_rate
    if rate is None:
        return found
    coming = USUAL_CONCURRENCY["interactive"]
    if isinstance(found, Candidate):
        coming = math.ceil(2 * rate * found.prediction.e2e_s)
        if coming >= found.workload.concurrency:
            return found
    return _evaluate(replace(terms, request=terms.request.replace(concurrency=coming)), parallel)


def _evaluate(terms: Terms, parallel: Parallel) -> Candidate | Short:
    """Where the cache is what bounds a layout, smaller steps leave more of it."""
    deployment = Deployment(terms.shape, terms.chip, parallel, terms.weight_format, terms.kv_bytes, terms.engine)
    usual = _budget(terms, deployment)
    best = _with_budget(terms, deployment, usual)
    if usual.source == "user" or not terms.request.enable_chunked_prefill or terms.chip.vendor == "cpu":
        return best
    for size in SMALLER_BUDGETS:
        if isinstance(best, Candidate) and not best.decisions["max_num_seqs"].runner_up:
            break
        if (terms.request.max_num_seqs or 0) <= size < usual.value:
            why = f"the cache is short, and a step of {usual.value} tokens takes more from it"
            found = _with_budget(terms, deployment, Decision(usual.field, size, why, str(usual.value)))
            if isinstance(found, Candidate) and (isinstance(best, Short) or _beats(terms, found, best)):
                best = found
    return best


def _beats(terms: Terms, one: Candidate, other: Candidate) -> bool:
    objective = terms.request.objective
    ahead = score(objective, one.prediction) - score(objective, other.prediction)
    return ahead > ABOUT_THE_SAME * abs(score(objective, other.prediction))


def _with_budget(terms: Terms, deployment: Deployment, budget: Decision) -> Candidate | Short:
    request, parallel = terms.request, deployment.parallel
    concurrency = terms.concurrency
    expected = None if concurrency is None else -(-concurrency // parallel.dp)
    seqs = _sequences(terms, budget.value, expected)

    memory = _map(terms, parallel, budget.value, seqs.value, terms.longest)
    if not memory.fits:
        return _too_little(terms, memory)
    memory, length = _longest(terms, parallel, budget.value, seqs.value)
    room = max(1, int(capacity(terms, memory) / terms.mean_tokens))
    if request.max_num_seqs is None and room < seqs.value:
        why = "requests that the cache holds, each with its prompt and half its answer; more would push others out"
        seqs = Decision("max_num_seqs", room, why, str(seqs.value))
    if concurrency is None:
        concurrency = seqs.value * parallel.dp
    workload = Workload(request.prompt_len, request.answer_len, concurrency, request.num_prompts, request.request_rate)
    decisions = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    mixed = None
    if terms.engine == "headrace" and request.enable_chunked_prefill:
        decisions["mixed_step_tokens"] = decision = _mixed_step(terms, deployment, budget.value)
        mixed = decision.value
    limits = Limits(
        max_num_seqs=seqs.value,
        max_num_batched_tokens=budget.value,
        kv_tokens=capacity(terms, memory),
        block_size=terms.block_size,
        mixed_step_tokens=mixed,
        enable_chunked_prefill=request.enable_chunked_prefill,
    )
    prediction = predict(deployment, workload, limits, limits.max_num_seqs, limits.max_num_batched_tokens)
    return Candidate(deployment, memory, workload, limits, length, decisions, prediction)


def simulated(candidate: Candidate, full: bool) -> tuple[Candidate, Simulation | None]:
    """The candidate with what the scheduler itself makes of the workload, on a virtual clock; step by step if `full`.
    What would take too long otherwise stays as it was predicted."""
    workload, limits = candidate.workload, candidate.limits
    coming = workload.request_rate * OPEN_SECONDS if workload.request_rate else CLOSED_ROUNDS * workload.concurrency
    requests = (workload.num_prompts or coming) / candidate.parallel.dp
    chunks = workload.input_len / min(limits.max_num_batched_tokens, limits.mixed_step_tokens or math.inf)
    if not full and requests * max(1.0, chunks) > MOST_SIMULATED:
        return candidate, None
    patience = math.inf if full else PATIENCE
    try:
        run = simulate(candidate.deployment, workload, _needed(limits, workload), full=full, patience=patience)
    except TooLongError:
        return candidate, None
    prediction = replace(
        candidate.prediction,
        ttft_ms=1000 * run.ttft.mean,
        itl_ms=1000 * run.itl.mean,
        e2e_s=run.e2e.mean,
        output_tok_s=run.output_tok_s,
        total_tok_s=run.total_tok_s,
    )
    return replace(candidate, prediction=prediction), run


def _needed(limits: Limits, workload: Workload) -> Limits:
    """With no more cache than can ever be in use, as blocks cost the simulator time."""
    blocks = -(-(workload.input_len + workload.output_len) // limits.block_size) + 1
    most = min(limits.max_num_seqs, workload.concurrency if workload.request_rate is None else limits.max_num_seqs)
    return replace(limits, kv_tokens=min(limits.kv_tokens, (most + 1) * blocks * limits.block_size))


def capacity(terms: Terms, memory: MemoryMap) -> int:
    """Tokens of requests of this workload that the pool of one rank holds: of longer sequences more has left the
    windows, and gone back."""
    return max(-(-terms.tokens // terms.block_size) * terms.block_size, memory.tokens_in(terms.tokens))


def _longest(terms: Terms, parallel: Parallel, budget: int, seqs: int) -> tuple[MemoryMap, int]:
    """The map with the longest sequence that the cache holds, at most the context. One of `terms.longest` fits."""
    length = terms.context
    for _ in range(SHORTENINGS):
        memory = _map(terms, parallel, budget, seqs, length)
        if memory.fits:
            return memory, length
        if memory.kv_tokens <= terms.longest:
            break
        length = min(memory.kv_tokens, length - terms.block_size)
    return _map(terms, parallel, budget, seqs, terms.longest), terms.longest


def _map(terms: Terms, parallel: Parallel, budget: int, seqs: int, longest: int) -> MemoryMap:
    return memory_map(
        terms.shape,
        terms.chip,
        parallel,
        weight_format=terms.weight_format,
        kv_dtype_bytes=terms.kv_bytes,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        gpu_memory_utilization=terms.request.gpu_memory_utilization,
        block_size=terms.block_size,
        graph_mode=terms.graph_mode,
        engine=terms.engine,
        speculates=bool(terms.request.speculative_config) and terms.shape.spec.draft_weights > 0,
    )


def _too_little(terms: Terms, memory: MemoryMap) -> Short:
    gib = 1 << 30
    usable = f"{memory.usable / gib:.0f} GiB of each GPU may be used"
    if memory.weight_bytes > memory.usable:
        why = f"weights take {memory.weight_bytes / gib:.0f} GiB on each GPU; {usable}"
    else:
        why = (
            f"{memory.missing / gib:.1f} GiB are missing on each GPU for one sequence of {terms.longest} tokens; the "
            f"cache has room for {memory.kv_tokens}"
        )
    return Short(why, memory.missing)


def _budget(terms: Terms, deployment: Deployment) -> Decision:
    request = terms.request
    field = "max_num_batched_tokens"
    if request.max_num_batched_tokens is not None:
        return Decision(field, request.max_num_batched_tokens, "given", source="user")
    if terms.engine == "headrace" or terms.chip.vendor == "cpu" or not request.enable_chunked_prefill:
        device = "cpu" if terms.chip.vendor == "cpu" else "cuda"
        mlps = [group.feed_forward for group in terms.shape.groups if group.feed_forward.num_experts]
        each = max((mlp.num_experts / mlp.experts_per_token for mlp in mlps), default=1.0)
        value, why = token_budget(device, request.enable_chunked_prefill, terms.context, request.max_num_seqs, each)
        return Decision(field, value, why)
    sizes = [size for size in VLLM_BUDGETS[request.objective] if size >= (request.max_num_seqs or 0)]
    if not sizes:
        return Decision(field, request.max_num_seqs, "every running request gets a token in every step")
    return mixed_step(_times(deployment, sizes, request.prompt_len), request.objective, "derived", field)


def _mixed_step(terms: Terms, deployment: Deployment, budget: int) -> Decision:
    sizes = [size for size in MIXED_SIZES if size <= budget] or [budget]
    return mixed_step(_times(deployment, sizes, terms.request.prompt_len), terms.request.objective, "derived")


def _times(deployment: Deployment, sizes: Iterable[int], input_len: int) -> dict[int, float]:
    """Milliseconds of steps of so many prompt tokens on each rank."""
    model, ranks = step_model(deployment), deployment.parallel.dp
    return {
        size: 1000
        * model.seconds(StepWork(0, 0.0, size * ranks, min(size, input_len) / 2, ranks * -(-size // input_len)))
        for size in sizes
    }


def _sequences(terms: Terms, budget: int, expected: int | None) -> Decision:
    if terms.request.max_num_seqs is not None:
        return Decision("max_num_seqs", terms.request.max_num_seqs, "given", source="user")
    device = "cpu" if terms.chip.vendor == "cpu" else "cuda"
    return Decision("max_num_seqs", *sequences(device, budget, expected))


def _ranked(terms: Terms, candidates: list[Candidate]) -> list[Candidate]:
    """Best first; of those about as good as the best, the simplest is first."""
    objective = terms.request.objective
    ordered = sorted(candidates, key=lambda candidate: score(objective, candidate.prediction), reverse=True)
    if any(not copies_latent(candidate.parallel, terms.shape) for candidate in ordered):
        ordered.sort(key=lambda candidate: _wastes_latent(terms, candidate))
    if not ordered:
        return []
    first = score(objective, ordered[0].prediction)
    preferred = _wastes_latent(terms, ordered[0])
    near = [
        candidate
        for candidate in ordered
        if score(objective, candidate.prediction) >= first - ABOUT_THE_SAME * abs(first)
        and _wastes_latent(terms, candidate) == preferred
    ]
    best = min(near, key=lambda candidate: complexity(candidate.parallel))
    return [best, *(candidate for candidate in ordered if candidate is not best)]


def _wastes_latent(terms: Terms, candidate: Candidate) -> bool:
    """So many requests that copies of their latent cache cost more than ranks of their own."""
    parallel = candidate.parallel
    over_one_copy = candidate.workload.concurrency / parallel.replicas
    return copies_latent(parallel, terms.shape) and over_one_copy >= MANY_REQUESTS


def complexity(parallel: Parallel) -> tuple[int, ...]:
    """Fewer ranks that wait for each other, then fewer GPUs."""
    return (parallel.pp, parallel.dp_attention + parallel.ep, parallel.tp, parallel.gpus)


def score(objective: str, prediction: Prediction) -> float:
    """More is better."""
    if objective == "latency":
        return -prediction.e2e_s
    if objective == "throughput":
        return prediction.output_tok_s
    behind = max(prediction.itl_ms / READING_PACE_MS, prediction.ttft_ms / FIRST_TOKEN_MS)
    return prediction.output_tok_s if behind <= 1 else -behind
