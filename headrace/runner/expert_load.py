"""Counts how many tokens go to the experts of each rank, in a step every few seconds.

Such a step runs without graphs, so that all others have no operation more. What counts is each layer's busiest rank,
for which the others wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.layers.moe import SparseMoE
from headrace.runner.pending import to_host
from headrace.step import ExpertLoad

SECONDS = 10.0
"""Time between two steps that are counted."""


class LoadCounter:
    """Holds the counters of one rank, which sees where all tokens of its engine go."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, SparseMoE) and len(layer.places) > 1]
        self._device = device
        self._counted_at = time.monotonic()

    @property
    def due(self) -> bool:
        """True if the next step is to be counted."""
        return bool(self._layers) and time.monotonic() - self._counted_at >= SECONDS

    def begin(self) -> None:
        """Let the layers count what they compute from now on."""
        for layer in self._layers:
            layer.chosen = torch.zeros(layer.spec.num_experts, dtype=torch.int64, device=self._device)

    def end(self) -> Callable[[], ExpertLoad]:
        """Count no longer; return what tells the counts once the current stream has reached this point."""
        self._counted_at = time.monotonic()
        counted = []
        for layer in self._layers:
            assert layer.chosen is not None
            counted.append((layer.places, to_host(layer.chosen)))
            layer.chosen = None
        return partial(_load_of, counted)


def _load_of(counted: list[tuple[list[range], Tensor]]) -> ExpertLoad:
    """Sum up what layers have counted: (experts of each rank, tokens of each expert # [num_experts] int64)."""
    of_ranks = [[int(chosen[own.start : own.stop].sum()) for own in places] for places, chosen in counted]
    return ExpertLoad([sum(loads) for loads in zip(*of_ranks, strict=True)], sum(map(max, of_ranks)))
