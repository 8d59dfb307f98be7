"""Runs the real scheduler on a virtual clock: step costs become throughput and percentiles of latency.

Every decision about a step is the scheduler's own; only how long the step takes is predicted. Where nothing changes for
a while but the length of what decodes, many steps are made in one jump.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from headrace.cache_groups import same_layout
from headrace.errors import ConfigError, HeadraceError
from headrace.planner.cost import StepModel, StepWork, step_model
from headrace.planner.deployment import Deployment
from headrace.planner.predict import CLOSED_ROUNDS, Limits, Workload
from headrace.request import EngineCoreRequest, Request, RequestStatus
from headrace.sampling_params import SamplingParams
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import RunnerOutput

OPEN_SECONDS = 60.0
"""For how long requests arrive, where they come at a rate and nobody says how many."""
STEP_ITSELF = 16
"""Patience that a step or a jump takes beside its requests."""
MOST_BLOCKS = 512
"""Blocks of a request in a simulation, where the cache holds several: longer requests get larger blocks, which rounds
their memory by a few thousandths and saves most of the time that their blocks take."""
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)


class Segment(NamedTuple):
    """Holds a number of consecutive steps of one rank that are alike."""

    work: StepWork
    steps: int


@dataclass(frozen=True)
class Percentiles:
    """Summarizes a distribution of times, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[tuple[float, float]]) -> Percentiles:
        """Summarize (value, weight) pairs; zeros if there are none."""
        total = sum(weight for _, weight in values)
        if not total:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        ranked: list[float] = []
        seen, shares = 0.0, (0.5, 0.9, 0.99)
        for value, weight in ordered:
            seen += weight
            while len(ranked) < 3 and seen >= shares[len(ranked)] * total:
                ranked.append(value)
        ranked += [ordered[-1][0]] * (3 - len(ranked))
        return cls(sum(value * weight for value, weight in values) / total, *ranked)


@dataclass(frozen=True)
class Simulation:
    """Holds what a simulated run gave: times in seconds, rates of the whole deployment."""

    seconds: float
    """from the first arrival to the last token"""
    output_tok_s: float
    total_tok_s: float
    ttft: Percentiles
    """time to the first token"""
    itl: Percentiles
    """time between two tokens of one request"""
    e2e: Percentiles
    """time of a whole request"""
    num_requests: int
    num_preemptions: int
    max_running: int
    segments: list[Segment] = field(repr=False)
    """the steps, to be costed again with other constants: their order depends on how long they take only where requests
    arrive by the clock"""


class TooLongError(HeadraceError):
    """Tells that a simulation needs more patience than it was given."""


