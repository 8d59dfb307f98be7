"""Latency and throughput of a workload in closed form: what ranks hundreds of layouts in milliseconds.

A few steps are costed and put together by arithmetic; simulate.py runs the scheduler itself, and is the better answer
where it is worth a tenth of a second. Knows nothing of how a deployment was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.errors import ConfigError
from headrace.planner.constants import find_fitted
from headrace.planner.cost import Deployment, StepModel, StepWork, step_model

CLOSED_ROUNDS = 4
"""requests for each client, where a workload does not say how many there are"""
PATIENCE = 60.0
"""seconds for which a rate of requests that is too high is imagined to last"""


UNLIKE = 1.5
MOST_BAND = 0.8
"""How much wider the band is for stages, whole experts, data-parallel attention, several nodes and latent or linear
attention, of which nothing was measured; and the widest"""


@dataclass(frozen=True)
class Workload:
    """Requests of one kind. With `request_rate` they arrive as by chance at that rate; else `concurrency` clients send
    one each, and the next when it is done."""

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int | None = None
    """in all; None: enough to see the steady state"""
    request_rate: float | None = None
    """requests/s"""
    cached_share: float = 0.0
    """of each prompt, what the prefix cache holds already"""

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "concurrency", "num_prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.request_rate is not None and self.request_rate <= 0:
            raise ConfigError(f"request_rate must be above 0, got {self.request_rate}")
        if not 0 <= self.cached_share <= 1:
            raise ConfigError(f"cached_share must be between 0 and 1, got {self.cached_share}")

    @property
    def fresh_len(self) -> float:
        """Tokens of a prompt that are computed: the last always."""
        return max(1.0, self.input_len * (1 - self.cached_share))


class Cache(Protocol):
    """What is read of a MemoryMap."""

    @property
    def kv_tokens(self) -> int: ...


@dataclass(frozen=True)
class Prediction:
    """Of the whole deployment."""

    ttft_ms: float
    """of a typical request: the median"""
    itl_ms: float
    """mean"""
    e2e_s: float
    """mean of one request"""
    output_tok_s: float
    total_tok_s: float
    max_concurrency: int
    """requests of this kind that run at once, by cache and by max_num_seqs"""
    kv_tokens: int
    error_band: float
    """a measured figure is expected within this share of the predicted one, nine times in ten"""
    bound: str
    """what a typical step waits for: a part's name of StepCost"""
    duration_s: float = 0.0
    """of all `num_prompts`, where that is given"""


