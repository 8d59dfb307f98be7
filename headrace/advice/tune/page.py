"""Writes a tuning report as one HTML page without scripts: what the terminal shows, and throughput against latency."""

from __future__ import annotations

import html
import io
import itertools
import math
from dataclasses import dataclass

from headrace.advice.tune.report import COLOURS, PLAN, Report, kind

PLOTS = (("itl_p99", "ITL p99, ms"), ("ttft_p99", "TTFT p99, ms"))
FAR = 2.0
"""Trials worse than the plan by this factor are left to the table, so that the others do not crowd together..."""
FEWEST = 4
"""...if at least this many remain in the plot."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 340, 64, 46, 30, 16
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>headrace tune</title><style>
:root{{color-scheme:light dark}}body{{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2rem auto}}
pre{{font:13px/1.4 ui-monospace,monospace;overflow-x:auto}}.plots{{display:flex;flex-wrap:wrap;gap:1rem}}
svg{{flex:1 1 440px;max-width:100%}}text{{font-size:12px;fill:currentColor}}
.grid{{stroke:currentColor;opacity:.15}}.front{{fill:none;stroke:currentColor;opacity:.6;stroke-dasharray:5 4}}
{stylesheet}</style><pre>{code}</pre><div class="plots"><!--plots--></div>
<p>Numbers are rows of the table; the diamond is the plan. No trial beats those on the dashed line in both figures.</p>
"""
Point = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """Says where values lie in a picture, both of whose axes have a lower and an upper end."""

    x: Point
    y: Point

    def at(self, x: float, y: float) -> Point:
        """Return where a point is in the picture."""
        (x0, x1), (y0, y1) = self.x, self.y
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - TOP),
        )

    def grid(self, across: dict[float, str], below: str, above: str) -> list[str]:
        """Return lines with their numbers, to the right those in `across`, and what the axes show."""
        parts = []
        for tick, number in across.items():
            px = self.at(tick, self.y[0])[0]
            parts.append(f'<path class="grid" d="M{px:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number}</text>')
        for tick in ticks(*self.y):
            py = self.at(self.x[0], tick)[1]
            parts.append(f'<path class="grid" d="M{LEFT} {py:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
        parts.append(f'<text x="{LEFT}" y="16">{above}</text>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{below}</text>')
        return parts


def page(report: Report) -> str:
    """Return the page as HTML; it refers to nothing outside itself."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=160, highlight=False)
    report.print(console)
    plots = "".join(svg(report, figure, label) for figure, label in PLOTS)
    return console.export_html(code_format=PAGE).replace("<!--plots-->", plots)


def svg(report: Report, figure: str, label: str) -> str:
    """Return a scatter plot with a latency to the right and throughput upwards."""
    runs = {number: result for number, result in enumerate(report.runs, 1) if result.ok}
    points = {number: (getattr(result.latencies, figure), result.tok_s) for number, result in runs.items()}
    front = {number for number, best in zip(points, pareto(list(points.values())), strict=True) if best}
    x, y = points[1]  # the plan's
    near = {number: point for number, point in points.items() if point[0] <= FAR * x and point[1] >= y / FAR}
    shown = near if len(near) >= FEWEST else points
    frame = Frame(*(_axis([point[axis] for point in shown.values()]) for axis in (0, 1)))
    at, across = frame.at, {tick: f"{tick:,.6g}" for tick in ticks(*frame.x)}
    outside = f" ({len(points) - len(shown)} far off not shown)" if len(shown) < len(points) else ""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="throughput against {label}">']
    parts += frame.grid(across, f"{label}{outside}", "output tok/s")
    steps = (at(*point) for point in _steps([shown[number] for number in front & {*shown}]))
    parts.append(f'<polyline class="front" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in steps)}"/>')
    for number in sorted(shown, key=lambda number: (number == 1, number in front)):  # nothing hides the plan
        result, (px, py) = runs[number], at(*shown[number])
        what = f"{result.trial.title}: {shown[number][1]:,.0f} tok/s, {label} {shown[number][0]:,.1f}"
        is_plan = kind(result) == PLAN
        turn = f' transform="rotate(45 {px:.1f} {py:.1f})"' if is_plan else ' rx="8"'
        faint = "" if number in front or is_plan else ' opacity=".6"'
        parts.append(
            f'<g{faint}><title>{html.escape(what)}</title><rect x="{px - 8:.1f}" y="{py - 8:.1f}" width="16" '
            f'height="16"{turn} fill="{COLOURS[kind(result)]}"/>'
            f'<text x="{px:.1f}" y="{py + 4:.1f}" text-anchor="middle">{number}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def pareto(points: list[Point]) -> list[bool]:
    """Return which points of (latency, throughput) no other beats in one without losing in the other."""
    return [not any((x <= px and y >= py) and (x < px or y > py) for x, y in points) for px, py in points]


def ticks(low: float, high: float) -> list[float]:
    """Return four to eight round figures between two."""
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axis(values: list[float]) -> Point:
    """Where an axis begins and ends: a little outside of the values."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _steps(front: list[Point]) -> list[Point]:
    """The front as a staircase: until the next point is reached, the one before is the best."""
    corners = sorted(set(front))
    between = [(right[0], left[1]) for left, right in itertools.pairwise(corners)]
    return [point for pair in itertools.zip_longest(corners, between) for point in pair if point is not None]
