"""Reports what tuning found: on a terminal, as JSON, and as sentences that the page shows too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.advice.tune.record import Result
from headrace.advice.tune.tuner import NOISE, Outcome, gain, gained, may_win

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TOGETHER, PLAN = "together", "the plan"
COLOURS = {
    PLAN: "#d62728",
    "max_num_batched_tokens": "#0072b2",
    "max_num_seqs": "#e08a00",
    "cudagraph_mode": "#009e73",
    "kv_cache_dtype": "#b05a8f",
    "attention_backend": "#4aa8dc",
    "speculative_config": "#8c6d31",
    TOGETHER: "#7d7d7d",
}
"""What a trial varies -> its colour in table and plots; the table's order."""
HEADS = ("#", "knob", "value", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "vs plan")
LATENCIES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


@dataclass(frozen=True)
class Report:
    """Holds an outcome with what is needed to describe it."""

    outcome: Outcome
    objective: str
    title: str
    """Model and machine."""
    load: str

    @property
    def runs(self) -> list[Result]:
        """The plan, then trials by knob, then those of several knobs together."""
        kinds = list(COLOURS)
        rest = sorted(self.outcome.results, key=lambda result: (kinds.index(kind(result)), value(result).zfill(9)))
        return [self.outcome.plan, *rest]

    @property
    def gained(self) -> str:
        """The name of the figure that gains are counted in."""
        return gained(self.objective, self.outcome.plan.at_rate is not None)

    def gain(self, result: Result) -> float:
        """Return how many times better than the plan a result is; 0: failed, or too much worse in something else."""
        return gain(self.objective, result, self.outcome.plan)

    def versus(self, result: Result) -> str:
        """Return the gain over the plan as text, such as `+3.1%`."""
        if result is self.outcome.plan:
            return ""
        return f"{self.gain(result) - 1:+.1%}" if self.gain(result) else "-"

    def verdict(self) -> str:
        """Return the sentence that names the best setting."""
        best = self.outcome.best
        if best is self.outcome.plan:
            twice = "both runs of " if any(result.trial.again and result.ok for result in self.runs) else ""
            return f"Nothing beats {twice}the plan by more than noise (2%): serve keeps it."
        return f"Best: {best.trial.title}, {self.versus(best)} over the plan in {self.gained}."

    def doubt(self) -> str:
        """Return what speaks against the verdict; nothing where the plan was measured twice."""
        if self.outcome.confirmed:
            return ""
        return "The plan was not measured again, for lack of time or because it failed, so this may be chance."

    def proposal(self) -> str:
        """Return what a lossy setting that may not win would gain, and how to ask for it; nothing within the noise."""
        lossy = [run for run in self.runs if not may_win(self.objective, run.trial)]
        best = max(lossy, key=self.gain, default=None)
        if best is None or self.gain(best) <= 1 + NOISE:
            return ""
        return (
            f"Not taken: {best.trial.title}, {self.versus(best)} over the plan in {self.gained}. It moves answers, so "
            "no profile holds it: --kv-cache-dtype fp8 asks for it."
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what stands below the table, each line with its style."""
        for result in self.runs:
            if not result.ok:
                yield f"{result.trial.title}: {result.why}", "dim"
        yield f"Milliseconds; vs plan in {self.gained}; `-`: too much worse in something else.", "dim"
        yield self.verdict(), "bold"
        yield self.proposal(), ""
        if self.outcome.left:
            yield f"{self.outcome.left} trials found no time; the same command goes on with them.", "yellow"
        if not self.outcome.together:
            yield "The winners were not measured together: there was no time.", "yellow"
        yield self.doubt(), "yellow"

    def print(self, console: Console) -> None:
        """Print the table and what is to be said of it."""
        console.print(rich_table(self))
        for line, style in self.lines():
            if line:
                console.print(line, markup=False, style=style, soft_wrap=console.record)


def kind(result: Result) -> str:
    """Return what a trial varies: one of the names in COLOURS."""
    knobs = list(result.trial.changes)
    return PLAN if not knobs else knobs[0] if len(knobs) == 1 else TOGETHER


def value(result: Result) -> str:
    """Return the value that a trial tries, as the table shows it."""
    if len(result.trial.changes) == 1:
        return str(*result.trial.changes.values()) + (" (lossy)" if result.trial.is_lossy else "")
    return result.trial.title if result.trial.changes else "again" if result.trial.again else ""


def rich_table(report: Report) -> Table:
    """Return one row for each trial; its number is its mark in the page's plots."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{report.title}\n{report.load}", title_justify="left", title_style="bold", box=None)
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("knob", "value") else "right")
    for number, result in enumerate(report.runs, 1):
        cells: list[Text | str] = [Text(str(number), COLOURS[kind(result)]), kind(result), value(result)]
        if result.ok:
            latencies = (f"{getattr(result.latencies, name):,.1f}" for name in LATENCIES)
            cells += [f"{result.tok_s:,.0f}", *latencies, report.versus(result)]
        else:
            cells.append(Text(result.status, "red"))
        style = "bold green" if result is report.outcome.best else "" if result.ok else "dim"
        table.add_row(*cells, style=style)
    return table


def as_json(report: Report) -> dict[str, Any]:
    """Return what --json prints."""
    outcome = report.outcome
    return {
        "title": report.title,
        "load": report.load,
        "objective": report.objective,
        "gain_in": report.gained,
        "best": outcome.best.trial.changes,
        "gain": report.gain(outcome.best),
        "left": outcome.left,
        "weighed_twice": outcome.confirmed,
        "trials": [
            msgspec.to_builtins(result) | {"gain": report.gain(result), "lossy": result.trial.is_lossy}
            for result in report.runs
        ],
    }
