"""Collects what /metrics shows, in one Prometheus registry for each engine.

Names are vLLM's, so that its dashboards work; metrics that vLLM lacks begin with `headrace:`. Tokens that were dropped
after a stop string do not count. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.request import DraftCounts, EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats, StepTimes
from headrace.sampling_params import SamplingParams

M = TypeVar("M", Counter, Gauge)
Samples = list[tuple[str, str, dict[str, str], float]]
"""(family, name, labels, value) of each value that is not 0."""
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = tuple(2**i for i in (0, *range(3, 15)))
CHOICES = (1, 2, 5, 10, 20)
STEP_TIMES = {
    "observed": "What steps took, from result to result.",
    "predicted": "What the planner predicts for the same steps.",
}


def token_buckets(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, ... up to `largest`."""
    found: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > largest:
                return tuple(found)
            found.append(step * scale)
        scale *= 10


@dataclass
class RequestTimes:
    """Holds the moments of one choice, in seconds of time.monotonic(); 0.0 for one that has not come."""

    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class Histogram(Collector):
    """Imitates prometheus_client's histogram without its locks: cheap enough for every token, for use by one thread."""

    def __init__(self, name: str, help: str, bounds: Iterable[float], labels: dict[str, str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=tuple(self._labels))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        yield family


class StepTimeSums(Collector):
    """Shows how many steps of each kind ran, and how long they took and should have taken, in seconds."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self.times: dict[str, StepTimes] = {}
        """The core's latest sums; if they are empty, nothing is predicted and nothing shown."""

    def collect(self) -> Iterator[SummaryMetricFamily]:
        for name, help in STEP_TIMES.items() if self.times else ():
            family = SummaryMetricFamily(f"headrace:step_time_seconds_{name}", help, labels=(*self._labels, "kind"))
            for kind, times in self.times.items():
                family.add_metric((*self._labels.values(), kind), times.steps, getattr(times, name))
            yield family


class _Collected(CollectorRegistry):
    """Holds what was collected already, in the form that prometheus_client writes."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class EngineMetrics:
    """Holds all metrics of one engine. Call `begin_iteration` with each message's outputs, and `request_finished` for
    each choice that ends."""

    def __init__(
        self, model_name: str, max_model_len: int, cache_config: dict[str, object], demoted: Sequence[str] = (),
        rank: int = 0, first: bool = True,
    ) -> None:  # fmt: skip
        """`demoted`: kernels that failed the self-check at load and are not used. `rank`: which of several engines.
        `first`: whether this is the first of the front ends that share the engine. It alone shows what the engine
        itself counts, and the others zeros: so all that they show adds up."""
        self.registry = CollectorRegistry()
        self.first = first
        self.others: list[EngineMetrics] = []
        """Those of the engines that are shown beside this one."""
        self._labels = {"model_name": model_name, "engine": str(rank)}
        self.running = self._gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting to run.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV cache in use; 1 is all of it.")
        self.preemptions = self._counter("num_preemptions", "Requests whose cache was taken back.")
        self.queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.short_steps = self._counter("steps_out_of_memory", "Steps that found no memory.", "headrace")
        self.graph_bytes = self._metric(
            Gauge, "headrace:cuda_graph_memory_bytes", "Memory of captured CUDA graphs.", "kind"
        )
        self.grammars = self._counter("grammars_compiled", "Grammars that were compiled.", "headrace")
        self.mask_seconds = self._counter(
            "mask_seconds", "Time in which masks of grammars were made, while the device computed.", "headrace"
        )
        self.expert_pairs = self._metric(
            Counter,
            "headrace:expert_tokens",
            "Tokens, once for each of their experts, that went to a rank's experts, in the steps that were counted.",
            "rank",
        )
        self.busiest_pairs = self._counter(
            "expert_tokens_of_busiest", "The same, of each layer's busiest rank, for which others wait.", "headrace"
        )
        self.drafts = self._counter("spec_decode_num_drafts", "Decodes that verified guessed tokens.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Guessed tokens that were verified.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
        self.accepted_at = self._metric(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place behind the last known one (0: the first).",
            "position",
        )
        self.http_connections = self._gauge("http_connections", "Open connections of clients.", "headrace")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens a step.", ITERATION_TOKENS)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = self._histogram("inter_token_latency_seconds", "Token to next token.", TOKEN_SECONDS)
        self.per_token_old = self._histogram(
            "time_per_output_token_seconds", "Deprecated name of inter_token_latency_seconds.", TOKEN_SECONDS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first.", TOKEN_SECONDS
        )
        seconds = [
            self._histogram(name, help, REQUEST_SECONDS)
            for name, help in (
                ("e2e_request_latency_seconds", "Arrival to end."),
                ("request_queue_time_seconds", "Arrival to first step."),
                ("request_inference_time_seconds", "First step to end."),
                ("request_prefill_time_seconds", "First step to first token."),
                ("request_decode_time_seconds", "First token to end."),
            )
        ]
        self.e2e, self.queue_time, self.inference_time, self.prefill_time, self.decode_time = seconds
        sizes = token_buckets(max_model_len)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens a request.", sizes)
        self.request_generation = self._histogram("request_generation_tokens", "Generated tokens a request.", sizes)
        self.params_n = self._histogram("request_params_n", "Parameter n.", CHOICES)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "Parameter max_tokens.", sizes)
        success = self._metric(Counter, "vllm:request_success", "Requests by end.", "finished_reason")
        self.success = {reason: success.labels(**self._labels, finished_reason=reason.value) for reason in FinishReason}
        info = {"engine": str(rank), **{name: str(value) for name, value in cache_config.items()}}
        Gauge("vllm:cache_config_info", "Settings of the KV cache.", tuple(info), registry=self.registry).labels(
            **info
        ).set(first)
        demoted = demoted if first else ()
        self._gauge("kernels_demoted", "Kernels that the self-check at load took out of service.", "headrace").set(
            len(demoted)
        )
        named = self._metric(
            Gauge, "headrace:kernel_demoted", "1: the self-check at load took this kernel out of service.", "kernel"
        )
        for kernel in demoted:
            named.labels(**self._labels, kernel=kernel).set(1)
        self.step_times = StepTimeSums(self._labels)
        self.registry.register(self.step_times)
        self.stats = SchedulerStats()
        """The core's latest statistics."""
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache that requests hold."""
        return 1 - self.stats.num_free_blocks / self.stats.num_blocks if self.stats.num_blocks else 0.0

    def show_queue(self, gauges: Mapping[str, Callable[[], int]]) -> Callable[[str], None]:
        """Show gauges of the queue in front of the core, read when /metrics is. Returns a function that counts a
        refused request by its reason."""
        for name, value in gauges.items():
            help = f"{name.replace('_', ' ')}".capitalize()
            self._gauge(name, f"{help}: prompts x n, or their prompt tokens.", "headrace").set_function(value)
        rejected = self._metric(
            Counter,
            "headrace:requests_rejected",
            "HTTP requests refused because the queue was full, by the bound that they met.",
            "reason",
        )
        return lambda reason: rejected.labels(**self._labels, reason=reason).inc()

    def render(self, further: Iterable[Samples] = ()) -> bytes:
        """Return all metrics in Prometheus' text format, those of all engines under one heading each. `further`: what
        other front ends count, which is added."""
        families = self._families()
        added: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for family, name, labels, value in chain(*further):
            added[family, name, tuple(labels.items())] += value
        for shown in families.values() if added else ():
            shown.samples = [
                each._replace(value=each.value + added.pop((shown.name, each.name, tuple(each.labels.items())), 0.0))
                for each in shown.samples
            ]
        for (family, name, items), value in added.items():  # with labels that have not come up here
            families[family].add_sample(name, dict(items), value)
        return generate_latest(_Collected(list(families.values())))

    def samples(self) -> Samples:
        """Return what this front end has counted, for the first one to add to its own."""
        return [
            (family.name, each.name, each.labels, each.value)
            for family in self._families().values()
            for each in family.samples
            if each.value and not each.name.endswith("_created")
        ]

    def _families(self) -> dict[str, Metric]:
        families: dict[str, Metric] = {}
        for metrics in (self, *self.others):
            for family in metrics.registry.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        return families

    def show_engine(self) -> Callable[[bool], None]:
        """Show whether the engine serves, and how often it was started again. Returns what is told of each change."""
        up = self._gauge("engine_up", "1: this engine takes requests.", "headrace")
        restarts = self._counter("engine_restarts", "How often this engine has died and come back.", "headrace")
        up.set(self.first)

        def changed(serves: bool) -> None:
            if not self.first:
                return
            up.set(serves)
            restarts.inc(serves)

        return changed

    def forget(self) -> None:
        """Forget what the core counted, because a new one counts from zero."""
        self.stats = SchedulerStats()

    def begin_iteration(self, outputs: EngineCoreOutputs) -> Iteration:
        """Take over the core's statistics; return an object that counts the outputs."""
        stats, seen = outputs.stats, self.stats
        self.stats = stats
        if self.first:
            self._take_counts(seen, stats)
        return Iteration(self, outputs.timestamp or time.monotonic())

    def _take_counts(self, seen: SchedulerStats, stats: SchedulerStats) -> None:
        """Show what the core itself counts; `seen` was shown before."""
        self.step_times.times = stats.step_times
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(self.kv_cache_usage)
        self.preemptions.inc(stats.num_preemptions - seen.num_preemptions)
        self.queries.inc(stats.prefix_cache_queries - seen.prefix_cache_queries)
        self.hits.inc(stats.prefix_cache_hits - seen.prefix_cache_hits)
        if stats.num_short_steps != seen.num_short_steps:
            self.short_steps.inc(stats.num_short_steps - seen.num_short_steps)
        if stats.mask_seconds != seen.mask_seconds or stats.num_grammars != seen.num_grammars:
            self.grammars.inc(stats.num_grammars - seen.num_grammars)
            self.mask_seconds.inc(stats.mask_seconds - seen.mask_seconds)
        if stats.drafts.num_drafts != seen.drafts.num_drafts:
            self._count_drafts(seen.drafts, stats.drafts)
        if stats.expert_load.of_ranks:
            before = (*seen.expert_load.of_ranks, *[0] * len(stats.expert_load.of_ranks))
            for rank, count in enumerate(stats.expert_load.of_ranks):
                self.expert_pairs.labels(**self._labels, rank=str(rank)).inc(count - before[rank])
            self.busiest_pairs.inc(stats.expert_load.of_busiest - seen.expert_load.of_busiest)
        if stats.graph_bytes != seen.graph_bytes:
            for kind in {*seen.graph_bytes, *stats.graph_bytes}:
                self.graph_bytes.labels(**self._labels, kind=kind).set(stats.graph_bytes.get(kind, 0))

    def _count_drafts(self, seen: DraftCounts, now: DraftCounts) -> None:
        self.drafts.inc(now.num_drafts - seen.num_drafts)
        self.draft_tokens.inc(now.num_tokens - seen.num_tokens)
        self.accepted_tokens.inc(now.num_accepted - seen.num_accepted)
        before = (*seen.accepted_at, *[0] * len(now.accepted_at))
        for place, count in enumerate(now.accepted_at):
            self.accepted_at.labels(**self._labels, position=str(place)).inc(count - before[place])

    def request_finished(
        self,
        reason: FinishReason,
        times: RequestTimes,
        num_prompt_tokens: int,
        num_output_tokens: int,
        params: SamplingParams,
    ) -> None:
        """Count a choice that has ended."""
        self.success[reason].inc()
        self.e2e.observe(time.monotonic() - times.arrival)
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)
        if not times.first_token:  # it never ran to a token
            return
        self.request_prompt.observe(num_prompt_tokens)
        self.request_generation.observe(num_output_tokens)
        decode = times.last_token - times.first_token
        self.decode_time.observe(decode)
        if num_output_tokens > 1:
            self.per_token.observe(decode / (num_output_tokens - 1))
        if times.scheduled:
            self.queue_time.observe(max(0.0, times.scheduled - times.arrival))
            self.prefill_time.observe(max(0.0, times.first_token - times.scheduled))
            self.inference_time.observe(max(0.0, times.last_token - times.scheduled))

    def _metric(self, kind: type[M], name: str, help: str, *more_labels: str) -> M:
        return kind(name, help, (*self._labels, *more_labels), registry=self.registry)

    def _gauge(self, name: str, help: str, prefix: str = "vllm") -> Gauge:
        return self._metric(Gauge, f"{prefix}:{name}", help).labels(**self._labels)

    def _counter(self, name: str, help: str, prefix: str = "vllm") -> Counter:
        return self._metric(Counter, f"{prefix}:{name}", help).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help, buckets, self._labels)
        self.registry.register(histogram)
        return histogram


