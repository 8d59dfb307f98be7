"""Seconds of kernels inside a CUDA graph, as serving launches them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Of one call, on average, in a graph of all; median of `repeats` replays after one that is not counted. The calls
    should walk through more memory than the caches hold."""
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for turn in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn:
            times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)
