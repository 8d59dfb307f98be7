"""Times kernels as serving launches them, inside a CUDA graph, and compares their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.quantization import gpu_linear


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Return the seconds of one call, on average over a graph of all `calls`: the median of `repeats` replays.

    Without a GPU the first call runs once, and the result means nothing.
    """
    if torch.cuda.is_available():
        return gpu_linear.graph_seconds(lambda call: call(), calls, repeats)
    calls[0]()
    return 1e-6


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return ||out - reference|| / ||reference||; NaN where either holds one."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm().clamp_min(1e-30))