class Iteration:
    """Counts the tokens of one step. `now` is when the core sent them, in seconds of time.monotonic()."""

    def __init__(self, metrics: EngineMetrics, now: float) -> None:
        self._metrics = metrics
        self._now = now
        self._num_generated = 0
        self._num_prompt = 0
        self._gaps: Tally[float] = Tally()
        """Seconds since the same request's previous token -> how many requests; equal for most requests of a step."""

    def record(self, times: RequestTimes, output: EngineCoreOutput, num_prompt_tokens: int, num_kept: int) -> None:
        """Count the output of one choice. `num_kept`: how many of its new tokens count."""
        if output.scheduled_time:
            times.scheduled = output.scheduled_time
        if output.pooled and output.finish_reason is not None:
            self._num_prompt += num_prompt_tokens
            times.first_token = times.last_token = self._now
        if not num_kept:
            return
        self._num_generated += num_kept
        if not times.first_token:
            times.first_token = self._now
            self._num_prompt += num_prompt_tokens
            self._metrics.first_token.observe(max(0.0, time.monotonic() - times.arrival))
        else:
            self._gaps[max(0.0, self._now - times.last_token)] += 1
        times.last_token = self._now

    def end(self) -> None:
        """Add the step's sums to the metrics."""
        metrics, generated, prompt = self._metrics, self._num_generated, self._num_prompt
        if not generated and not prompt:
            return
        metrics.iteration_tokens.observe(generated + prompt)
        metrics.generation_tokens.inc(generated)
        metrics.num_generation_tokens += generated
        metrics.prompt_tokens.inc(prompt)
        metrics.num_prompt_tokens += prompt
        for gap, times in self._gaps.items():
            metrics.inter_token.observe(gap, times)
            metrics.per_token_old.observe(gap, times)
