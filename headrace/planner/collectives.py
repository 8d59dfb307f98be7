"""Predicts how long collectives take: all-reduces, exchanges of tokens between experts, sends between pipeline stages.

Knows sizes, links and nodes, nothing of models. All times are seconds, all sizes bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.planner.chips import Chip

NETWORK_SECONDS = 15e-6
"""Time that a message to another node takes beside its bytes."""
LIBRARY_START = 3.0
"""How many times longer NCCL and RCCL take to start than the engines' own small all-reduce: 30-40 us over 8 GPUs."""


@dataclass(frozen=True)
class Links:
    """Describes what connects the GPUs of a deployment."""

    bandwidth: float
    """bytes/s that one GPU reaches in a large collective, to all the others of its node together"""
    network: float
    """bytes/s that it reaches to other nodes"""
    latency: float
    """seconds of the smallest all-reduce over eight GPUs"""
    gpus_per_node: int
    direct: bool
    """True: each pair of GPUs has a link of its own, so that a group smaller than the node uses only some; False: there
    is a switch"""

    @classmethod
    def of(cls, chip: Chip, share: float, latency: float) -> Links:
        return cls(
            max(chip.link_bandwidth, 1.0) * share,
            max(chip.network_bandwidth, 1.0) * share,
            latency,
            chip.gpus_per_node,
            chip.vendor == "amd",
        )

    def all_reduce(self, size: float, gpus: int) -> float:
        """Sum `size` bytes of each of `gpus` GPUs: scatter, then gather; within each node first where there are
        several."""
        if gpus < 2:
            return 0.0
        inside = min(gpus, self.gpus_per_node)
        seconds = self._start(inside) + 2 * (inside - 1) / inside * size / self._within(inside) if inside > 1 else 0.0
        if gpus > inside:
            nodes = -(-gpus // inside)
            seconds += 2 * NETWORK_SECONDS + 2 * (nodes - 1) / nodes * size / inside / self.network
        return seconds

    def gather_and_scatter(self, size: float, gpus: int) -> float:
        """Give every GPU the `size` bytes that all have together, and return sums: an all-reduce by the library."""
        if gpus < 2:
            return 0.0
        return self.all_reduce(size, gpus) + (2 * LIBRARY_START - 1) * self._start(min(gpus, self.gpus_per_node))

    def exchange(self, size: float, gpus: int) -> float:
        """Every GPU sends `size` bytes, spread evenly over all `gpus`, and receives as many."""
        if gpus < 2:
            return 0.0
        inside = min(gpus, self.gpus_per_node)
        outside = (gpus - inside) / gpus
        seconds = LIBRARY_START * self._start(inside)
        if inside > 1:
            seconds += (inside - 1) / gpus * size / self._within(inside)
        return seconds + (NETWORK_SECONDS + outside * size / self.network if outside else 0.0)

    def send(self, size: float, other_node: bool) -> float:
        """Send to one neighbour."""
        if other_node:
            return NETWORK_SECONDS + size / self.network
        return self.latency / 2 + size / self._within(2)

    def _start(self, gpus: int) -> float:
        """Seconds that a collective takes to start: half that of eight for two, and a quarter of it more with each
        doubling."""
        return self.latency * (1 + math.log2(gpus)) / 4

    def _within(self, gpus: int) -> float:
        if not self.direct:
            return self.bandwidth
        return self.bandwidth * (gpus - 1) / max(1, self.gpus_per_node - 1)
