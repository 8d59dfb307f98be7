"""Predicts latency and throughput of a workload in closed form, fast enough to rank hundreds of layouts.

A few steps are costed and put together by arithmetic. simulate.py runs the scheduler itself instead: the better answer
where it is worth a tenth of a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.planner.collectives import reckoned_sums
from headrace.planner.constants import find_fitted
from headrace.planner.cost import StepModel, StepWork, step_model
from headrace.planner.deployment import Deployment

CLOSED_ROUNDS = 4
"""Requests for each client, where a workload does not say how many there are."""
PATIENCE = 60.0
"""Seconds for which a rate of requests that is too high is assumed to last."""
UNLIKE = 1.5
"""How much wider the error band is where nothing like a deployment was measured."""
MOST_BAND = 0.8


@dataclass(frozen=True)
class Workload:
    """Describes requests of one kind.

    With `request_rate` they arrive at random at that rate. Without, each of `concurrency` clients sends its next
    request when the one before is done.
    """

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int | None = None
    """requests in all; None: enough to see the steady state"""
    request_rate: float | None = None
    """requests/s"""


@dataclass(frozen=True)
class Limits:
    """Bounds what one replica, or one data-parallel rank, may run at once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    block_size: int = 16
    mixed_step_tokens: int | None = None
    """most tokens of a step with decodes; None: prompts may fill every step"""
    enable_chunked_prefill: bool = True


@dataclass(frozen=True)
class Prediction:
    """Holds what the whole deployment is expected to give."""

    ttft_ms: float
    """time to the first token, of a typical request (the median)"""
    itl_ms: float
    """mean time between tokens"""
    e2e_s: float
    """mean time of a whole request"""
    output_tok_s: float
    total_tok_s: float
    max_concurrency: int
    """requests of this kind that run at once, by cache and by max_num_seqs"""
    kv_tokens: int
    error_band: float
    """nine measurements in ten are expected within this share of the prediction"""
    bound: str
    """what takes most of a typical step: a name of cost.PARTS"""


