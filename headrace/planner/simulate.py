"""The real scheduler on a virtual clock: step costs become throughput and percentiles of latency.

Every decision of a step is the scheduler's own; only its duration is predicted. Stretches in which nothing changes but
the length of what decodes are one jump. Knows no device and no wall clock.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.cache_groups import same_layout
from headrace.errors import ConfigError, HeadraceError
from headrace.planner.cost import Deployment, StepModel, StepWork, step_model
from headrace.planner.predict import CLOSED_ROUNDS, Workload
from headrace.planner.step_work import work_of
from headrace.request import EngineCoreRequest, Request, RequestStatus
from headrace.sampling_params import SamplingParams
from headrace.scheduler.scheduler import Scheduler, SchedulerConfig
from headrace.step import RunnerOutput

OPEN_SECONDS = 60.0
"""for how long requests arrive, where they come at a rate and nobody says how many"""
STEP_ITSELF = 16
"""What going through a step, or past a stretch of them, costs beside its requests, in requests"""


class Arrival(NamedTuple):
    """One request of a trace."""

    time: float
    """seconds"""
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Limits:
    """What one data-parallel rank may run at once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    block_size: int = 16
    mixed_step_tokens: int | None = None
    """as the scheduler's; None: prompts may fill every step"""
    enable_chunked_prefill: bool = True


class Segment(NamedTuple):
    """So many steps alike, of one rank."""

    work: StepWork
    steps: int


@dataclass(frozen=True)
class Percentiles:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[tuple[float, float]]) -> Percentiles:
        """(value, weight) pairs; zeros if there are none."""
        total = sum(weight for _, weight in values)
        if not total:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        found: list[float] = []
        seen, shares = 0.0, (0.5, 0.9, 0.99)
        for value, weight in ordered:
            seen += weight
            while len(found) < 3 and seen >= shares[len(found)] * total:
                found.append(value)
        found += [ordered[-1][0]] * (3 - len(found))
        return cls(sum(value * weight for value, weight in values) / total, *found)


@dataclass(frozen=True)
class Simulation:
    """Times in seconds, rates of the whole deployment."""

    seconds: float
    """from the first arrival to the last token"""
    output_tok_s: float
    total_tok_s: float
    ttft: Percentiles
    itl: Percentiles
    """between two tokens of one request"""
    e2e: Percentiles
    num_requests: int
    num_steps: int
    num_preemptions: int
    max_running: int
    segments: list[Segment] = field(repr=False)
    """what ran, for recosting with other constants: the order of steps depends on their duration only where requests
    arrive by the clock"""


class TooLongError(HeadraceError):
    """More had to be gone through than was allowed."""


