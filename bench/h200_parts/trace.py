"""What a device did with its time, from a trace of what ran on it: idle share, where the gaps are, which kernels cost.

Pure arithmetic on intervals in microseconds. Kernels may overlap (programmatic dependent launch starts one beside the
one before it), so busy time is the union.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
TOP = 14


@dataclass(frozen=True, order=True)
class Interval:
    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Gap:
    length: float
    before: str
    after: str


def intervals_of(trace: dict[str, Any], categories: Iterable[str] = DEVICE_CATEGORIES) -> list[Interval]:
    """Of a Chrome trace as torch.profiler writes it, in order of their start."""
    wanted = set(categories)
    return sorted(
        Interval(event["ts"], event["ts"] + event.get("dur", 0.0), event["name"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in wanted
    )


def step_window(intervals: Sequence[Interval], output_len: int, steps: int) -> tuple[float, float]:
    """(start, end) of `steps` decode steps of a whole batch that made `output_len` tokens a request.

    Steps are told apart by a kernel that ran about once in each: the last to begin among those. Its first runs are of
    the prefill's steps, its last ones of a batch that has begun to shrink. Raises ValueError where no kernel is such.
    """
    counts = Counter(interval.name for interval in intervals)
    once = {name for name, count in counts.items() if 0.8 * output_len <= count <= 1.6 * output_len}
    last = max((one for one in intervals if one.name in once), default=None)
    if last is None:
        raise ValueError(f"no kernel ran once in each of some {output_len} steps: the trace is of something else")
    marks = [one.end for one in intervals if one.name == last.name]
    final = min(len(marks), output_len) - 3
    if final < steps:
        raise ValueError(f"the trace holds {len(marks)} steps, {steps} are wanted between its first and last")
    return marks[final - steps], marks[final]


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """What ran in the window, cut to it."""
    return [
        Interval(max(one.start, start), min(one.end, end), one.name)
        for one in intervals
        if one.end > start and one.start < end
    ]


def gaps(intervals: Sequence[Interval], start: float, end: float) -> list[Gap]:
    """Stretches of the window in which nothing ran. `intervals` in order of their start, within the window."""
    found = []
    until, before = start, "(start)"
    for one in intervals:
        if one.start > until:
            found.append(Gap(one.start - until, before, one.name))
        if one.end > until:
            until, before = one.end, one.name
    if end > until:
        found.append(Gap(end - until, before, "(end)"))
    return found


def idle_share(intervals: Sequence[Interval], start: float, end: float) -> float:
    """0 to 1."""
    return sum(gap.length for gap in gaps(intervals, start, end)) / (end - start)


def gap_lines(found: Sequence[Gap], steps: int) -> list[str]:
    """Where the idle time is: the pairs of neighbours that cost most, in microseconds a step."""
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for gap in found:
        pair = (short_name(gap.before), short_name(gap.after))
        total[pair] += gap.length  # type: ignore[assignment]
        count[pair] += 1
    return [
        f"{length / steps:9.2f} us a step in {count[pair] / steps:7.2f} gaps: {pair[0]} -> {pair[1]}"
        for pair, length in total.most_common(TOP)
    ]


def kernel_lines(intervals: Sequence[Interval], steps: int) -> list[str]:
    """Which kernels cost most, in microseconds a step; those that overlap count twice where they do."""
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for one in intervals:
        name = short_name(one.name)
        total[name] += one.end - one.start  # type: ignore[assignment]
        count[name] += 1
    return [
        f"{length / steps:9.2f} us a step in {count[name] / steps:7.2f} launches: {name}"
        for name, length in total.most_common(TOP)
    ]


def short_name(name: str) -> str:
    """A C++ kernel's name without its template arguments, return type and parameters."""
    bare = re.sub(r"\(anonymous namespace\)::", "", name)
    bare = re.sub(r"\(.*", "", bare)
    while (plain := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = plain
    return bare.split("<")[0].removeprefix("void ").strip()[:80] or name[:80]