def simulate(
    deployment: Deployment,
    load: Workload,
    limits: Limits,
    *,
    full: bool = False,
    model: StepModel | None = None,
    patience: float = math.inf,
) -> Simulation:
    """Run a workload to its end.

    `full`: run every step instead of jumping over those in which nothing changes. `patience`: how many requests may be
    gone through, summed over steps; each takes some 2 us. Raises ConfigError where a request fits no cache,
    TooLongError at the end of patience.
    """
    longest = load.input_len + load.output_len
    needed = -(-longest // limits.block_size) * limits.block_size
    if needed > limits.kv_tokens:
        raise ConfigError(f"kv_tokens must be at least {needed} for the longest request, got {limits.kv_tokens}")
    model = model or step_model(deployment)
    return _Run(model, _scheduler(model.deployment, limits, longest), load, full, patience).result()


def _arrivals(load: Workload, ranks: int) -> tuple[list[float], int]:
    """When one rank's requests arrive, and how many of them start at once because each client sends one (0: all come by
    the clock). The others wait until a client is free."""
    if load.request_rate is not None:
        rate = load.request_rate / ranks
        count = load.num_prompts or max(100, int(load.request_rate * OPEN_SECONDS))
        draw, here = random.Random(0), max(1, -(-count // ranks))
        return [0.0, *accumulate(draw.expovariate(rate) for _ in range(here - 1))], 0
    count = load.num_prompts or CLOSED_ROUNDS * load.concurrency
    return [0.0] * max(1, -(-count // ranks)), max(1, -(-load.concurrency // ranks))


def _scheduler(deployment: Deployment, limits: Limits, longest: int) -> Scheduler:
    # As many batches as there are pipeline stages are under way at once, each with a budget of its own.
    budget = limits.max_num_batched_tokens * deployment.parallel.pp
    block_size = limits.block_size
    while longest > MOST_BLOCKS * block_size and limits.kv_tokens >= 2 * longest:
        block_size *= 2
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=min(limits.max_num_seqs, budget),
            max_num_batched_tokens=budget,
            max_model_len=longest + 1,
            layout=same_layout(block_size),
            num_pages=limits.kv_tokens // block_size,
            enable_prefix_caching=False,
            enable_chunked_prefill=limits.enable_chunked_prefill or budget < longest + 1,
            mixed_step_tokens=limits.mixed_step_tokens,
            look_ahead=deployment.engine == "headrace",
        )
    )


class _Run:
    """A simulation under way: the scheduler, the clock, and what was observed so far."""

    def __init__(self, model: StepModel, scheduler: Scheduler, load: Workload, full: bool, patience: float) -> None:
        self.model, self.scheduler, self.load, self.full, self.patience = model, scheduler, load, full, patience
        self.ranks = model.deployment.parallel.dp
        self.now = 0.0
        self.arrived: dict[str, float] = {}
        # Requests whose next token is their first, or the first after a preemption: since when they wait for it, and
        # the list that the time belongs to.
        self.waiting: dict[str, tuple[float, list[tuple[float, float]]]] = {}
        # (seconds, weight) of each time to a first token, between tokens, and of a whole request
        self.ttft: list[tuple[float, float]] = []
        self.gaps: list[tuple[float, float]] = []
        self.e2e: list[tuple[float, float]] = []
        self.segments: list[Segment] = []
        self.max_running = self.num_preemptions = 0
        self._prompt = [0] * load.input_len
        times, clients = _arrivals(load, self.ranks)
        # (time, number): requests that come by the clock, and those that wait until a client is free, the first last.
        requests = [(time, number) for number, time in enumerate(times)]
        self.count = len(requests)
        self._coming = requests[: clients or None]
        self._later = requests[: clients - 1 : -1] if clients else []
        heapq.heapify(self._coming)

    def result(self) -> Simulation:
        """Run all requests to their end."""
        scheduler = self.scheduler
        while self._coming or scheduler.has_work():
            self._admit()
            if not scheduler.has_work():
                self.now = self._coming[0][0]
                continue
            quiet = self._step()
            if quiet and not self.full:
                self._jump()
        outside = self.model.efficiency.request
        seconds = max(self.now, 1e-9)
        num_requests = self.count * self.ranks
        made = num_requests * self.load.output_len / seconds
        return Simulation(
            seconds=seconds,
            output_tok_s=made,
            total_tok_s=num_requests * self.load.input_len / seconds + made,
            ttft=Percentiles.of([(value + outside, weight) for value, weight in self.ttft]),
            itl=Percentiles.of(self.gaps),
            e2e=Percentiles.of([(value + outside, weight) for value, weight in self.e2e]),
            num_requests=num_requests,
            num_preemptions=self.num_preemptions,
            max_running=self.max_running * self.ranks,
            segments=self.segments,
        )

    def _admit(self) -> None:
        """Give the scheduler the requests that have arrived by now."""
        while self._coming and self._coming[0][0] <= self.now:
            time, number = heapq.heappop(self._coming)
            name = str(number)
            self.arrived[name] = time
            self.waiting[name] = time, self.ttft
            self.scheduler.add_request(
                EngineCoreRequest(
                    request_id=name, prompt_token_ids=self._prompt, params=_GREEDY, max_tokens=self.load.output_len,
                    seed=0,
                )
            )  # fmt: skip

    def _step(self) -> bool:
        """Run one step. True if it only decoded and everybody goes on, so that the next step will be like it."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        assert plan is not None, "an idle scheduler with requests"
        self.patience -= len(plan.rows) + STEP_ITSELF
        if self.patience < 0:
            raise TooLongError("the simulation takes too long")
        work = StepWork.of(plan)
        duration = self.model.seconds(work.times(self.ranks))
        self._note_preemptions()
        self._advance(work, 1, duration)
        outputs = scheduler.update(plan, RunnerOutput(plan.step, [0] * sum(plan.samples)))
        quiet = not work.prefill_tokens
        if work.decodes:
            self.gaps.append((duration, work.decodes))
        for output in outputs:
            name = output.request_id
            if name in self.waiting:
                since, times = self.waiting.pop(name)
                times.append((self.now - since, 1.0))
            if output.finish_reason is not None:
                quiet = False
                self._finish(name)
        return quiet and len(scheduler.running) == work.decodes

    def _advance(self, work: StepWork, count: int, seconds: float) -> None:
        self.now += seconds
        self.max_running = max(self.max_running, len(self.scheduler.running))
        self.segments.append(Segment(work, count))

    def _note_preemptions(self) -> None:
        count = self.scheduler.stats().num_preemptions
        if count == self.num_preemptions:
            return
        self.num_preemptions = count
        for request in self.scheduler.requests.values():
            if request.status is RequestStatus.PREEMPTED:
                self.waiting.setdefault(request.request_id, (self.now, self.gaps))

    def _finish(self, name: str) -> None:
        self.e2e.append((self.now - self.arrived.pop(name), 1.0))
        if self._later:
            heapq.heappush(self._coming, (self.now, self._later.pop()[1]))

    def _jump(self) -> None:
        """Make the coming steps that are like the last at once: up to the one before a request ends, arrives or finds
        no block. The cost of a step grows almost linearly with the context, so one in the middle stands for all."""
        scheduler, running = self.scheduler, self.scheduler.running.items
        count = min(request.max_total_tokens - request.num_tokens for request in running) - 1
        count = self._steps_with_blocks(running, count)
        if scheduler.steps_blocked > 0 and len(scheduler.waiting):
            count = min(count, scheduler.steps_blocked - 1)  # then it looks again whether one more fits
        if count < 2:
            return
        self.patience -= STEP_ITSELF
        context = sum(request.num_tokens for request in running) / len(running)

        def seconds_at(context: float) -> float:
            return self.model.seconds(StepWork(len(running), context).times(self.ranks))

        seconds = count * seconds_at(context + (count - 1) / 2)
        if self._coming:
            left = self._coming[0][0] - self.now
            while seconds > left and count >= 2:  # stop before the step in which a request arrives
                count = min(count - 1, int(count * left / seconds))
                seconds = max(count, 1) * seconds_at(context + (max(count, 1) - 1) / 2)
            if count < 2:
                return
        for request in running:
            request.token_ids.extend([0] * count)
            request.num_computed_tokens += count
            scheduler.kv_cache.grow(request, request.num_tokens - 1)
        scheduler.steps_blocked -= count
        self._advance(StepWork(len(running), context + (count - 1) / 2), count, seconds)
        low, high = seconds_at(context), seconds_at(context + count - 1)
        parts = min(count, 16)  # the steps of a long jump differ
        for part in range(parts):
            self.gaps.append((low + (high - low) * (part + 0.5) / parts, len(running) * count / parts))

    def _steps_with_blocks(self, running: list[Request], count: int) -> int:
        """How many of `count` steps there are blocks for."""
        cache = self.scheduler.kv_cache
        size, free = cache.block_size, cache.pages.num_available
        # How many tokens requests can still write into blocks that they own -> how many such requests.
        slots = Counter(request.num_blocks * size - request.num_tokens + 1 for request in running)

        def needed(steps: int) -> int:
            return sum(requests * max(0, -((left - steps) // size)) for left, requests in slots.items())

        return count if needed(count) <= free else bisect_right(range(count), free, key=needed) - 1