@dataclass(frozen=True)
class _Rank:
    """One data-parallel rank's share of the workload; all ranks do alike."""

    model: StepModel
    ranks: int
    """ranks that have anything to do"""
    load: Workload
    limits: Limits

    @property
    def budget(self) -> int:
        """Tokens of a step: each pipeline stage has a batch of its own under way."""
        return self.limits.max_num_batched_tokens * self.model.deployment.parallel.pp

    @property
    def context(self) -> float:
        """Keys that a decode reads, on average over its life: it holds half of its answer."""
        return self.load.input_len + self.load.output_len / 2

    @property
    def most_running(self) -> int:
        """Requests that can run at once for long."""
        return max(1, min(self.limits.max_num_seqs, int(self.limits.kv_tokens / self.context)))

    def step(self, decodes: float, prefill: float = 0.0, prompts: float = 0.0, context: float | None = None) -> float:
        """Seconds of a step with so many decodes and prompt tokens."""
        count = max(1, round(prompts)) if prefill else 0
        work = StepWork(decodes, context or self.context, prefill, self.load.input_len / 2, count)
        return self.model.seconds(work.times(self.ranks))

    def prefill(self, prompts: float, decodes: float = 0.0) -> float:
        """Seconds that `prompts` prompts take, in as few steps as the budget allows, beside `decodes` decodes."""
        tokens = prompts * self.load.input_len
        steps = max(1, -(-int(tokens) // self.budget))
        return steps * self.step(decodes, tokens / steps, max(1.0, prompts / steps))


def predict(
    deployment: Deployment, workload: Workload, limits: Limits, *, model: StepModel | None = None
) -> Prediction:
    """Predict a workload. `model` has other constants than the usual. Raises ConfigError where the cache does not hold
    one request."""
    model = model or step_model(deployment)
    parallel, kv_tokens = deployment.parallel, limits.kv_tokens
    length = workload.input_len + workload.output_len
    if kv_tokens < length:
        raise ConfigError(
            f"kv_tokens must be at least {length} for a prompt of {workload.input_len} tokens and an answer of "
            f"{workload.output_len}, got {kv_tokens}"
        )
    ranks = parallel.dp if workload.request_rate is not None else min(parallel.dp, workload.concurrency)
    rank = _Rank(model, ranks, workload, limits)
    if workload.request_rate is not None:
        timing = _open(rank, workload.request_rate / ranks)
    elif workload.num_prompts is not None and workload.num_prompts <= workload.concurrency:
        timing = _at_once(rank, max(1.0, workload.num_prompts / ranks))
    else:
        timing = _closed(rank, workload.concurrency / ranks)
    outside = model.efficiency.request
    return Prediction(
        ttft_ms=1000 * (timing.first + outside),
        itl_ms=1000 * timing.between,
        e2e_s=outside + timing.life,
        output_tok_s=timing.rate * workload.output_len * ranks,
        total_tok_s=timing.rate * length * ranks,
        max_concurrency=max(1, min(limits.max_num_seqs, kv_tokens // length)) * parallel.dp,
        kv_tokens=kv_tokens * parallel.dp,
        error_band=error_band(deployment),
        bound=model.cost(StepWork(timing.running * ranks, rank.context)).bound,
    )


def error_band(deployment: Deployment) -> float:
    """Return the band of the constants, wider where nothing like this deployment was measured."""
    band = find_fitted(deployment.chip, deployment.engine).band
    return min(MOST_BAND, band * UNLIKE) if not_measured(deployment) else band


def not_measured(deployment: Deployment) -> list[str]:
    """Name what of a deployment was counted and never measured."""
    parallel = deployment.parallel
    parts = {
        reckoned_sums(deployment.chip, deployment.engine, parallel.tp): True,
        "pipeline stages": parallel.pp > 1,
        "whole experts on a GPU": parallel.ep,
        "experts that ranks share": parallel.dp_attention,
        "latent or linear attention": any(group.mixer.kind != "gqa" for group in deployment.shape.groups),
    }
    return [name for name, is_so in parts.items() if name and is_so]


@dataclass(frozen=True)
class _Timing:
    """How one rank's requests fare, in seconds."""

    running: float
    """decodes in a typical step"""
    first: float
    """until a request's first token: the median"""
    between: float
    """between two of its tokens, on average"""
    life: float
    """of a whole request, on average"""
    rate: float
    """requests/s"""


def _closed(rank: _Rank, clients: float) -> _Timing:
    """Each client sends its next request when the last is done.

    Requests that end together start together, as many as a step takes. After its own prompt a request has as many steps
    as its answer has tokens left, of which some hold the others' prompts; where those are more, it waits for its turn.
    """
    running = float(min(clients, rank.most_running))
    together = min(running, max(1.0, rank.budget / rank.load.input_len))
    chunks = max(1.0, rank.load.input_len / rank.budget)
    first = rank.prefill(together, running - together)
    mixed, decodes = first / chunks, rank.load.output_len - 1
    others = (running / together - 1) * chunks
    beside = min(others, float(decodes))
    answer = beside * mixed + (decodes - beside) * rank.step(running)
    turn = (others - beside) * mixed
    life = turn + first + answer
    waiting = max(0.0, clients - running) / running * life
    return _Timing(running, turn + first + waiting, answer / max(1, decodes), waiting + life, running / life)


def _at_once(rank: _Rank, count: float) -> _Timing:
    """`count` requests arrive together."""
    load, kv_tokens = rank.load, rank.limits.kv_tokens
    longest = load.input_len + load.output_len
    # headrace looks ahead, and keeps those waiting that the cache does not hold to their end; vLLM preempts them.
    started = min(count, rank.limits.max_num_seqs, max(1, int(kv_tokens / longest)))

    def wave_of(size: float) -> tuple[float, float]:
        return rank.prefill(size, size / 2), (load.output_len - 1) * rank.step(size)

    # Who waits starts when the wave before is done. The last wave may be a small one, whose steps are hardly shorter.
    waves, last = divmod(count, started)
    turn, place = divmod(count / 2, started)
    (filling, decoding), (last_filling, last_decoding) = wave_of(started), wave_of(last) if last else (0.0, 0.0)
    wave, own = filling + decoding, rank.prefill(1) / 2
    # In a wave each prompt waits for those before it; decodes wait for the prompts that come after their own.
    early, late = (count - last) / count, last / count
    starts = early * ((waves - 1) * wave + filling) / 2 + late * (waves * wave + last_filling / 2) + own
    answer = early * (decoding + filling / 2) + late * (last_decoding + last_filling / 2) if decoding else 0.0
    return _Timing(
        running=started,
        first=turn * wave + place / started * filling + own,
        between=answer / max(1, load.output_len - 1),
        life=starts + answer,
        rate=count / (waves * wave + last_filling + last_decoding),
    )


def _open(rank: _Rank, rate: float) -> _Timing:
    """Requests arrive at `rate`; beyond what can be served, they wait ever longer."""
    load = rank.load
    full = _closed(rank, rank.most_running)
    served = min(rate, 0.98 * full.rate)
    fewest = 1 / rank.ranks
    running = fewest
    for _ in range(30):
        plain, loaded = rank.step(running), rank.prefill(1, running)
        steps = max(1.0, load.input_len / rank.budget)
        # Of a second, prompts take `served * loaded`; what is left goes to steps that only decode.
        between = plain / max(0.05, 1 - served * max(0.0, loaded - steps * plain))
        arriving = min(max(fewest, served * load.output_len * between), float(rank.most_running))
        if abs(arriving - running) < 0.005 * running:
            break
        running = (running + arriving) / 2
    busy = min(0.95, served * loaded)
    first = loaded + between / 2 + busy / (1 - busy) * loaded / 2
    if rate > served:
        first += PATIENCE / 2 * (1 - served / rate)
    return _Timing(running, first, between, first + (load.output_len - 1) * between, served)