def simulate(
    deployment: Deployment,
    load: Workload | Sequence[Arrival],
    limits: Limits,
    *,
    full: bool = False,
    seed: int = 0,
    model: StepModel | None = None,
    patience: float = math.inf,
) -> Simulation:
    """Run a workload, or a trace in order of its times, to its end.

    `full`: run every step, in place of jumping over those in which nothing changes. `patience`: requests in all steps
    that are gone through, some 2 us each. Raises ConfigError where a request fits no cache, or where the trace is
    empty, TooLongError at the end of patience.
    """
    ranks = deployment.parallel.dp
    clients, fresh = 0, 1.0
    if isinstance(load, Workload):
        arrivals, clients = _arrivals(load, ranks, seed)
        fresh = load.fresh_len / load.input_len
    else:
        arrivals = [Arrival(*entry) for entry in load][::ranks]
    if not arrivals:
        raise ConfigError("a simulation needs at least one request")
    longest = max(arrival.input_len + arrival.output_len for arrival in arrivals)
    needed = -(-longest // limits.block_size) * limits.block_size
    if needed > limits.kv_tokens:
        raise ConfigError(f"kv_tokens must be at least {needed} for the longest request, got {limits.kv_tokens}")
    return _Run(model or step_model(deployment), arrivals, clients, limits, longest, fresh, full, patience).result()


def recost(model: StepModel, segments: Sequence[Segment]) -> float:
    """Seconds of steps that were simulated before, by other constants."""
    ranks = model.deployment.parallel.dp
    return sum(steps * model.seconds(_everywhere(work, ranks)) for work, steps in segments)


def _arrivals(load: Workload, ranks: int, seed: int) -> tuple[list[Arrival], int]:
    """(requests of one rank that come by the clock or at once, of which so many run ahead of the others): a client that
    is done sends the next, so the rest wait for a free one."""
    clients = max(1, -(-load.concurrency // ranks))
    if load.request_rate is not None:
        rate = load.request_rate / ranks
        count = load.num_prompts or max(100, int(load.request_rate * OPEN_SECONDS))
        generator, now, arrivals = random.Random(seed), 0.0, []
        for _ in range(max(1, -(-count // ranks))):
            arrivals.append(Arrival(now, load.input_len, load.output_len))
            now += generator.expovariate(rate)
        return arrivals, 0
    count = load.num_prompts or CLOSED_ROUNDS * load.concurrency
    return [Arrival(0.0, load.input_len, load.output_len)] * max(1, -(-count // ranks)), clients


def _everywhere(work: StepWork, ranks: int) -> StepWork:
    """A rank's step as the deployment's, all ranks alike."""
    if ranks == 1:
        return work
    return replace(
        work, decodes=work.decodes * ranks, prefill_tokens=work.prefill_tokens * ranks, prompts=work.prompts * ranks
    )


MOST_BLOCKS = 512
"""Blocks of a request in a simulation, where the cache holds several: longer ones get larger blocks, which rounds their
memory by a few thousandths and saves most of the time that their blocks take."""


@dataclass(slots=True)
class _Life:
    arrival: float
    first: float = -1.0
    """when its first token came"""
    paused: float = -1.0
    """when its last token before a preemption came"""


class _Run:
    def __init__(
        self,
        model: StepModel,
        arrivals: list[Arrival],
        clients: int,
        limits: Limits,
        longest: int,
        fresh: float,
        full: bool,
        patience: float,
    ) -> None:
        parallel = model.deployment.parallel
        self.model, self.ranks, self.fresh, self.full = model, parallel.dp, fresh, full
        self.patience = patience
        # As many batches as stages are under way at once, each with a budget of its own.
        budget = limits.max_num_batched_tokens * parallel.pp
        block_size = limits.block_size
        while longest > MOST_BLOCKS * block_size and limits.kv_tokens >= 2 * longest:
            block_size *= 2
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=min(limits.max_num_seqs, budget),
                max_num_batched_tokens=budget,
                max_model_len=longest + 1,
                layout=same_layout(block_size),
                num_pages=limits.kv_tokens // block_size,
                enable_prefix_caching=False,
                enable_chunked_prefill=limits.enable_chunked_prefill or budget < longest + 1,
                mixed_step_tokens=limits.mixed_step_tokens,
                look_ahead=model.deployment.engine == "headrace",
            )
        )
        self.now = 0.0
        self.lives: dict[str, _Life] = {}
        self.ttft: list[tuple[float, float]] = []
        self.gaps: list[tuple[float, float]] = []
        self.e2e: list[tuple[float, float]] = []
        self.segments: list[Segment] = []
        self.num_steps = self.max_running = self._num_preemptions = 0
        self._prompts: dict[int, list[int]] = {}
        self.tokens_in = sum(arrival.input_len for arrival in arrivals)
        self.tokens_out = sum(arrival.output_len for arrival in arrivals)
        self.num_requests = len(arrivals)
        # Requests that come by the clock, and those that wait until a client is free.
        first = clients or len(arrivals)
        self._coming = [(arrival.time, number, arrival) for number, arrival in enumerate(arrivals[:first])]
        heapq.heapify(self._coming)
        self._later = list(enumerate(arrivals))[: first - 1 : -1] if clients else []

    def result(self) -> Simulation:
        scheduler = self.scheduler
        while self._coming or scheduler.has_work():
            self._admit()
            if not scheduler.has_work():
                self.now = self._coming[0][0]
                continue
            quiet = self._step()
            if quiet and not self.full:
                self._jump()
        request = self.model.efficiency.request
        seconds = max(self.now, 1e-9)
        return Simulation(
            seconds=seconds,
            output_tok_s=self.tokens_out * self.ranks / seconds,
            total_tok_s=(self.tokens_in + self.tokens_out) * self.ranks / seconds,
            ttft=Percentiles.of([(value + request, weight) for value, weight in self.ttft]),
            itl=Percentiles.of(self.gaps),
            e2e=Percentiles.of([(value + request, weight) for value, weight in self.e2e]),
            num_requests=self.num_requests * self.ranks,
            num_steps=self.num_steps,
            num_preemptions=self._num_preemptions,
            max_running=self.max_running * self.ranks,
            segments=self.segments,
        )

    def _admit(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            time, number, arrival = heapq.heappop(self._coming)
            name = str(number)
            self.lives[name] = _Life(time)
            prompt = self._prompts.setdefault(arrival.input_len, [0] * arrival.input_len)
            self.scheduler.add_request(
                EngineCoreRequest(
                    request_id=name,
                    prompt_token_ids=prompt,
                    params=_GREEDY,
                    max_tokens=arrival.output_len,
                    seed=0,
                )
            )

    def _step(self) -> bool:
        """One step. True if it only decoded and left everybody running, so that the next will be like it."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        assert plan is not None, "an idle scheduler with requests"
        self.patience -= len(plan.rows) + STEP_ITSELF
        if self.patience < 0:
            raise TooLongError("the simulation takes too long")
        work = work_of(plan)
        work = replace(work, prefill_tokens=work.prefill_tokens * self.fresh)
        before, duration = self.now, self.model.seconds(_everywhere(work, self.ranks))
        self._note_preemptions(before)
        self._run(work, 1, duration)
        outputs = scheduler.update(plan, RunnerOutput(plan.step, [0] * sum(plan.samples)))
        quiet = not work.prefill_tokens
        if work.decodes:
            self.gaps.append((duration, work.decodes))
        for output in outputs:
            if work.prefill_tokens:
                self._note_first(output.request_id, duration)
            if output.finish_reason is not None:
                quiet = False
                self._finish(output.request_id)
        return quiet and len(scheduler.running) == work.decodes

    def _run(self, work: StepWork, count: int, seconds: float) -> None:
        self.now += seconds
        self.num_steps += count
        self.max_running = max(self.max_running, len(self.scheduler.running))
        self.segments.append(Segment(work, count))

    def _note_preemptions(self, last_token: float) -> None:
        count = self.scheduler.stats().num_preemptions
        if count == self._num_preemptions:
            return
        self._num_preemptions = count
        for request in self.scheduler.requests.values():
            if request.status is not RequestStatus.PREEMPTED:
                continue
            life = self.lives[request.request_id]
            if life.paused < 0 and life.first >= 0:
                life.paused = last_token

    def _note_first(self, name: str, duration: float) -> None:
        """A first token, or the first after a preemption."""
        life = self.lives[name]
        if life.first < 0:
            life.first = self.now
            self.ttft.append((self.now - life.arrival, 1.0))
        elif life.paused >= 0:
            self.gaps.append((self.now - life.paused, 1.0))
            life.paused = -1.0

    def _finish(self, name: str) -> None:
        self.e2e.append((self.now - self.lives.pop(name).arrival, 1.0))
        if self._later:
            number, arrival = self._later.pop()
            heapq.heappush(self._coming, (self.now, number, arrival))

    def _jump(self) -> None:
        """Run the steps that will be like the last at once: up to the one before somebody ends, arrives or finds no
        block. The cost of a step grows almost linearly with the context, so one in the middle stands for all."""
        running = self.scheduler.running.items
        count = min(request.max_total_tokens - request.num_tokens for request in running) - 1
        count = self._fitting(running, count)
        scheduler = self.scheduler
        if scheduler.steps_held > 0 and len(scheduler.waiting):
            count = min(count, scheduler.steps_held - 1)  # then it looks again whether there is room
        if count < 2:
            return
        self.patience -= STEP_ITSELF
        contexts = sum(request.num_tokens for request in running) / len(running)

        def stretch(steps: int) -> tuple[StepWork, float]:
            work = StepWork(len(running), contexts + (steps - 1) / 2)
            return work, steps * self.model.seconds(_everywhere(work, self.ranks))

        work, seconds = stretch(count)
        if self._coming:
            left = self._coming[0][0] - self.now
            while seconds > left and count >= 2:  # stop before the step in which somebody arrives
                count = min(count - 1, int(count * left / seconds))
                work, seconds = stretch(max(count, 1))
            if count < 2:
                return
        for request in running:
            request.token_ids.extend([0] * count)
            request.num_computed_tokens += count
            scheduler.kv_cache.grow(request, request.num_tokens - 1)
        scheduler.steps_held -= count
        self._run(work, count, seconds)
        low, high = (self.model.seconds(_everywhere(replace(work, decode_context=context), self.ranks))
                     for context in (contexts, contexts + count - 1))  # fmt: skip
        parts = min(count, 16)  # the steps of a long stretch differ: told in so many parts
        for part in range(parts):
            self.gaps.append((low + (high - low) * (part + 0.5) / parts, len(running) * count / parts))

    def _fitting(self, running: list[Request], count: int) -> int:
        """As many of `count` steps as there are blocks for."""
        cache = self.scheduler.kv_cache
        size, free = cache.block_size, cache.pages.num_available
        # How many tokens requests can still write into blocks that they own -> how many such requests.
        slots = Counter(request.num_blocks * size - request.num_tokens + 1 for request in running)

        def needed(steps: int) -> int:
            return sum(requests * max(0, -((left - steps) // size)) for left, requests in slots.items())

        if needed(count) <= free:
            return count
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed(middle) <= free else (low, middle - 1)
        return low


_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
