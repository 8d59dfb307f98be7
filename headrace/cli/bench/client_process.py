"""Runs one client of a serving benchmark, in this process or as one of several.

As a child of `clients.py` it appends a byte to its progress file after each request, and writes its results at the end.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from headrace.cli.bench.client import Target, TimedRequest, drive
from headrace.cli.bench.datasets import PromptMaker
from headrace.cli.bench.metrics import RequestResult
from headrace.process import read_config


class ClientTask(msgspec.Struct, kw_only=True):
    """Tells a client what to send and when."""

    target: Target
    requests: list[TimedRequest]
    seed: int
    vocab_size: int
    start: float
    """monotonic seconds, the same for all processes of a machine"""
    max_concurrency: int | None
    progress_path: str = ""
    result_path: str = ""


class Report(msgspec.Struct, kw_only=True):
    """Holds a client's results, and what they cost it."""

    results: list[RequestResult]
    cpu_seconds: float
    began: float
    ended: float
    """monotonic seconds"""


def run_client(task: ClientTask, on_progress: Callable[[int], object]) -> Report:
    """Send all requests. `on_progress` is called with the number finished after each."""
    results: list[RequestResult] = []
    prompts = PromptMaker(task.seed, task.vocab_size)

    def on_result(result: RequestResult) -> None:
        results.append(result)
        on_progress(len(results))

    cpu, began = time.process_time(), time.monotonic()
    uvloop.run(drive(task.target, task.requests, prompts, task.start, task.max_concurrency, on_result))
    return Report(results=results, cpu_seconds=time.process_time() - cpu, began=began, ended=time.monotonic())


def main() -> None:
    task = msgspec.msgpack.decode(read_config(sys.argv), type=ClientTask)
    gc.freeze()  # collecting what the start leaves would count as the server's time
    with Path(task.progress_path).open("ab", buffering=0) as progress:
        report = run_client(task, lambda done: progress.write(b"."))
    Path(task.result_path).write_bytes(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()
