"""Predicts how long collectives take: all-reduces, exchanges of tokens between experts, sends between pipeline stages.

Knows sizes, links and nodes, nothing of models. All times are seconds, all sizes bytes.
"""

from __future__ import annotations

import math

from headrace.planner.chips import Chip

NETWORK_SECONDS = 15e-6
"""Time that a message to another node takes beside its bytes."""
LIBRARY_START = 3.0
"""How many times longer NCCL and RCCL take to start than the engines' own small all-reduce: 30-40 us over 8 GPUs."""


class Links:
    """Describes what connects the GPUs of a deployment."""

    def __init__(self, chip: Chip, share: float, latency: float) -> None:
        """`share`: of the links' bandwidth, what a large collective reaches; `latency`: of the smallest all-reduce over
        eight GPUs."""
        # bytes/s that one GPU sends to all the others of its node together, and to other nodes
        self.bandwidth = max(chip.link_bandwidth, 1.0) * share
        self.network = max(chip.network_bandwidth, 1.0) * share
        self.latency, self.gpus_per_node = latency, chip.gpus_per_node
        # AMD's GPUs have a link for each pair, so that a group smaller than the node uses only some; others a switch.
        self.direct = chip.vendor == "amd"

    def all_reduce(self, size: float, gpus: int) -> float:
        """Sum `size` bytes of each of `gpus` GPUs: scatter, then gather; within each node first."""
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
        """Send `size` bytes to one neighbour."""
        if other_node:
            return NETWORK_SECONDS + size / self.network
        return self.latency / 2 + size / self._within(2)

    def _start(self, gpus: int) -> float:
        """The latency over `gpus` GPUs: half that of eight for two, and a quarter of it more with each doubling."""
        return self.latency * (1 + math.log2(gpus)) / 4

    def _within(self, gpus: int) -> float:
        """bytes/s that one GPU sends to the others of a group within a node."""
        return self.bandwidth * ((gpus - 1) / max(1, self.gpus_per_node - 1) if self.direct else 1)
