"""Checks and times the kernels that sum and exchange rows over GPUs, for bench/many_gpus.py.

The ranks are processes with a GPU each, of which each knows one, or streams of one process on one GPU: then nothing may
load code or wait for the device while one of them waits for another.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import norm
from headrace.kernels.cases import EPS, Inputs, relative_error, rows_of_ranks, sums_in_two, sums_over_ranks
from headrace.kernels.peers import EMPTY, Peers

Sizes = tuple[tuple[int, int], ...]
SIZES: Sizes = ((1, 8192), (32, 8192), (128, 8192), (3, 4096), (70, 2880), (1, 100), (200, 77), (256, 1024))
SMOKE_SIZES: Sizes = ((1, 100), (3, 40), (2, 64))
"""(rows, hidden) of a burst's sums"""
MOST_DELAY = 60_000
"""clock cycles, some 30 us"""
CALLS = 200
"""of a graph that is timed"""


class Burst:
    """Holds one rank's sums and exchanges of `sizes`, each in all ways, and what must come out."""

    def __init__(self, own: Peers, make: Inputs, sizes: Sizes) -> None:
        self.own = own
        ways = [sums_over_ranks, rows_of_ranks, *([sums_in_two] if own.ranks > 1 else [])]
        each = [
            (f"{way.__name__} of {rows} x {hidden}, number {number}", *one)
            for rows, hidden in sizes
            for way in ways
            for number, one in enumerate(way(make, own, rows, hidden))
        ]
        self.names = [name for name, *_ in each]
        self.sums: list[Any] = [one for _, *one in each]
        """(computes a sum, what must come of it, the largest error)"""

    def run(self, delays: random.Random | None = None) -> list[Any]:
        """Compute all sums, one right behind the other; `delays`: at random places the stream waits before."""
        found = []
        for run, _, _ in self.sums:
            wait(delays)
            found.append(run())
        return found

    def check(self, found: list[Any]) -> None:
        """Raise RuntimeError where a result is wrong."""
        if self.own.gave_up:
            raise RuntimeError(f"rank {self.own.rank} did not get all shares")
        for name, result, (_, expected, bound) in zip(self.names, found, self.sums, strict=True):
            if not (error := relative_error(result, expected)) <= bound:
                raise RuntimeError(f"rank {self.own.rank}, {name}: error {error:.1e} > {bound:.1e}")


def wait(delays: random.Random | None) -> None:
    """Let the current stream wait for a random time, or not at all."""
    if delays is not None and torch.cuda.is_available() and delays.random() < 0.5:
        torch.cuda._sleep(delays.randrange(MOST_DELAY))


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_on(stream: Any, launch: Callable[[], Any]) -> Any:
    """Return what `launch` does on a stream; None: there are no streams."""
    if stream is None:
        return launch()
    with torch.cuda.stream(stream):
        return launch()


def replay(graph: torch.cuda.CUDAGraph, delays: random.Random) -> None:
    """Replay a graph three times, each after a random wait."""
    for _ in range(3):
        wait(delays)
        graph.replay()


def race(ranks: list[tuple[Peers, Any]], make: Callable[[int], Inputs], sizes: Sizes, bursts: int, replays: int) -> int:
    """Compare so many bursts and replays of graphs, of all `ranks` (each with its stream), with their reference; return
    the number of sums of each rank. `make`: gives the inputs of a seed. Raises RuntimeError where one is wrong."""
    delays = [random.Random(own.rank) for own, _ in ranks]
    draw, count = random.Random(0), 0
    for number in range(bursts):
        drawn = tuple(draw.choices(sizes, k=len(sizes)))
        made = [Burst(own, make(number), drawn) for own, _ in ranks]
        settle()
        found = [
            run_on(stream, partial(burst.run, delay))
            for (_, stream), burst, delay in zip(ranks, made, delays, strict=True)
        ]
        settle()
        for burst, results in zip(made, found, strict=True):
            burst.check(results)
        count += len(found[0])
    graphs = []
    for own, stream in ranks if replays else ():
        burst, graph = Burst(own, make(bursts), sizes), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = burst.run()
        graphs.append((burst, graph, results))
    for _ in range(replays):
        for (_, stream), (_, graph, _), delay in zip(ranks, graphs, delays, strict=True):
            run_on(stream, partial(replay, graph, delay))
        settle()
        for burst, _, results in graphs:
            burst.check(results)
        count += 3 * len(graphs[0][2])
    return count


def graph_us(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call, which all ranks make together, in graphs of CALLS."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(9):
        settle()
        began = time.perf_counter()
        graph.replay()
        settle()
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(times[2:])


def normed(x: Tensor, share: Tensor, weight: Tensor, own: Peers | None, library: Any = None) -> Tensor:
    """Sum shares over the ranks by `own` or by a `library`, if there is one, add the sum to x, and norm that."""
    return norm.rms_norm(norm.Unsummed(x, library(share) if library else share, peers=own), weight, EPS)


def two_streams(smoke: bool) -> dict[str, Any]:
    """Let two ranks be streams of one GPU: {"sums": how many were compared}. On a CPU there is one rank, under Triton's
    interpreter."""
    device, dtype = (torch.device("cpu"), torch.float32) if smoke else (torch.device("cuda"), torch.bfloat16)
    streams = [None] if smoke else [torch.cuda.Stream(), torch.cuda.Stream()]
    sizes, count, room = SMOKE_SIZES if smoke else SIZES, len(streams), (1 if smoke else 16) * 2**20
    buffers = [torch.empty(count * room, dtype=torch.int16, device=device) for _ in range(count)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)

    make = partial(Inputs, dtype, device)

    def ranks(most_looks: int) -> list[tuple[Peers, Any]]:
        for buffer in buffers:
            buffer.fill_(EMPTY)
        made = [Peers(rank, addresses, room, lambda x: x, most_looks=most_looks) for rank in range(count)]
        settle()
        return list(zip(made, streams, strict=True))

    for own, stream in ranks(most_looks=16):  # loads all code, while each rank is alone and soon gives up
        run_on(stream, Burst(own, make(0), sizes).run)
        settle()
    return {"sums": race(ranks(most_looks=1 << 20), make, sizes, *((1, 0) if smoke else (300, 500)))}
