"""Computes TTFT, TPOT, ITL and E2EL as vLLM defines them, their summary and its table.

- TTFT: from sending the request to its first token chunk.
- ITL: between one token chunk and the next (a chunk may hold several tokens).
- E2EL: from sending the request to its last token chunk.
- TPOT: (E2EL - TTFT) / (output tokens - 1), of requests with more than one output token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy

METRIC_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
WIDTH = 50


class RequestResult(msgspec.Struct, kw_only=True):
    """Holds what one request measured; all times in seconds."""

    index: int = 0
    success: bool = False
    error: str = ""
    start_time: float = 0.0
    """monotonic"""
    ttft: float = 0.0
    itl: list[float] = []
    latency: float = 0.0
    prompt_len: int = 0
    cached_len: int = 0
    """prompt tokens that the server had in its prefix cache, if it says so"""
    output_len: int = 0

    @property
    def tpot(self) -> float:
        """Seconds; 0 for a single token, which is good in goodput and does not count in TPOT's mean."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class StreamRecorder:
    """Turns the SSE payloads of one response, each with its time, into a RequestResult."""

    __slots__ = ("_chunks", "_decode", "_last", "_usage", "done", "result")

    def __init__(self, index: int, start_time: float, prompt_len: int) -> None:
        self.result = RequestResult(index=index, start_time=start_time, prompt_len=prompt_len, itl=[])
        self.done = False
        self._last = start_time
        self._chunks = 0
        self._usage: _Usage | None = None
        self._decode = _DECODER.decode

    def event(self, payload: bytes, now: float) -> None:
        """Record one event's payload, received at `now` (monotonic seconds)."""
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = self._decode(payload)
        except msgspec.MsgspecError as error:
            self.fail(f"unreadable event: {error}")
            return
        if event.error is not None:
            self.fail(f"server error: {event.error}")
        if event.usage is not None:
            self._usage = event.usage
        if not event.choices or not _carries_token(event.choices[0]):
            return
        if self._chunks == 0:
            self.result.ttft = now - self.result.start_time
        else:
            self.result.itl.append(now - self._last)
        self._chunks += 1
        self._last = now

    def fail(self, message: str) -> None:
        """Record an error; the first one is kept."""
        if not self.result.error:
            self.result.error = message

    def finish(self) -> RequestResult:
        """Return the result once the response has ended. Output tokens are as the server counts, else the chunks."""
        result = self.result
        if not result.error and not self.done:
            self.fail("the stream ended without [DONE]")
        if not result.error and self._chunks == 0:
            self.fail("no token came")
        result.latency = self._last - result.start_time
        result.output_len = self._usage.completion_tokens if self._usage else self._chunks
        if self._usage is not None and self._usage.prompt_tokens:
            result.prompt_len = self._usage.prompt_tokens
        if self._usage is not None and self._usage.prompt_tokens_details is not None:
            result.cached_len = self._usage.prompt_tokens_details.cached_tokens or 0
        result.success = not result.error
        return result


_DECODER = msgspec.json.Decoder(_Event)


def _carries_token(choice: _Choice) -> bool:
    """Tell whether a chunk holds a token: a chat stream sends the role and the end in chunks of their own."""
    delta = choice.delta
    if delta is None or delta.content or delta.reasoning_content:
        return True
    return delta.role is None and choice.finish_reason is None