@dataclass(frozen=True)
class _Rank:
    """One data-parallel rank's share of the workload; all ranks do alike."""

    model: StepModel
    ranks: int
    """that have anything to do"""
    input_len: int
    fresh_len: float
    """tokens of a prompt that are computed"""
    output_len: int
    most: int
    """requests that may run at once"""
    kv_tokens: int
    budget: int
    """tokens of a step"""

    @property
    def room(self) -> int:
        """Requests that run at once for long: on average they hold half of their answer."""
        return max(1, min(self.most, int(self.kv_tokens / self.context)))

    @property
    def context(self) -> float:
        """of a decode, over its life"""
        return self.input_len + self.output_len / 2

    def step(self, decodes: float, prefill: float = 0.0, prompts: float = 0.0, context: float | None = None) -> float:
        ranks = self.ranks
        count = max(1, round(prompts)) * ranks if prefill else 0
        seen = self.input_len - self.fresh_len / 2
        return self.model.seconds(StepWork(decodes * ranks, context or self.context, prefill * ranks, seen, count))

    def prefill(self, prompts: float, decodes: float = 0.0) -> float:
        """Seconds that `prompts` prompts take, in as few steps as the budget allows, beside `decodes` decodes."""
        tokens = prompts * self.fresh_len
        steps = max(1, -(-int(tokens) // self.budget))
        return steps * self.step(decodes, tokens / steps, max(1.0, prompts / steps))


def predict(
    deployment: Deployment,
    workload: Workload,
    memory: Cache,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    model: StepModel | None = None,
) -> Prediction:
    """Limits and memory are those of one replica, or of one data-parallel rank. Raises ConfigError where the cache does
    not hold one request."""
    model = model or step_model(deployment)
    parallel = deployment.parallel
    ranks, request = min(parallel.dp, workload.concurrency), model.efficiency.request
    if workload.request_rate is not None:
        ranks = parallel.dp
    length = workload.input_len + workload.output_len
    if memory.kv_tokens < length:
        raise ConfigError(
            f"kv_tokens must be at least {length} for a prompt of {workload.input_len} tokens and an answer of "
            f"{workload.output_len}, got {memory.kv_tokens}"
        )
    budget = max_num_batched_tokens * parallel.pp
    rank = _Rank(
        model,
        ranks,
        workload.input_len,
        workload.fresh_len,
        workload.output_len,
        max_num_seqs,
        memory.kv_tokens,
        budget,
    )
    if workload.request_rate is not None:
        timing = _open(rank, workload.request_rate / ranks)
    elif workload.num_prompts is not None and workload.num_prompts <= workload.concurrency:
        timing = _at_once(rank, max(1.0, workload.num_prompts / ranks))
    else:
        timing = _closed(rank, workload.concurrency / ranks)
    typical = model.cost(StepWork(timing.running * ranks, rank.context))
    return Prediction(
        ttft_ms=1000 * (timing.first + request),
        itl_ms=1000 * timing.between,
        e2e_s=request + timing.first + (workload.output_len - 1) * timing.between,
        output_tok_s=timing.rate * workload.output_len * ranks,
        total_tok_s=timing.rate * length * ranks,
        max_concurrency=max(1, min(max_num_seqs, memory.kv_tokens // length)) * parallel.dp,
        kv_tokens=memory.kv_tokens * parallel.dp,
        error_band=error_band(deployment),
        bound=typical.bound,
        duration_s=(workload.num_prompts or 0) / (timing.rate * ranks),
    )


def error_band(deployment: Deployment) -> float:
    """The band of the constants, wider where no row that they were fitted on was like it."""
    band, parallel = find_fitted(deployment.chip, deployment.engine).band, deployment.parallel
    unlike = parallel.pp > 1 or parallel.ep or parallel.dp_attention or parallel.tp > deployment.chip.gpus_per_node
    unlike = unlike or any(group.mixer.kind != "gqa" for group in deployment.shape.groups)
    return min(MOST_BAND, band * UNLIKE) if unlike else band


@dataclass(frozen=True)
class _Timing:
    """Of one rank, seconds."""

    running: float
    """decodes in a typical step"""
    first: float
    """until a request's first token"""
    between: float
    """two of its tokens"""
    rate: float
    """requests/s"""


def _closed(rank: _Rank, clients: float) -> _Timing:
    """Clients that send the next request when the last is done.

    Those who ended together start together, as many as a step takes. After its own prompt a request has as many steps
    as its answer has tokens left, of which some hold the others' prompts; where those are more, it waits for its turn.
    """
    running = float(min(clients, rank.room))
    together = min(running, max(1.0, rank.budget / rank.fresh_len))
    chunks = max(1.0, rank.fresh_len / rank.budget)
    first = rank.prefill(together, running - together)
    mixed, decodes = first / chunks, rank.output_len - 1
    others = (running / together - 1) * chunks
    beside = min(others, float(decodes))
    answer = beside * mixed + (decodes - beside) * rank.step(running)
    turn = (others - beside) * mixed
    life = turn + first + answer
    waiting = max(0.0, clients - running) / running * life
    return _Timing(running, turn + first + waiting, answer / max(1, decodes), running / life)


def _at_once(rank: _Rank, count: float) -> _Timing:
    """`count` requests that come together."""
    longest = rank.input_len + rank.output_len
    started = min(count, rank.most, int(rank.kv_tokens / rank.input_len))
    if started * longest > rank.kv_tokens:
        if rank.model.deployment.engine == "vllm":
            return _outgrowing(rank, count, float(started))
        started = max(1, int(rank.kv_tokens / longest))  # the scheduler looks ahead, and keeps the others waiting
    waves = count / started
    filling = rank.prefill(started, started / 2)
    step = rank.step(started)
    wave = filling + (rank.output_len - 1) * step
    # Each prompt waits for those before it; decodes wait for the prompts that come after their own.
    first = filling / 2 + rank.prefill(1) / 2 + (waves - 1) / 2 * wave
    between = step + filling / 2 / max(1, rank.output_len - 1)
    return _Timing(started, first, between, count / (waves * wave))


def _outgrowing(rank: _Rank, count: float, started: float) -> _Timing:
    """As many start as their prompts allow; as they grow, the last are preempted, to be computed again at the end."""
    first = rank.prefill(started, started / 2)
    parts, seconds, tokens = 12, first, 0.0
    running = started
    for part in range(parts):
        context = rank.input_len + rank.output_len * (part + 0.5) / parts
        running = min(started, rank.kv_tokens / context)
        seconds += rank.output_len / parts * rank.step(running, context=context)
        tokens += rank.output_len / parts * running
    ended = min(running, rank.kv_tokens / (rank.input_len + rank.output_len))
    preempted = started - ended
    progress = max(0.0, tokens - ended * rank.output_len) / max(1.0, preempted)
    left = max(0.0, count * rank.output_len - tokens)
    context = rank.input_len + 0.75 * rank.output_len
    later = max(1.0, min(count - ended, rank.kv_tokens / context))
    again = preempted * (rank.input_len + progress) + (count - started) * rank.fresh_len
    refilling = again / rank.budget * rank.step(0.0, rank.budget, rank.budget / (rank.input_len + progress))
    rest = left / later * rank.step(later, context=context) + refilling
    total = seconds + rest
    mean = (ended * seconds + (count - ended) * (seconds + rest / 2)) / count
    between = (mean - first / 2) / max(1, rank.output_len - 1)
    waiting = (count - started) / count * (seconds + rest / 2)
    return _Timing((tokens / rank.output_len + later) / 2, first / 2 + waiting, between, count / total)


def _open(rank: _Rank, rate: float) -> _Timing:
    """Requests that come at `rate`; beyond what can be served, they wait ever longer."""
    full = _closed(rank, rank.room)
    served = min(rate, 0.98 * full.rate)
    fewest = 1 / rank.ranks
    running = fewest
    for _ in range(30):
        plain, loaded = rank.step(running), rank.prefill(1, running)
        steps = max(1.0, rank.fresh_len / rank.budget)
        # Of a second, prompts take `served * loaded`; what is left goes to steps that only decode.
        between = plain / max(0.05, 1 - served * max(0.0, loaded - steps * plain))
        found = min(max(fewest, served * rank.output_len * between), float(rank.room))
        if abs(found - running) < 0.005 * running:
            break
        running = (running + found) / 2
    busy = min(0.95, served * loaded)
    first = loaded + between / 2 + busy / (1 - busy) * loaded / 2
    if rate > served:
        first += PATIENCE / 2 * (1 - served / rate)
    return _Timing(running, first, between, served)
