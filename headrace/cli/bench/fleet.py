"""The load of a serving benchmark over one client process or several, and what the clients themselves cost."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from headrace.cli.bench.client import Departure, Target, drive
from headrace.cli.bench.client_process import Orders, Report
from headrace.cli.bench.datasets import BenchRequest, PromptMaker
from headrace.cli.bench.metrics import RequestResult
from headrace.errors import HeadraceError
from headrace.process import Child, spawn

START_DELAY = 1.5
"""seconds from spawning clients to the first request: all have loaded by then"""
POLL = 0.1


@dataclass(frozen=True)
class FleetReport:
    results: list[RequestResult]
    """in the order of the requests"""
    duration: float
    cpu_shares: list[float]
    """CPU seconds over run seconds, one a client process"""


def run_fleet(
    target: Target,
    requests: list[BenchRequest],
    times: list[float],
    seed: int,
    vocab_size: int,
    *,
    processes: int,
    max_concurrency: int | None,
    on_progress: Callable[[int], None],
) -> FleetReport:
    """Send requests at `times` (seconds after the start). `on_progress` gets the number finished so far."""
    departures = [Departure(i, times[i], request) for i, request in enumerate(requests)]
    if max_concurrency is not None:
        processes = min(processes, max_concurrency)
    processes = min(processes, len(requests))
    if processes > 1:
        reports, start = _spawned(target, departures, seed, vocab_size, processes, max_concurrency, on_progress)
    else:
        reports, start = _in_process(target, departures, PromptMaker(seed, vocab_size), max_concurrency, on_progress)
    results = sorted((result for report in reports for result in report.results), key=lambda result: result.index)
    duration = max(report.ended for report in reports) - start
    return FleetReport(results, duration, [report.cpu_seconds / duration for report in reports])


def _in_process(
    target: Target,
    departures: list[Departure],
    prompts: PromptMaker,
    max_concurrency: int | None,
    on_progress: Callable[[int], None],
) -> tuple[list[Report], float]:
    results: list[RequestResult] = []

    def on_result(result: RequestResult) -> None:
        results.append(result)
        on_progress(len(results))

    cpu, start = time.process_time(), time.monotonic()
    uvloop.run(drive(target, departures, prompts, start, max_concurrency, on_result))
    spent = time.process_time() - cpu
    return [Report(results=results, cpu_seconds=spent, began=start, ended=time.monotonic())], start


def _spawned(
    target: Target,
    departures: list[Departure],
    seed: int,
    vocab_size: int,
    processes: int,
    max_concurrency: int | None,
    on_progress: Callable[[int], None],
) -> tuple[list[Report], float]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        start = time.monotonic() + START_DELAY
        children: list[Child] = []
        progress = [Path(folder, f"progress-{rank}") for rank in range(processes)]
        result_paths = [Path(folder, f"result-{rank}") for rank in range(processes)]
        try:
            for rank in range(processes):
                share = None
                if max_concurrency is not None:
                    share = max_concurrency // processes + (rank < max_concurrency % processes)
                progress[rank].touch()
                orders = Orders(
                    target=target,
                    departures=departures[rank::processes],
                    seed=seed,
                    vocab_size=vocab_size,
                    start=start,
                    max_concurrency=share,
                    progress_path=str(progress[rank]),
                    result_path=str(result_paths[rank]),
                )
                children.append(spawn("headrace.cli.bench.client_process", msgspec.msgpack.encode(orders)))
            while any(child.is_alive() for child in children):
                on_progress(sum(path.stat().st_size for path in progress))
                time.sleep(POLL)
            on_progress(sum(path.stat().st_size for path in progress))
        finally:
            for child in children:
                child.stop(timeout=2.0)
        if any(child.process.returncode for child in children):
            raise HeadraceError("a client process of the benchmark died; its traceback is above")
        decode = msgspec.msgpack.Decoder(Report).decode
        reports = [decode(path.read_bytes()) for path in result_paths]
        late = max(report.began for report in reports) - start
        if late > 0:
            print(
                f"headrace: warning: a client process was ready {late:.2f} s after the first request's time",
                file=sys.stderr,
            )
        return reports, start
