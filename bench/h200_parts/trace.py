"""Reads from a trace what a device did with its time: its idle share, where the gaps are, which kernels cost most.

Intervals are in microseconds. Kernels may overlap (programmatic dependent launch starts one while the one before it
still runs), so busy time is their union.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
TOP = 20
"""lines that are printed of gaps and of kernels"""


@dataclass(frozen=True, order=True)
class Interval:
    """Says when a kernel or copy ran."""

    start: float
    end: float
    name: str
    grid: str = ""
    """the blocks that a kernel was launched with, as x,y,z"""


@dataclass(frozen=True)
class Gap:
    """Describes a stretch in which nothing ran."""

    length: float
    before: str
    after: str


def intervals_of(trace: dict[str, Any], categories: Iterable[str] = DEVICE_CATEGORIES) -> list[Interval]:
    """Return the intervals of a Chrome trace as torch.profiler writes it, in order of their start."""
    wanted = set(categories)
    return sorted(
        Interval(event["ts"], event["ts"] + event.get("dur", 0.0), event["name"], grid_of(event.get("args", {})))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in wanted
    )


def grid_of(about: dict[str, Any]) -> str:
    """Return the blocks that a kernel was launched with, given what a trace says of it."""
    return ",".join(str(size) for size in about.get("grid", ()))


def gaps(intervals: Sequence[Interval], start: float, end: float) -> list[Gap]:
    """Return the stretches of the window in which nothing ran. `intervals` are within it, in order of their start."""
    idle = []
    until, before = start, "(start)"
    for one in [*intervals, Interval(end, end, "(end)")]:
        if one.start > until:
            idle.append(Gap(one.start - until, before, one.name))
        if one.end > until:
            until, before = one.end, one.name
    return idle


def gap_lines(idle: Sequence[Gap], steps: int) -> list[str]:
    """Return the pairs of neighbours with the longest gaps, in microseconds a step."""
    return _largest(
        [(f"{short_name(gap.before)} -> {short_name(gap.after)}", gap.length) for gap in idle], steps, "gaps"
    )


def kernel_lines(intervals: Sequence[Interval], steps: int) -> list[str]:
    """Return the kernels that cost most, by their grids, in microseconds a step; where two overlap, both count."""
    costs = [(f"{short_name(one.name)} {one.grid}".rstrip(), one.end - one.start) for one in intervals]
    return _largest(costs, steps, "launches")


def _largest(costs: Iterable[tuple[str, float]], steps: int, what: str) -> list[str]:
    """Sum microseconds by name, and return the largest sums."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, length in costs:
        by_name[name].append(length)
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        f"{sum(lengths) / steps:9.2f} us a step in {len(lengths) / steps:7.2f} {what}: {name}"
        for name, lengths in largest
    ]


def short_name(name: str) -> str:
    """Return a C++ kernel's name without its template arguments, return type and parameters."""
    bare = re.sub(r"\(anonymous namespace\)::", "", name)
    bare = re.sub(r"\(.*", "", bare)
    while (plain := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = plain
    return bare.split("<")[0].removeprefix("void ").strip()[:80] or name[:80]
