"""What tuning found, as a table for the terminal and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.advice.tune.knobs import KNOBS
from headrace.advice.tune.record import Result
from headrace.advice.tune.tuner import NOISE, WORSE, Outcome, gain, gained, may_win

if TYPE_CHECKING:
    from rich.table import Table

TOGETHER, PLAN = "together", "the plan"
KINDS = (PLAN, *KNOBS, TOGETHER)
HEADS = ("knob", "value", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "vs plan")


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
        rest = sorted(self.outcome.results, key=lambda result: (KINDS.index(kind(result)), value(result).zfill(9)))
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
            twice = "both runs of " if any(result.trial.again and result.ok for result in self.runs) else ""
            return f"Nothing beats {twice}the plan by more than noise (2%): serve keeps it."
        return f"Best: {best.trial.title}, {self.versus(best)} over the plan in {self.gained}."

    def doubt(self) -> str:
        """What speaks against the verdict; empty: nothing"""
        if self.outcome.weighed:
            return ""
        return "The plan was not measured again, for lack of time or because it failed, so this may be chance."

    def proposal(self) -> str:
        """What a lossy setting that may not win would give, and how to ask for it; empty: nothing beyond noise"""
        found = [run for run in self.runs if not may_win(self.objective, run.trial)]
        gains = {gain(self.objective, run, self.outcome.plan): run for run in found}
        if max(gains, default=0.0) <= 1 + NOISE:
            return ""
        best = gains[max(gains)]
        return (
            f"Not taken: {best.trial.title}, {self.versus(best)} over the plan in {self.gained}. It moves answers, so "
            "no profile holds it: --kv-cache-dtype fp8 asks for it."
        )

    def standing(self) -> dict[str, tuple[float, Result]]:
        """Figure -> (what the plan lacks of the best, 0.03: 3%; the best), each figure by itself, of what may win. The
        best ITL is that of settings whose TTFT is within 1.1 times the best."""
        plan = self.outcome.plan
        runs = [result for result in self.runs if result.ok and may_win(self.objective, result.trial)]
        most = max(runs, key=_tok_s)
        first = min(runs, key=lambda result: result.felt.ttft_p99)
        prompt = [result for result in runs if result.felt.ttft_p99 <= WORSE * first.felt.ttft_p99]
        smooth = min(prompt, key=lambda result: result.felt.itl_p99)
        return {
            "output tok/s": (1 - _tok_s(plan) / _tok_s(most), most),
            "ITL p99": (plan.felt.itl_p99 / max(smooth.felt.itl_p99, 1e-9) - 1, smooth),
            "TTFT p99": (plan.felt.ttft_p99 / first.felt.ttft_p99 - 1, first),
        }

    def standing_line(self) -> str:
        """`The plan against the best of each: output tok/s 1.2% less than max_num_seqs 512, ...`"""
        said = []
        for figure, (lacks, best) in self.standing().items():
            if not best.trial.changes:
                said.append(f"{figure} is the best")
            else:
                how = "less" if figure == "output tok/s" else "more"
                if lacks < 0:
                    lacks, how = -lacks, "less"
                said.append(f"{figure} {lacks:.1%} {how} than with {best.trial.title}")
        return "The plan against the best of each: " + ", ".join(said) + "."


def _tok_s(result: Result) -> float:
    return result.at_once.tok_s if result.at_once else 0.0


def kind(result: Result) -> str:
    knobs = list(result.trial.changes)
    return PLAN if not knobs else knobs[0] if len(knobs) == 1 else TOGETHER


def value(result: Result) -> str:
    if len(result.trial.changes) == 1:
        return str(*result.trial.changes.values()) + (" (lossy)" if result.trial.is_lossy else "")
    return result.trial.title if result.trial.changes else "again" if result.trial.again else ""


def cells(result: Result) -> list[str]:
    felt, full = result.felt, result.at_once
    assert full is not None
    return [
        f"{full.tok_s:,.0f}",
        *(f"{figure:,.1f}" for figure in (felt.ttft_p50, felt.ttft_p99, felt.itl_p50, felt.itl_p99)),
    ]


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
        "weighed_twice": outcome.weighed,
        "plan_lacks": {
            figure: {"share": lacks, "of": best.trial.changes} for figure, (lacks, best) in report.standing().items()
        },
        "trials": [
            msgspec.to_builtins(result)
            | {"gain": gain(report.objective, result, outcome.plan), "lossy": result.trial.is_lossy}
            for result in report.runs
        ],
    }
