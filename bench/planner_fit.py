"""Fits the constants of a chip and engine to measured rows: a few numbers, held near what is likely beforehand.

Least squares on the logarithms of predictions, by Levenberg's and Marquardt's method; plain Python. Knows rows and the
cost model, not where rows come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headrace.planner.catalogue import find_model
from headrace.planner.chips import find_chip
from headrace.planner.constants import Efficiency
from headrace.planner.cost import Deployment, Parallel, StepModel, StepWork
from headrace.planner.predict import Limits, Workload, predict
from headrace.planner.simulate import Segment, recost, simulate

ROW_SPREAD = 0.06
"""what a prediction may be off by (a logarithm) before it weighs"""
OUTLIER = 0.25
"""... and from where on a row weighs less and less: something else was measured there"""
SPREADS = {
    "bandwidth": 0.06,
    "kv_bandwidth": 0.25,
    "gemm": 0.15,
    "attention": 0.4,
    "overlap": 0.3,
    "kernel": 0.4,
    "launch": 0.25,
    "sequence": 0.3,
    "request": 0.1,
    "link": 0.3,
    "collective": 0.4,
}
"""How far (a logarithm) each constant is likely to be from where the fit starts"""
LIKELY = {
    ("nvidia", "vllm"): Efficiency(
        bandwidth=0.86, kv_bandwidth=0.80, gemm=0.70, attention=0.40, overlap=1.8, kernel=4e-6, launch=37e-6,
        sequence=25e-6, request=6.5e-3, link=0.7, collective=12e-6,
    ),
    ("nvidia", "headrace"): Efficiency(
        bandwidth=0.88, kv_bandwidth=0.85, gemm=0.70, attention=0.33, overlap=1.5, kernel=2.2e-6, launch=10e-6,
        sequence=10e-6, request=1e-3, link=0.7, collective=12e-6,
    ),
    ("amd", "vllm"): Efficiency(
        bandwidth=0.70, kv_bandwidth=0.60, gemm=0.45, attention=0.30, overlap=1.2, kernel=4e-6, launch=20e-6,
        sequence=28e-6, request=4e-3, link=0.6, collective=14e-6,
    ),
}  # fmt: skip
"""Where a fit starts: round figures by rates of single products, reads and kernels, chosen with the tables in view.
From starts up to a quarter off, fits end alike (tests/planner/test_accuracy.py)."""
_NAMES = [field.name for field in fields(Efficiency)]


@dataclass(frozen=True)
class Row:
    """One measured figure and how to predict it."""

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
    max_num_batched_tokens: int
    kv_tokens: int = 1 << 40
    segments: tuple[Segment, ...] = ()
    """of a throughput row, from `prepared`"""

    def predict(self, model: StepModel) -> float:
        """In the row's unit."""
        if self.kind == "throughput":
            return self.batch * self.output_len / (recost(model, self.segments) + model.efficiency.request)
        if self.kind == "tpot":
            load = Workload(self.input_len, self.output_len, self.batch)
            limits = Limits(self.batch, self.max_num_batched_tokens, self.kv_tokens)
            return predict(self.deployment, load, limits, model=model).itl_ms
        if self.kind == "prefill":
            return 1000 * (self._prefill(model) + model.efficiency.request)
        step = model.seconds(StepWork(self.batch, self.input_len + self.output_len / 2))
        return 1000 * step if self.kind == "decode" else step * self.output_len

    def _prefill(self, model: StepModel) -> float:
        tokens = self.batch * self.input_len
        steps = -(-tokens // self.max_num_batched_tokens)
        work = StepWork(0, 0.0, tokens / steps, (self.input_len + 1) / 2, -(-self.batch // steps))
        return steps * model.seconds(work)


def prepared(row: Row, model: StepModel, limits: Limits) -> Row:
    """With the steps that its requests take, which do not depend on constants where all come at once."""
    if row.kind != "throughput":
        return row
    run = simulate(row.deployment, Workload(row.input_len, row.output_len, row.batch, row.batch), limits, model=model)
    return replace(row, segments=tuple(condense(run.segments)))


def read_rows(path: Path) -> list[Row]:
    """A table of measured rows (tests/planner/measured/*.json), ready to be predicted, in the order of the file."""
    table = json.loads(path.read_text())
    chip, engine, budget = find_chip(table["chip"]), table["engine"], table["max_num_batched_tokens"]
    rows = []
    for entry in table["rows"]:
        model = table["models"][entry["model"]]
        kind, output_len = entry["kind"], entry.get("output_len", 1)
        kv_bytes = model.get(f"{kind}_kv_dtype_bytes", model["kv_dtype_bytes"])
        shape = find_model(model["model"])
        deployment = Deployment(shape, chip, Parallel(tp=model["tp"]), model["weight_format"], kv_bytes, engine)
        shown = f"{entry['batch']} x {entry['input_len']}" + (f"/{output_len}" if output_len > 1 else "")
        row = Row(
            f"{entry['model']}, {kind} {shown}",
            kind,
            deployment,
            entry["batch"],
            entry["input_len"],
            output_len,
            entry["value"],
            budget,
            model["kv_tokens"],
        )
        start = StepModel(deployment, likely(deployment))
        limits = Limits(table["max_num_seqs"], budget, model["kv_tokens"])
        rows.append(prepared(row, start, limits))
    return rows


def likely(deployment: Deployment) -> Efficiency:
    """Where a fit of that chip and engine starts."""
    return LIKELY[deployment.chip.vendor, deployment.engine]


def condense(segments: Sequence[Segment]) -> list[Segment]:
    """Steps that are nearly alike as one kind: their mean."""
    kinds: dict[tuple[int, int, int], list[float]] = {}
    for work, steps in segments:
        key = (
            round(12 * math.log(work.decodes + 1)),
            round(8 * math.log(work.prefill_tokens + 1)),
            round(6 * math.log(work.decode_context + 1)),
        )
        sums = kinds.setdefault(key, [0.0] * 6)
        amounts = (
            1.0,
            work.decodes,
            work.decodes * work.decode_context,
            work.prefill_tokens,
            work.prefill_tokens * work.prefill_context,
            work.prompts,
        )
        for index, amount in enumerate(amounts):
            sums[index] += steps * amount
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
        for steps, decodes, keys, tokens, pairs, prompts in kinds.values()
    ]


def error(row: Row, constants: Efficiency) -> float:
    """(predicted - measured) / measured."""
    return row.predict(StepModel(row.deployment, constants)) / row.value - 1


def fit(rows: Sequence[Row], start: Efficiency | None = None) -> Efficiency:
    """The constants that explain the rows best, near `start` (default: what is likely)."""
    start = start or likely(rows[0].deployment)
    widths = [SPREADS[name] for name in _NAMES]

    def constants(point: Sequence[float]) -> Efficiency:
        values = {}
        for name, offset, width in zip(_NAMES, point, widths, strict=True):
            value = getattr(start, name) * math.exp(offset * width)
            values[name] = max(1.0, value) if name == "overlap" else value
        return Efficiency(**values)

    def residuals(point: Sequence[float]) -> list[float]:
        """Rows first, then the distance of each constant from where it started."""
        found, at = [], constants(point)
        for row in rows:
            miss = math.log(row.predict(StepModel(row.deployment, at)) / row.value) / ROW_SPREAD
            limit = OUTLIER / ROW_SPREAD
            found.append(math.copysign(limit * math.sqrt(math.log1p((miss / limit) ** 2)), miss))
        return [*found, *point]

    return constants(_least_squares(residuals, [0.0] * len(_NAMES)))


def _least_squares(
    residuals: Callable[[Sequence[float]], list[float]], point: list[float], rounds: int = 25
) -> list[float]:
    """Levenberg-Marquardt with differences for derivatives."""
    damping, step = 1e-2, 1e-3
    now = residuals(point)
    best = sum(value * value for value in now)
    for _ in range(rounds):
        columns = []
        for index in range(len(point)):
            moved = [value + (step if at == index else 0.0) for at, value in enumerate(point)]
            columns.append([(after - before) / step for after, before in zip(residuals(moved), now, strict=True)])
        gradient = [sum(a * b for a, b in zip(column, now, strict=True)) for column in columns]
        normal = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
        while damping < 1e8:
            damped = [
                [value * (1 + damping if row == column else 1) for column, value in enumerate(line)]
                for row, line in enumerate(normal)
            ]
            delta = _solve(damped, gradient)
            candidate = [value - change for value, change in zip(point, delta, strict=True)]
            after = residuals(candidate)
            total = sum(value * value for value in after)
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


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss with pivots."""
    size = len(right)
    lines = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(lines[row][column]))
        lines[column], lines[pivot] = lines[pivot], lines[column]
        for row in range(column + 1, size):
            factor = lines[row][column] / lines[column][column]
            for index in range(column, size + 1):
                lines[row][index] -= factor * lines[column][index]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(lines[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (lines[row][size] - known) / lines[row][row]
    return solution
