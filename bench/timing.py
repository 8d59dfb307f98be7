"""Times kernels as serving launches them, inside a CUDA graph, and compares their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Return the seconds of one call, on average over a graph of all `calls`: the median of `repeats` replays.

    The calls should read more memory than the caches hold. Without a GPU the first call runs once, and the result
    means nothing.
    """
    calls[0]()  # compiles
    if not torch.cuda.is_available():
        return 1e-6
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
        if turn:  # the first replay is not counted
            times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return ||out - reference|| / ||reference||; NaN where either holds one."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm().clamp_min(1e-30))