def percentile_name(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def summarize(
    results: Sequence[RequestResult],
    duration: float,
    metrics: Iterable[str],
    percentiles: Sequence[float],
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Return the keys of vLLM's result file, in its order. `goodput`: metric -> largest good value in milliseconds."""
    good = [result for result in results if result.success]
    total_input = sum(result.prompt_len for result in good)
    total_output = sum(result.output_len for result in good)
    peak_tokens, peak_requests = _peaks(good)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(result.cached_len for result in good),
        "request_throughput": len(good) / duration,
        "request_goodput": _goodput(good, goodput) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    for metric in metrics:
        values = metric_values(good, metric)
        summary[f"mean_{metric}_ms"] = _milliseconds(numpy.mean, values)
        summary[f"median_{metric}_ms"] = _milliseconds(numpy.median, values)
        summary[f"std_{metric}_ms"] = _milliseconds(numpy.std, values)
        for percentile in percentiles:
            at = percentile
            summary[f"p{percentile_name(at)}_{metric}_ms"] = _milliseconds(
                lambda v, at=at: numpy.percentile(v, at), values
            )
    return summary


def metric_values(good: Sequence[RequestResult], metric: str) -> list[float]:
    """Return the seconds of a metric, of successful requests."""
    if metric == "ttft":
        return [result.ttft for result in good]
    if metric == "tpot":
        return [result.tpot for result in good if result.output_len > 1]
    if metric == "itl":
        return [gap for result in good for gap in result.itl]
    return [result.latency for result in good]


def events_per_token(results: Sequence[RequestResult]) -> float:
    """Return 1 where each token came in an event of its own, less where a busy server or client merged some."""
    good = [result for result in results if result.success]
    tokens = sum(result.output_len for result in good)
    return sum(len(result.itl) + 1 for result in good) / tokens if tokens else 0.0


def _milliseconds(statistic: Callable[..., Any], values: list[float]) -> float:
    return float(statistic(values)) * 1000 if values else 0.0


def _goodput(good: Sequence[RequestResult], limits: dict[str, float]) -> int:
    def is_good(result: RequestResult) -> bool:
        measured = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}
        return all(measured[metric] * 1000 <= limit for metric, limit in limits.items())

    return sum(map(is_good, good))


def _peaks(good: Sequence[RequestResult]) -> tuple[float, int]:
    """Return the most token chunks within one second of the run, and the most requests running at one instant."""
    if not good:
        return 0.0, 0
    begin = min(result.start_time for result in good)
    chunk_times = [result.start_time - begin + result.ttft + numpy.cumsum([0.0, *result.itl]) for result in good]
    per_second = numpy.bincount(numpy.concatenate(chunk_times).astype(int))
    edges = [(result.start_time, 1) for result in good] + [(result.start_time + result.latency, -1) for result in good]
    now = peak = 0
    for _, change in sorted(edges):
        now += change
        peak = max(peak, now)
    return float(per_second.max()), peak


def table(summary: dict[str, Any], percentiles: Sequence[float], extra: Sequence[tuple[str, str]] = ()) -> str:
    """Format vLLM's "Serving Benchmark Result". `extra` rows (label, value) come last."""
    rows: list[str] = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def row(label: str, key: str) -> None:
        value = summary.get(key)
        if value is not None and not (isinstance(value, float) and math.isinf(value)):
            rows.append(f"{label:<40} {f'{value:.2f}' if isinstance(value, float) else value:<10}".rstrip())

    row("Successful requests:", "completed")
    row("Failed requests:", "failed")
    row("Maximum request concurrency:", "max_concurrency")
    if isinstance(summary.get("request_rate"), float):
        row("Request rate configured (RPS):", "request_rate")
    row("Benchmark duration (s):", "duration")
    row("Total input tokens:", "total_input_tokens")
    if summary.get("total_cached_tokens"):
        row("  found in the prefix cache:", "total_cached_tokens")
    row("Total generated tokens:", "total_output_tokens")
    row("Request throughput (req/s):", "request_throughput")
    row("Request goodput (req/s):", "request_goodput")
    row("Output token throughput (tok/s):", "output_throughput")
    row("Peak output token throughput (tok/s):", "max_output_tokens_per_s")
    row("Peak concurrent requests:", "max_concurrent_requests")
    row("Total token throughput (tok/s):", "total_token_throughput")
    for metric, (short, title) in METRIC_TITLES.items():
        if f"mean_{metric}_ms" not in summary:
            continue
        rows.append(title.center(WIDTH, "-"))
        row(f"Mean {short} (ms):", f"mean_{metric}_ms")
        row(f"Median {short} (ms):", f"median_{metric}_ms")
        for percentile in percentiles:
            name = percentile_name(percentile)
            row(f"P{name} {short} (ms):", f"p{name}_{metric}_ms")
    if extra:
        rows.append("Client".center(WIDTH, "-"))
        rows += [f"{label:<40} {value}" for label, value in extra]
    rows.append("=" * WIDTH)
    return "\n".join(rows)
