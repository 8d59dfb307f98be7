"""What tuning found, as a table for the terminal, as JSON, as an HTML page that needs nothing else, and as a PNG."""

from __future__ import annotations

import html
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.tune.record import Result
from headrace.cli.tune.tuner import Outcome, gain, gained

if TYPE_CHECKING:
    from rich.table import Table

TOGETHER, PLAN = "together", "the plan"
COLOURS = {
    PLAN: "#d62728",
    "max_num_batched_tokens": "#0072b2",
    "max_num_seqs": "#e08a00",
    "cudagraph_mode": "#009e73",
    "kv_cache_dtype": "#b05a8f",
    "attention_backend": "#4aa8dc",
    TOGETHER: "#7d7d7d",
}
HEADS = ("knob", "value", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "vs plan")
PANELS = (("itl_p99", "ITL p99, ms"), ("ttft_p99", "TTFT p99, ms"))
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 340, 64, 46, 30, 16


@dataclass(frozen=True)
class Report:
    outcome: Outcome
    objective: str
    title: str
    """model on machine"""
    load: str

    @property
    def runs(self) -> list[Result]:
        """The plan, then knob by knob, then what was tried together."""
        order = [*COLOURS]
        rest = sorted(self.outcome.results, key=lambda result: (order.index(kind(result)), str(value(result)).zfill(9)))
        return [self.outcome.plan, *rest]

    @property
    def gained(self) -> str:
        return gained(self.objective, self.outcome.plan.at_rate is not None)

    def versus(self, result: Result) -> str:
        found = gain(self.objective, result, self.outcome.plan)
        if result is self.outcome.plan:
            return ""
        return f"{found - 1:+.1%}" if found else "-"

    def verdict(self) -> str:
        best = self.outcome.best
        if best is self.outcome.plan:
            return "Nothing beats the plan by more than noise (2%): serve keeps it."
        return f"Best: {best.trial.title}, {self.versus(best)} {self.gained} against the plan."


def kind(result: Result) -> str:
    knobs = [*result.trial.changes]
    return PLAN if not knobs else knobs[0] if len(knobs) == 1 else TOGETHER


def value(result: Result) -> str:
    if len(result.trial.changes) == 1:
        return str(*result.trial.changes.values())
    return result.trial.title if result.trial.changes else ""


def cells(result: Result) -> list[str]:
    felt, full = result.felt, result.at_once
    assert full is not None
    return [
        f"{full.tok_s:,.0f}",
        *(f"{figure:,.1f}" for figure in (felt.ttft_p50, felt.ttft_p99, felt.itl_p50, felt.itl_p99)),
    ]


def pareto(points: list[tuple[float, float]]) -> list[bool]:
    """Of (latency, throughput): which no other beats in one without losing in the other."""
    return [not any((x <= px and y >= py) and (x < px or y > py) for x, y in points) for px, py in points]


def rich_table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.title}\n{report.load}", title_justify="left", title_style="bold", box=None)
    for head in HEADS:
        table.add_column(head, justify="left" if head in HEADS[:2] else "right")
    for result in report.runs:
        style = "bold green" if result is report.outcome.best else ""
        if result.ok:
            table.add_row(kind(result), value(result), *cells(result), report.versus(result), style=style)
        else:
            table.add_row(kind(result), value(result), Text(result.status, "red"), style="dim")
    return table


def failures(report: Report) -> list[str]:
    return [f"{result.trial.title}: {result.why}" for result in report.runs if not result.ok]


def as_json(report: Report) -> dict[str, Any]:
    outcome = report.outcome
    return {
        "title": report.title,
        "load": report.load,
        "objective": report.objective,
        "gain_in": report.gained,
        "best": outcome.best.trial.changes,
        "gain": gain(report.objective, outcome.best, outcome.plan),
        "left": outcome.left,
        "trials": [
            msgspec.to_builtins(result) | {"gain": gain(report.objective, result, outcome.plan)}
            for result in report.runs
        ],
    }


@dataclass(frozen=True)
class Panel:
    """One scatter plot: latency to the right, throughput upwards."""

    label: str
    results: list[Result]
    points: list[tuple[float, float]]
    front: list[bool]

    def steps(self) -> list[tuple[float, float]]:
        """The front as a staircase: until the next point is reached, the one before is the best."""
        corners = sorted({point for point, on in zip(self.points, self.front, strict=True) if on})
        between = [(right[0], left[1]) for left, right in itertools.pairwise(corners)]
        return [point for pair in itertools.zip_longest(corners, between) for point in pair if point is not None]


def panels(report: Report) -> list[Panel]:
    results = [result for result in report.runs if result.ok]
    found = []
    for name, label in PANELS:
        points = [(getattr(result.felt, name), result.at_once.tok_s if result.at_once else 0.0) for result in results]
        found.append(Panel(label, results, points, pareto(points)))
    return found


