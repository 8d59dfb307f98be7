"""Describes a GPU of either vendor as its driver does. What the driver does not tell is None or empty."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class Holder:
    """Describes a process that holds memory of a GPU."""

    pid: int
    name: str
    memory: int


@dataclass(frozen=True)
class Gpu:
    """Describes one device."""

    index: int
    """As CUDA, HIP and the vendor's tool count, with nothing hidden."""
    name: str
    bus_id: str = ""
    """As sysfs writes it: 0000:61:00.0."""
    uuid: str = ""
    memory_total: int = 0
    memory_used: int = 0
    holders: tuple[Holder, ...] = ()
    persistence: bool | None = None
    power_limit: float | None = None
    """Watts."""
    power_default: float | None = None
    slowed_by: tuple[str, ...] = ()
    """What keeps the clocks down at this moment, idleness and the power limit aside."""
    faults: tuple[str, ...] = ()
    """What the driver wants repaired."""
    compute_mode: str = ""
    mig: bool = False
    slices: tuple[int, ...] = ()
    """Memory of each MIG instance."""
    compute_partition: str = ""
    """SPX, DPX, QPX, CPX."""
    memory_partition: str = ""
    """NPS1, NPS4."""
    link_width: tuple[int, int] | None = None
    """PCIe lanes (now, most)."""


def gib(size: float) -> str:
    """Return bytes as text, in GiB."""
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"


def numbers(gpus: list[Gpu] | tuple[Gpu, ...]) -> str:
    """Return the GPUs' numbers as text: `GPU 3`, `GPUs 0, 2, 3` or `GPUs 0-7`."""
    indices = [gpu.index for gpu in gpus]
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    if len(indices) > 2 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"GPUs {indices[0]}-{indices[-1]}"
    return "GPUs " + ", ".join(map(str, indices))
