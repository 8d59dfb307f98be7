"""Predicts how long collectives take: all-reduces, exchanges of tokens between experts, sends between pipeline stages.

Where the links were measured (collectives.json, by bench/many_gpus.py), times are read between measured sizes; over
other numbers of GPUs, and elsewhere, they are reckoned. Knows sizes, links and nodes, nothing of models. All times are
seconds, all sizes bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.planner.chips import Chip
from headrace.planner.constants import find_fitted

NETWORK_SECONDS = 15e-6
"""Time that a message to another node takes beside its bytes."""
LIBRARY_START = 3.0
"""How many times longer NCCL and RCCL take to start than the engines' own small all-reduce: 6.9 us and 2.3 over two
H100."""
GATHERED = 1.3
"""How many times NCCL's sum of as many bytes it takes to gather tokens and to scatter their sums: two H100, from 32 MiB
a GPU on, below which the host bounded what was measured."""


@dataclass(frozen=True)
class Measured:
    """Holds what one kind of link was measured to take: `python bench/many_gpus.py --part collectives`."""

    gpus: int
    microseconds: dict[str, tuple[tuple[float, float], ...]]
    """(bytes that each GPU brings, time) by collective: sum (by headrace's own kernels, as far as these go), library,
    send (small ones take as long as the smallest here, which is the host's time)"""

    def read(self, name: str, size: float) -> float:
        """Read seconds between the two nearest sizes; beyond the largest, as from the one before it on."""
        points = self.microseconds[name]
        at = min(max(1, bisect_left(points, (size, 0.0))), len(points) - 1)
        (less, quick), (more, slow) = points[at - 1 : at + 1]
        return 1e-6 * (quick + (max(size, points[0][0]) - less) / (more - less) * (slow - quick))


MEASURED = msgspec.json.decode(
    Path(__file__).with_name("collectives.json").read_bytes(), type=dict[str, dict[str, Measured]]
)
"""Engine -> link."""


def reckoned_sums(chip: Chip, engine: str, gpus: int) -> str:
    """Name sums over so many GPUs, with what their time is reckoned from, unless it was measured; then ""."""
    found = MEASURED.get(engine, {}).get(chip.link)
    known = find_fitted(chip, engine).gpus if found is None else found.gpus
    if gpus in (1, known):
        return ""
    return f"sums over {gpus} GPUs (reckoned from {f'{known} GPUs' if known > 1 else 'data sheets'})"


class Links:
    """Describes what connects the GPUs of a deployment."""

    def __init__(self, chip: Chip, engine: str, share: float, latency: float) -> None:
        """`share`: of the links' bandwidth, what a large collective reaches; `latency`: of the smallest all-reduce over
        eight GPUs; neither counts where sums of this engine over such links were measured."""
        self.measured = MEASURED.get(engine, {}).get(chip.link)
        # bytes/s that one GPU sends to all the others of its node together, and to other nodes
        self.bandwidth = max(chip.link_bandwidth, 1.0) * share
        self.network = max(chip.network_bandwidth, 1.0) * share
        self.latency, self.gpus_per_node = latency, chip.gpus_per_node
        # AMD's GPUs have a link for each pair, so that a group smaller than the node uses only some; others a switch.
        self.direct = chip.vendor == "amd"

    def all_reduce(self, size: float, gpus: int, name: str = "sum") -> float:
        """Sum `size` bytes of each of `gpus` GPUs: scatter, then gather; within each node first."""
        if gpus < 2:
            return 0.0
        inside = min(gpus, self.gpus_per_node)
        seconds = self._sum(size, inside, name) if inside > 1 else 0.0
        if gpus > inside:
            nodes = -(-gpus // inside)
            seconds += 2 * NETWORK_SECONDS + 2 * (nodes - 1) / nodes * size / inside / self.network
        return seconds

    def _sum(self, size: float, gpus: int, name: str) -> float:
        """A sum within a node. A GPU sends 2 (n - 1) / n of its bytes; each doubling starts half as much later as two
        GPUs take."""
        sent, doublings = 2 * (gpus - 1) / gpus * size, math.log2(gpus)
        if (found := self.measured) is not None:
            few = 2 * (found.gpus - 1) / found.gpus
            starts = (1 + doublings) / (1 + math.log2(found.gpus)) - 1
            return found.read(name, sent / few) + starts * found.read(name, 0)
        start = self.latency * (1 + doublings) / 4 * (1 if name == "sum" else LIBRARY_START)
        return start + sent / self._within(gpus)

    def gather_and_scatter(self, size: float, gpus: int) -> float:
        """Give every GPU the `size` bytes that all have together, and return sums, both by the library."""
        return self.all_reduce(GATHERED * size, gpus, "library") + self.all_reduce(0, gpus, "library")

    def send(self, size: float, other_node: bool) -> float:
        """Send `size` bytes to one neighbour."""
        if other_node:
            return NETWORK_SECONDS + size / self.network
        if self.measured is not None:
            return self.measured.read("send", size)
        return self.latency / 2 + size / self._within(2)

    def _within(self, gpus: int) -> float:
        """bytes/s that one GPU sends to the others of a group within a node."""
        return self.bandwidth * ((gpus - 1) / max(1, self.gpus_per_node - 1) if self.direct else 1)