def span(values: list[float]) -> tuple[float, float]:
    """An axis from a little below to a little above."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Round figures, some four of them."""
    raw = (high - low) / 4
    power = 10.0 ** len(f"{int(raw)}") / 10 if raw >= 1 else 1.0
    while power > raw:
        power /= 10
    step = max(factor * power for factor in (1, 2, 5, 10) if factor * power <= raw)
    first = int(low // step) + 1
    return [number * step for number in range(first, int(high // step) + 1)]


def svg(panel: Panel) -> str:
    xs, ys = [point[0] for point in panel.points], [point[1] for point in panel.points]
    (x0, x1), (y0, y1) = span(xs), span(ys)

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
    for result, point, on in zip(panel.results, panel.points, panel.front, strict=True):
        x, y = at(*point)
        said = html.escape(f"{result.trial.title}: {point[1]:,.0f} tok/s, {panel.label} {point[0]:,.1f}")
        shape = (
            f'<path d="M{x:.1f} {y - 8:.1f}l7 8l-7 8l-7 -8z"' if kind(result) == PLAN
            else f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if on else 4.5}"'
        )  # fmt: skip
        faint = "" if on or kind(result) == PLAN else ' opacity=".55"'
        parts.append(f'{shape} fill="{COLOURS[kind(result)]}"{faint}><title>{said}</title></{shape[1:].split()[0]}>')
    parts.append(f'<text x="{LEFT}" y="16" class="axis">output tok/s</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" class="axis" text-anchor="end">{panel.label}</text>')
    return "".join(parts) + "</svg>"


STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.3rem;margin:0}p{margin:.3rem 0}.plots{display:flex;flex-wrap:wrap;gap:1rem;margin:1rem 0}
svg{flex:1 1 440px;max-width:100%;height:auto}svg text{font-size:12px;fill:currentColor}svg .axis{font-weight:600}
.grid{stroke:currentColor;opacity:.15;fill:none}.front{fill:none;stroke:currentColor;opacity:.6;stroke-dasharray:5 4}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.2rem .7rem;text-align:right;
border-bottom:1px solid color-mix(in srgb,currentColor 15%,transparent)}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.best{font-weight:700}.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.4em}
.wide{overflow-x:auto}.bad{opacity:.7}"""


def page(report: Report) -> str:
    rows = []
    for result in report.runs:
        best = ' class="best"' if result is report.outcome.best else ""
        dot = f'<span class="dot" style="background:{COLOURS[kind(result)]}"></span>'
        name = f"<td>{dot}{html.escape(kind(result))}</td><td>{html.escape(value(result))}</td>"
        if result.ok:
            rest = "".join(f"<td>{text}</td>" for text in [*cells(result), report.versus(result)])
            rows.append(f"<tr{best}>{name}{rest}</tr>")
        else:
            rows.append(
                f'<tr class="bad">{name}<td colspan="6">{html.escape(f"{result.status}: {result.why}")}</td></tr>'
            )
    head = "".join(f"<th>{text}</th>" for text in HEADS)
    plots = "".join(svg(panel) for panel in panels(report))
    title = html.escape(report.title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>headrace tune: {title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{title}</h1>'
        f"<p>{html.escape(report.load)}</p><p><b>{html.escape(report.verdict())}</b></p>"
        f'<div class="plots">{plots}</div>'
        "<p>The dashed line is the front: no other setting has both more tokens and shorter waits. The diamond is the "
        "plan. Point at a mark to see which setting it is.</p>"
        f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        f"<p>Milliseconds; vs plan in {report.gained}.</p></html>\n"
    )


def write_png(report: Report, path: Path) -> bool:
    """False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    figure.suptitle(f"{report.title}: {report.load}", fontsize=11)
    for axes, panel in zip(figure.subplots(1, 2), panels(report), strict=True):
        axes.plot(*zip(*panel.steps(), strict=True), linestyle="--", color="0.45", zorder=1)
        for result, (x, y), on in zip(panel.results, panel.points, panel.front, strict=True):
            is_plan = kind(result) == PLAN
            axes.scatter(
                [x], [y], s=90 if is_plan else 55 if on else 35, marker="D" if is_plan else "o",
                color=COLOURS[kind(result)], alpha=1.0 if on or is_plan else 0.55, zorder=3 if is_plan else 2,
            )  # fmt: skip
            if on or is_plan:
                axes.annotate(value(result) or PLAN, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=9)
        axes.set_xlabel(panel.label)
        axes.set_ylabel("output tok/s")
        axes.margins(0.12)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    names = [name for name in COLOURS if any(kind(result) == name for result in report.runs if result.ok)]
    marks = [
        Line2D([], [], linestyle="", marker="D" if name == PLAN else "o", color=COLOURS[name], label=name)
        for name in names
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path)
    return True
