"""Fits the planner's constants to the measured rows in tests/planner/measured, and tests them on other rows.

    python bench/calibrate_planner.py              the constants for headrace/planner/efficiencies.json, and every table
    python bench/calibrate_planner.py --markdown   the tables of docs/notes/predictions.md

Needs no GPU; takes some ten seconds. tests/planner/test_accuracy.py checks the bounds of each experiment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from statistics import median

from planner_fit import Row, error, fit, read_rows

from headrace.planner.catalogue import find_model
from headrace.planner.chips import find_chip
from headrace.planner.constants import Efficiency, find_efficiency
from headrace.planner.deployment import Deployment
from headrace.planner.parallel import Parallel
from headrace.planner.predict import Limits

MEASURED = Path(__file__).parents[1] / "tests" / "planner" / "measured"
FITTED_ON = {
    ("h200", "vllm"): ("h200-vllm",),
    ("h200", "headrace"): ("h200-headrace",),
    ("mi300x", "vllm"): ("mi300x-vllm-405b", "mi300x-vllm-70b"),
}
"""chip and engine -> the tables whose rows its constants are fitted on"""
MODELS = ("8b bf16", "8b fp8", "30b-a3b bf16")
FEW_405B = ("latency 1 x 128/2048", "latency 8 x 128/2048", "latency 64 x 128/2048", "throughput 1500 x 128/2048",
            "throughput 500 x 2048/2048")  # fmt: skip
"""The rows of the 405B table that the fit for eight MI300X uses."""


@dataclass(frozen=True)
class Experiment:
    """Fits constants on some rows and tests them on others, whose errors must keep the bounds."""

    title: str
    fitted: Sequence[Row]
    tested: Sequence[Row]
    median_bound: float
    worst_bound: float

    def constants(self) -> Efficiency:
        return fit(self.fitted)

    def errors(self) -> list[float]:
        constants = self.constants()
        return [error(row, constants) for row in self.tested]


@cache
def rows(table: str) -> tuple[Row, ...]:
    return tuple(read_rows(MEASURED / f"{table}.json"))


def published() -> Experiment:
    """Return AMD's rows of Llama-3.1-405B fp8: five are fitted, the others tested."""
    seen = [row for row in rows("mi300x-vllm-405b") if row.name.partition(", ")[2] in FEW_405B]
    unseen = [row for row in rows("mi300x-vllm-405b") if row not in seen]
    return Experiment("405B fp8, 8 x MI300X: five rows fitted, the others", seen, unseen, 0.10, 0.25)


def halves(engine: str) -> Iterator[Experiment]:
    """Yield every second row of an H200's table fitted, the others tested, and the other way round."""
    table = rows(f"h200-{engine}")
    for first, bounds in ((0, (0.12, 0.30)), (1, (0.12, 0.35))):
        which = "first, third, ..." if first == 0 else "second, fourth, ..."
        title = f"{engine}, H200: {which} row fitted, the others"
        yield Experiment(title, table[first::2], table[1 - first :: 2], *bounds)


def without_models(engine: str) -> Iterator[Experiment]:
    """Yield each model of an H200's table left out once, and tested."""
    table = rows(f"h200-{engine}")
    for model in MODELS:
        own = [row for row in table if row.name.startswith(model)]
        others = [row for row in table if row not in own]
        yield Experiment(f"{engine}, H200: without {model}, on it", others, own, 0.20, 0.50)


def another_model() -> Experiment:
    """Return AMD's 70B rows, tested with constants fitted on 405B alone."""
    title = "70B fp8, 8 x MI300X: five rows of 405B fitted, all of 70B"
    return Experiment(title, published().fitted, rows("mi300x-vllm-70b"), 0.12, 0.25)


def experiments() -> list[Experiment]:
    """Return every experiment."""
    made = [published(), another_model()]
    for engine in ("vllm", "headrace"):
        made += [*halves(engine), *without_models(engine)]
    return made


def elsewhere() -> list[Row]:
    """Return rows of other models, chips and versions, on which nothing was fitted."""
    made = []
    for table in json.loads((MEASURED / "elsewhere.json").read_text())["tables"]:
        shape, chip, parallel = find_model(table["model"]), find_chip(table["chip"]), Parallel(tp=table["tp"])
        deployment = Deployment(shape, chip, parallel, table["weight_format"], table["kv_dtype_bytes"], "vllm")
        for batch, input_len, output_len, value in table["rows"]:
            name = f"{table['model']} {table['weight_format']}, {table['tp']} x {table['chip']}, {batch} clients"
            limits = Limits(batch, 8192, 1 << 40)
            made.append(Row(name, "tpot", deployment, batch, input_len, output_len, value, limits))
    return made


def shipped_errors(table: Sequence[Row]) -> list[float]:
    """Return the errors of the constants that the planner uses."""
    return [error(row, find_efficiency(row.deployment.chip, row.deployment.engine)) for row in table]


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(value) for value in errors]
    return f"median {median(sizes):.1%}, worst {max(sizes):.1%}"


def table_of(tested: Sequence[Row], errors: Sequence[float]) -> list[str]:
    lines = ["| row | measured | predicted | error |", "|---|---|---|---|"]
    for row, value in zip(tested, errors, strict=True):
        lines.append(f"| {row.name} | {shown(row.value)} | {shown(row.value * (1 + value))} | {value:+.1%} |")
    return lines


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def rounded(constants: Efficiency) -> Efficiency:
    """Round to three digits."""
    return Efficiency(*(float(f"{value:.3g}") for value in astuple(constants)))


def unseen(held_out: Iterable[Experiment]) -> dict[Row, float]:
    """Return for each row its error in the experiment that tested it."""
    return {row: value for one in held_out for row, value in zip(one.tested, one.errors(), strict=True)}


def h200_table(engine: str) -> list[str]:
    """Return Markdown: each row of an H200's table, predicted by constants fitted on the other half of the rows, and by
    those fitted on the other models."""
    by_half, by_model = unseen(halves(engine)), unseen(without_models(engine))
    lines = [
        "| row | measured | other half fitted | error | other models fitted | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(f"h200-{engine}"):
        half, model = by_half[row], by_model[row]
        lines.append(
            f"| {row.name} | {shown(row.value)} | {shown(row.value * (1 + half))} | {half:+.1%} "
            f"| {shown(row.value * (1 + model))} | {model:+.1%} |"
        )
    return lines


def print_constants() -> None:
    for (chip, engine), tables in FITTED_ON.items():
        constants = rounded(fit([row for table in tables for row in rows(table)]))
        print(f"{chip}, {engine}: {json.dumps(asdict(constants))}")


def print_tables() -> None:
    print("| fitted, and tested | rows | median | worst |\n|---|---|---|---|")
    for experiment in experiments():
        sizes = [abs(value) for value in experiment.errors()]
        print(f"| {experiment.title} | {len(sizes)} | {median(sizes):.1%} | {max(sizes):.1%} |")
    for experiment in (published(), another_model()):
        print(f"\n### {experiment.title}\n")
        print("\n".join(table_of(experiment.tested, experiment.errors())))
    for engine in ("vllm", "headrace"):
        print(f"\n### {engine}, one H200\n")
        print("\n".join(h200_table(engine)))
    print("\n### Elsewhere: nothing fitted on these\n")
    others = elsewhere()
    print("\n".join(table_of(others, shipped_errors(others))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--markdown", action="store_true", help="only the tables, as docs/notes/predictions.md has them"
    )
    if not parser.parse_args().markdown:
        print_constants()
    print_tables()


if __name__ == "__main__":
    main()
