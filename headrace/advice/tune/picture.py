"""Throughput against waiting times: what is on the front, as PNG by matplotlib, and as SVG without it."""

from __future__ import annotations

import html
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from headrace.advice.tune.record import Result
from headrace.advice.tune.report import PLAN, TOGETHER, Report, kind

COLOURS = {
    PLAN: "#d62728",
    "max_num_batched_tokens": "#0072b2",
    "max_num_seqs": "#e08a00",
    "cudagraph_mode": "#009e73",
    "kv_cache_dtype": "#b05a8f",
    "attention_backend": "#4aa8dc",
    TOGETHER: "#7d7d7d",
}
PANELS = (("itl_p99", "ITL p99, ms"), ("ttft_p99", "TTFT p99, ms"))
FAR = 2.0
"""Marks that wait longer than the plan by this factor, or give as much less, are left to the table..."""
FEWEST = 4
"""...if as many others are left"""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 340, 64, 46, 30, 16
INK = "#fff"


@dataclass(frozen=True)
class Mark:
    number: int
    """of its row in the table, from 1"""
    result: Result
    x: float
    y: float
    on_front: bool

    @property
    def colour(self) -> str:
        return COLOURS[kind(self.result)]


@dataclass(frozen=True)
class Panel:
    """One scatter plot: waiting time to the right, throughput upwards."""

    label: str
    marks: list[Mark]
    """those on the front last, then the plan, so that nothing hides them"""
    outside: int
    """marks left to the table"""

    def steps(self) -> list[tuple[float, float]]:
        """The front as a staircase: until the next mark is reached, the one before is the best."""
        corners = sorted({(mark.x, mark.y) for mark in self.marks if mark.on_front})
        between = [(right[0], left[1]) for left, right in itertools.pairwise(corners)]
        return [point for pair in itertools.zip_longest(corners, between) for point in pair if point is not None]

    @property
    def title(self) -> str:
        return self.label + (f" ({self.outside} far off not shown)" if self.outside else "")


def panels(report: Report) -> list[Panel]:
    numbered = [(number, result) for number, result in enumerate(report.runs, 1) if result.ok]
    found = []
    for name, label in PANELS:
        points = [
            (getattr(result.felt, name), result.at_once.tok_s if result.at_once else 0.0) for _, result in numbered
        ]
        marks = [
            Mark(number, result, *point, on_front)
            for (number, result), point, on_front in zip(numbered, points, pareto(points), strict=True)
        ]
        x, y = points[0]
        near = [mark for mark in marks if mark.x <= FAR * x and mark.y >= y / FAR]
        shown = near if len(near) >= FEWEST else marks
        shown.sort(key=lambda mark: (kind(mark.result) == PLAN, mark.on_front))
        found.append(Panel(label, shown, len(marks) - len(shown)))
    return found


def pareto(points: list[tuple[float, float]]) -> list[bool]:
    """Of (latency, throughput): which no other beats in one without losing in the other."""
    return [not any((x <= px and y >= py) and (x < px or y > py) for x, y in points) for px, py in points]


def write_png(report: Report, path: Path) -> bool:
    """False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        return False
    figure = Figure(figsize=(14, 5), dpi=110, layout="constrained")
    figure.suptitle(f"{report.title}: {report.load}", fontsize=12)
    for axes, panel in zip(figure.subplots(1, 2), panels(report), strict=True):
        axes.plot(*zip(*panel.steps(), strict=True), linestyle="--", color="0.45", zorder=1)
        for mark in panel.marks:
            is_plan = kind(mark.result) == PLAN
            level = 4 if is_plan else 3 if mark.on_front else 2
            look = {"alpha": 1.0 if mark.on_front or is_plan else 0.6, "zorder": level}
            shape = {"marker": "D", "s": 170} if is_plan else {"marker": "o", "s": 200}
            axes.scatter([mark.x], [mark.y], color=mark.colour, edgecolors=INK, **shape, **look)
            axes.text(
                mark.x, mark.y, str(mark.number), color=INK, size=8, weight="bold", ha="center", va="center_baseline",
                zorder=level,
            )  # fmt: skip
        axes.set_xlabel(panel.title)
        axes.set_ylabel("output tok/s")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.margins(0.1)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    legend = [
        Line2D(
            [], [], linestyle="", marker="D" if kind(result) == PLAN else "o", color=COLOURS[kind(result)],
            label=f"{number}  {result.trial.title}" + ("" if result.ok else f": {result.status}"),
        )
        for number, result in enumerate(report.runs, 1)
    ]  # fmt: skip
    figure.legend(handles=legend, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path)
    return True


def svg(panel: Panel) -> str:
    x0, x1 = span([mark.x for mark in panel.marks])
    y0, y1 = span([mark.y for mark in panel.marks])

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="throughput against {panel.label}">']
    for tick in ticks(x0, x1):
        x = at(tick, y0)[0]
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:,.6g}</text>')
    for tick in ticks(y0, y1):
        y = at(x0, tick)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in panel.steps()))
    parts.append(f'<polyline class="front" points="{line}"/>')
    for mark in panel.marks:
        x, y = at(mark.x, mark.y)
        is_plan = kind(mark.result) == PLAN
        said = html.escape(f"{mark.result.trial.title}: {mark.y:,.0f} tok/s, {panel.label} {mark.x:,.1f}")
        diamond, circle = (
            f'<path d="M{x:.1f} {y - 11:.1f}l11 11l-11 11l-11 -11z"',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8"',
        )
        faint = "" if mark.on_front or is_plan else ' opacity=".6"'
        parts.append(f'<g{faint}><title>{said}</title>{diamond if is_plan else circle} fill="{mark.colour}"/>')
        parts.append(
            f'<text class="number" x="{x:.1f}" y="{y + 3.2:.1f}" text-anchor="middle">{mark.number}</text></g>'
        )
    parts.append(f'<text x="{LEFT}" y="16" class="axis">output tok/s</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" class="axis" text-anchor="end">{panel.title}</text>')
    return "".join(parts) + "</svg>"


def span(values: list[float]) -> tuple[float, float]:
    """An axis from a little below to a little above."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round figures."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
