"""`python -m headrace.cli.bench.client_process`: one of several clients, where one core cannot take all the tokens.

Started by `fleet.py`; writes a byte to its progress file after each request and its results to another file at the end.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from headrace.cli.bench.client import Departure, Target, drive
from headrace.cli.bench.datasets import PromptMaker
from headrace.cli.bench.metrics import RequestResult
from headrace.process import read_config


class Orders(msgspec.Struct, kw_only=True):
    target: Target
    departures: list[Departure]
    seed: int
    vocab_size: int
    start: float
    """monotonic seconds, which all processes of a machine share"""
    max_concurrency: int | None
    progress_path: str
    result_path: str


class Report(msgspec.Struct, kw_only=True):
    results: list[RequestResult]
    cpu_seconds: float
    began: float
    ended: float
    """monotonic seconds"""


def run_orders(orders: Orders) -> Report:
    results: list[RequestResult] = []
    prompts = PromptMaker(orders.seed, orders.vocab_size)
    with Path(orders.progress_path).open("ab", buffering=0) as progress:

        def on_result(result: RequestResult) -> None:
            results.append(result)
            progress.write(b".")

        gc.freeze()  # looking through what a start leaves would be counted as the server's time
        cpu, began = time.process_time(), time.monotonic()
        uvloop.run(drive(orders.target, orders.departures, prompts, orders.start, orders.max_concurrency, on_result))
    return Report(results=results, cpu_seconds=time.process_time() - cpu, began=began, ended=time.monotonic())


def main() -> None:
    orders = msgspec.msgpack.decode(read_config(sys.argv), type=Orders)
    Path(orders.result_path).write_bytes(msgspec.msgpack.encode(run_orders(orders)))


if __name__ == "__main__":
    main()
