"""Runs the load of a serving benchmark in one client process or several, and measures what the clients cost."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.cli.bench.client import Target, TimedRequest
from headrace.cli.bench.client_process import ClientTask, Report, run_client
from headrace.cli.bench.datasets import BenchRequest
from headrace.cli.bench.metrics import RequestResult
from headrace.errors import HeadraceError
from headrace.process import Child, spawn

START_DELAY = 1.5
"""Seconds from spawning clients to the first request, by which all have loaded."""
POLL = 0.1


@dataclass(frozen=True)
class LoadReport:
    """Holds the results of all clients."""

    results: list[RequestResult]
    """in the order of the requests"""
    duration: float
    cpu_shares: list[float]
    """CPU seconds over run seconds, for each client process"""


def run_clients(
    target: Target,
    requests: list[BenchRequest],
    times: list[float],
    seed: int,
    vocab_size: int,
    *,
    processes: int,
    max_concurrency: int | None,
    on_progress: Callable[[int], None],
) -> LoadReport:
    """Send requests at `times` (seconds after the start). `on_progress` is called with the number finished so far."""
    timed = [TimedRequest(i, times[i], request) for i, request in enumerate(requests)]
    processes = min(processes, len(requests), max_concurrency or processes)
    start = time.monotonic() + (START_DELAY if processes > 1 else 0.0)
    tasks = []
    for rank in range(processes):
        share = None
        if max_concurrency is not None:
            share = max_concurrency // processes + (rank < max_concurrency % processes)
        tasks.append(
            ClientTask(
                target=target,
                requests=timed[rank::processes],
                seed=seed,
                vocab_size=vocab_size,
                start=start,
                max_concurrency=share,
            )
        )
    reports = _in_children(tasks, on_progress) if processes > 1 else [run_client(tasks[0], on_progress)]
    results = sorted((result for report in reports for result in report.results), key=lambda result: result.index)
    duration = max(report.ended for report in reports) - start
    return LoadReport(results, duration, [report.cpu_seconds / duration for report in reports])


def _in_children(tasks: list[ClientTask], on_progress: Callable[[int], None]) -> list[Report]:
    """Run each client in a process of its own. Raises HeadraceError where one dies."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        children: list[Child] = []
        progress = [Path(folder, f"progress-{rank}") for rank in range(len(tasks))]
        result_paths = [Path(folder, f"result-{rank}") for rank in range(len(tasks))]
        try:
            for own, progress_path, result_path in zip(tasks, progress, result_paths, strict=True):
                progress_path.touch()
                own = msgspec.structs.replace(own, progress_path=str(progress_path), result_path=str(result_path))
                children.append(spawn("headrace.cli.bench.client_process", msgspec.msgpack.encode(own)))
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
    late = max(report.began for report in reports) - tasks[0].start
    if late > 0:
        print(
            f"headrace: warning: a client process was ready {late:.2f} s after the first request's time",
            file=sys.stderr,
        )
    return reports
