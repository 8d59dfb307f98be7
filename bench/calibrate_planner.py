"""Fits the planner's constants to the measured rows in tests/planner/measured, and tests them on other rows.

    python bench/calibrate_planner.py              the constants for headrace/planner/efficiencies.json, and every table
    python bench/calibrate_planner.py --markdown   the tables of docs/notes/predictions.md

Needs no GPU; takes some ten seconds. tests/planner/test_accuracy.py checks the bounds of each experiment. A fit finds a
few numbers, held near likely values: least squares on the logarithms of predictions, by the Levenberg-Marquardt method
(Marquardt 1963, "An algorithm for least-squares estimation of nonlinear parameters").
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median

import msgspec
import numpy

from headrace.planner.catalogue import find_model
from headrace.planner.chips import find_chip
from headrace.planner.constants import Efficiency, find_efficiency
from headrace.planner.cost import StepModel, StepWork
from headrace.planner.deployment import Deployment
from headrace.planner.parallel import Parallel
from headrace.planner.predict import Limits, Workload, predict
from headrace.planner.simulate import Segment, simulate

MEASURED = Path(__file__).parents[1] / "tests" / "planner" / "measured"


@dataclass(frozen=True)
class Calibration:
    """Holds what calibration.json says of fits."""

    few_405b: tuple[str, ...]
    """the rows of the 405B table that the fit for eight MI300X uses"""
    spreads: Efficiency
    """how far (a logarithm) each constant is likely to be from where the fit starts"""
    fitted_on: dict[str, dict[str, tuple[str, ...]]]
    """chip -> engine -> the tables whose rows its constants are fitted on"""
    likely: dict[str, dict[str, Efficiency]]
    """vendor -> engine -> where a fit starts: round figures from the rates of single products, reads and kernels,
    chosen with the tables in view. From starts up to a quarter off, fits end alike (tests/planner/test_accuracy.py)."""


CALIBRATION = msgspec.json.decode(Path(__file__).with_name("calibration.json").read_bytes(), type=Calibration)
MODELS = ("8b bf16", "8b fp8", "30b-a3b bf16")
ROW_SPREAD = 0.06
"""The error of a prediction (a logarithm) that counts as one standard deviation."""
OUTLIER = 0.25
"""The error from which on a row weighs less and less: something else was measured there."""


@dataclass(frozen=True)
class Row:
    """Holds one measured figure and how to predict it."""

    name: str
    kind: str
    """decode (ms a step), prefill (ms to the first token), latency (s of a batch whose prompts are cached), tpot (ms
    between tokens of clients that send one request after the other), throughput (output tokens/s of requests that come
    at once)"""
    deployment: Deployment
    batch: int
    input_len: int
    output_len: int
    value: float
    limits: Limits

    @cached_property
    def steps(self) -> list[Segment]:
        """The kinds of step of a throughput row. They do not depend on the constants, as all requests come at once."""
        load, start = Workload(self.input_len, self.output_len, self.batch, self.batch), likely(self.deployment)
        run = simulate(self.deployment, load, self.limits, model=StepModel(self.deployment, start))
        return condense(run.segments)

    def predict(self, model: StepModel) -> float:
        """Predict the figure, in the row's unit."""
        if self.kind == "throughput":
            steps = sum(count * model.seconds(work) for work, count in self.steps)
            return self.batch * self.output_len / (steps + model.efficiency.request)
        if self.kind == "tpot":
            load = Workload(self.input_len, self.output_len, self.batch)
            limits = replace(self.limits, max_num_seqs=self.batch)
            return predict(self.deployment, load, limits, model=model).itl_ms
        if self.kind == "prefill":
            return 1000 * (self._prefill(model) + model.efficiency.request)
        step = model.seconds(StepWork(self.batch, self.input_len + self.output_len / 2))
        return 1000 * step if self.kind == "decode" else step * self.output_len

    def _prefill(self, model: StepModel) -> float:
        tokens = self.batch * self.input_len
        steps = -(-tokens // self.limits.max_num_batched_tokens)
        work = StepWork(0, 0.0, tokens / steps, (self.input_len + 1) / 2, -(-self.batch // steps))
        return steps * model.seconds(work)


def read_rows(path: Path) -> list[Row]:
    """Read a table of measured rows (tests/planner/measured/*.json) in the order of the file."""
    table = json.loads(path.read_text())
    chip, engine = find_chip(table["chip"]), table["engine"]
    rows = []
    for entry in table["rows"]:
        model = table["models"][entry["model"]]
        kind, output_len = entry["kind"], entry.get("output_len", 1)
        kv_bytes = model.get(f"{kind}_kv_dtype_bytes", model["kv_dtype_bytes"])
        shape = find_model(model["model"])
        deployment = Deployment(shape, chip, Parallel(tp=model["tp"]), model["weight_format"], kv_bytes, engine)
        shown = f"{entry['batch']} x {entry['input_len']}" + (f"/{output_len}" if output_len > 1 else "")
        name = f"{entry['model']}, {kind} {shown}"
        limits = Limits(table["max_num_seqs"], table["max_num_batched_tokens"], model["kv_tokens"])
        rows.append(Row(name, kind, deployment, entry["batch"], entry["input_len"], output_len, entry["value"], limits))
    return rows


def likely(deployment: Deployment) -> Efficiency:
    """Return where a fit of that chip and engine starts."""
    return CALIBRATION.likely[deployment.chip.vendor][deployment.engine]


def condense(segments: Sequence[Segment]) -> list[Segment]:
    """Replace steps that are nearly alike by their mean."""
    kinds: dict[tuple[int, int, int], numpy.ndarray] = {}
    for work, steps in segments:
        key = (
            round(12 * math.log(work.decodes + 1)),
            round(8 * math.log(work.prefill_tokens + 1)),
            round(6 * math.log(work.decode_context + 1)),
        )
        keys, pairs = work.decodes * work.decode_context, work.prefill_tokens * work.prefill_context
        amounts = numpy.array([1.0, work.decodes, keys, work.prefill_tokens, pairs, work.prompts])
        kinds[key] = kinds.get(key, 0.0) + steps * amounts
    return [
        Segment(
            StepWork(
                decodes / steps,
                keys / decodes if decodes else 0.0,
                tokens / steps,
                pairs / tokens if tokens else 0.0,
                max(1, round(prompts / steps)) if tokens else 0,
            ),
            round(steps),
        )
        for steps, decodes, keys, tokens, pairs, prompts in (sums.tolist() for sums in kinds.values())
    ]


def error(row: Row, constants: Efficiency) -> float:
    """Return (predicted - measured) / measured."""
    return row.predict(StepModel(row.deployment, constants)) / row.value - 1


def fit(rows: Sequence[Row], start: Efficiency | None = None) -> Efficiency:
    """Return the constants that explain the rows best, near `start` (default: `likely`)."""
    begin = numpy.array(astuple(start or likely(rows[0].deployment)))
    widths = numpy.array(astuple(CALIBRATION.spreads))
    limit = OUTLIER / ROW_SPREAD

    def constants(point: numpy.ndarray) -> Efficiency:
        made = Efficiency(*(begin * numpy.exp(point * widths)).tolist())
        return replace(made, overlap=max(1.0, made.overlap))

    def residuals(point: numpy.ndarray) -> numpy.ndarray:
        """Return the misses of the rows, then how far each constant is from where it started."""
        at = constants(point)
        misses = [math.log(row.predict(StepModel(row.deployment, at)) / row.value) / ROW_SPREAD for row in rows]
        damped = [math.copysign(limit * math.sqrt(math.log1p((miss / limit) ** 2)), miss) for miss in misses]
        return numpy.array([*damped, *point])

    return constants(_least_squares(residuals, numpy.zeros(len(widths))))


def _least_squares(
    residuals: Callable[[numpy.ndarray], numpy.ndarray], point: numpy.ndarray, rounds: int = 25
) -> numpy.ndarray:
    """Minimize the sum of squares by Levenberg-Marquardt, with differences for derivatives."""
    damping, step = 1e-2, 1e-3
    now = residuals(point)
    best = now @ now
    for _ in range(rounds):
        jacobian = numpy.stack([(residuals(point + move) - now) / step for move in step * numpy.eye(len(point))])
        gradient, normal = jacobian @ now, jacobian @ jacobian.T
        while damping < 1e8:
            candidate = point - numpy.linalg.solve(normal + damping * numpy.diag(numpy.diag(normal)), gradient)
            after = residuals(candidate)
            total = after @ after
            if total < best:
                gain, point, now, best = best - total, candidate, after, total
                damping = max(damping / 5, 1e-9)
                break
            damping *= 5
        else:
            return point
        if gain < 1e-4 * best:
            return point
    return point


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
    seen = [row for row in rows("mi300x-vllm-405b") if row.name.partition(", ")[2] in CALIBRATION.few_405b]
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


def two_gpus() -> Experiment:
    """Return headrace's rows of one H100, tested on those of two, whose sums are from the table of collectives."""
    title = "headrace: one H100 fitted, TP2 on two"
    return Experiment(title, rows("h100-headrace"), rows("h100-headrace-tp2"), 0.12, 0.50)


def experiments() -> list[Experiment]:
    """Return every experiment."""
    made = [published(), another_model(), two_gpus()]
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


def print_constants() -> None:
    for chip, engines in CALIBRATION.fitted_on.items():
        for engine, tables in engines.items():
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
        print(f"\n### {engine}, one H200: constants of the other two models\n")
        each = list(without_models(engine))
        tested, errors = [row for one in each for row in one.tested], [value for one in each for value in one.errors()]
        print("\n".join(table_of(tested, errors)))
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
