"""Predictions against what was measured: fitted on some rows, held against others. `pytest -s` shows every table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import median

import calibrate_planner as calibration
import pytest
from calibrate_planner import Row, error, fit, likely

from headrace.planner.catalogue import catalogue
from headrace.planner.chips import find_chip
from headrace.planner.constants import Efficiency, find_efficiency
from headrace.planner.cost import StepWork, step_model
from headrace.planner.memory_map import memory_map
from headrace.planner.parallel import Parallel
from headrace.planner.predict import Limits, Workload, predict
from headrace.planner.shapes import shape_of
from tests.planner.planner_cases import deployment


def held(title: str, rows: Sequence[Row], errors: Sequence[float], median_bound: float, worst_bound: float) -> None:
    print(f"\n{title}: {calibration.summary(errors)}")
    print("\n".join(calibration.table_of(rows, errors)))
    sizes = [abs(value) for value in errors]
    assert median(sizes) <= median_bound
    assert max(sizes) <= worst_bound


SAMPLED = ("headrace, H200: first, third", "without 8b fp8", "TP2")


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(one, id=one.title, marks=[] if any(part in one.title for part in SAMPLED) else pytest.mark.slow)
        for one in calibration.experiments()
    ],
)
def test_rows_that_were_not_fitted(experiment: calibration.Experiment) -> None:
    fitted, tested = experiment.fitted, experiment.tested
    assert not set(fitted) & set(tested)
    if "five rows fitted" in experiment.title:
        assert (len(fitted), len(tested)) == (5, 15)
    held(experiment.title, tested, experiment.errors(), experiment.median_bound, experiment.worst_bound)


def test_other_models_chips_and_versions() -> None:
    rows = calibration.elsewhere()
    held("elsewhere", rows, calibration.shipped_errors(rows), 0.15, 0.25)


@pytest.mark.parametrize(
    ("chip", "engine"),
    [
        pytest.param(chip, engine, marks=[pytest.mark.slow] if chip == "mi300x" else [])
        for chip, engines in calibration.CALIBRATION.fitted_on.items()
        for engine in engines
    ],
)
def test_what_is_shipped_is_the_fit_of_all_rows(chip: str, engine: str) -> None:
    rows = [row for table in calibration.CALIBRATION.fitted_on[chip][engine] for row in calibration.rows(table)]
    expected, shipped = fit(rows), find_efficiency(find_chip(chip), engine)
    for field in fields(Efficiency):
        assert getattr(shipped, field.name) == pytest.approx(getattr(expected, field.name), rel=0.02), field.name
    held(f"{chip}, {engine}: all rows fitted", rows, calibration.shipped_errors(rows), 0.05, 0.35)


@pytest.mark.parametrize("engine", ["vllm", "headrace"])
def test_it_matters_little_where_the_fit_starts(engine: str) -> None:
    """Each constant up to a quarter off to either side, but for shares that no chip exceeds."""
    table, draw = calibration.rows(f"h200-{engine}"), random.Random(7)
    start = likely(table[0].deployment)
    names = [field.name for field in fields(Efficiency) if field.name != "bandwidth"]
    moved = replace(start, **{name: getattr(start, name) * draw.uniform(0.8, 1.25) for name in names})
    moved = replace(moved, overlap=max(1.0, moved.overlap))
    constants = fit(table[0::2], moved)
    sizes = [abs(error(row, constants)) for row in table[1::2]]
    print(f"\n{engine}, moved start: {calibration.summary(sizes)}")
    assert median(sizes) <= 0.12


IN_TILES = {
    # model, quantization_config (None: its own), decode steps at 1, 8, 32 and 128 requests after 128 tokens, ms
    ("llama-3.1-8b", "awq"): (1.92, 2.47, 3.29, 6.64),
    ("gpt-oss-20b", ""): (1.72, 3.65, 4.93, 6.11),
}


def test_weights_in_tiles() -> None:
    """docs/performance.md, H5: what an H200 took."""
    found = {}
    for (name, method), measured in IN_TILES.items():
        own = catalogue()[name].config
        config = {**own, "quantization_config": {"quant_method": method, "bits": 4}} if method else own
        shape = shape_of(config, name)
        model = step_model(replace(deployment(name), shape=shape, weight_format=shape.weight_format))
        for batch, milliseconds in zip((1, 8, 32, 128), measured, strict=True):
            found[name, batch] = 1000 * model.seconds(StepWork(batch, 192)) / milliseconds - 1
    print(found)
    assert median(map(abs, found.values())) < 0.1
    assert max(map(abs, found.values())) < 0.2


def test_whole_plans_of_the_published_throughputs() -> None:
    """Memory map and closed form together, as a plan puts them: cache counted, not told."""
    found, rows = [], []
    for table in ("mi300x-vllm-405b", "mi300x-vllm-70b"):
        for row in calibration.rows(table):
            if row.kind != "throughput":
                continue
            where = deployment(
                row.deployment.shape.name, "mi300x", Parallel(tp=8), "fp8", kv_dtype_bytes=1, engine="vllm"
            )
            memory = memory_map(where, max_num_seqs=row.batch, max_num_batched_tokens=131_072, max_model_len=8192)
            load = Workload(row.input_len, row.output_len, row.batch, row.batch)
            prediction = predict(where, load, Limits(row.batch, 131_072, memory.kv_tokens))
            rows.append(row)
            found.append(prediction.output_tok_s / row.value - 1)
    held("whole plans", rows, found, 0.12, 0.25)
