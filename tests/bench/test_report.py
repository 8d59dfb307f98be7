"""Rows, verdicts, merging of runs and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from h200_parts.report import case_lines, merge, number, read_runs, records, table, whole_report
from h200_parts.rows import SPECS, Result, row_record


def run(date: str, *results: Result) -> dict[str, Any]:
    return {
        "date": date,
        "command": "python bench/h200.py --part x",
        "parts": ["x"],
        "seconds": {"x": 1.0},
        "ceilings": {"copy": 4.28e12, "read": 4.35e12, "bf16": 7e14, "fp8": 1.24e15},
        "gpu": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "commit": None,
        "rows": records(list(results)),
    }


def test_rows_that_decide_are_all_there() -> None:
    decisive = [spec for spec in SPECS.values() if spec.target is not None and spec.part != "numerics"]
    assert len(decisive) == 14 + 27 + 3 + 2 + 3 + 2 + 5 + 3 + 3 + 1 + 2 + 1 + 5 + 12 + 5 + 16 + 2 + 1
    for spec in decisive:
        if spec.vllm is not None and not spec.share_of and spec.part != "v2-lite":  # whose routers vLLM did not spread
            assert (spec.target > spec.vllm) if spec.higher_is_better else (spec.target < spec.vllm), spec  # type: ignore[operator]


def test_a_latency_is_met_from_below_and_a_throughput_from_above() -> None:
    assert row_record(Result("decode/bf16/1", 3.9), {})["met"] is True
    assert row_record(Result("decode/bf16/1", 4.0), {})["met"] is False
    assert row_record(Result("throughput/bf16/128x512", 23_600), {})["met"] is True
    assert row_record(Result("throughput/bf16/128x512", 23_400), {})["met"] is False
    assert row_record(Result("decode/moe/8", 3.0, valid=False), {})["met"] is False
    assert row_record(Result("prefill/bf16/8x2048", 3.0), {})["met"] is None
    assert row_record(Result("numerics/demo/argmax", 0), {})["met"] is True


def test_share_of_the_bound() -> None:
    assert row_record(Result("decode/bf16/1", 4.0, bound=3.0), {})["share_of_bound"] == pytest.approx(0.75)
    row = row_record(Result("throughput/bf16/128x512", 20_000, bound=40_000), {})
    assert row["share_of_bound"] == pytest.approx(0.5)


def test_a_target_that_is_a_share_needs_its_base() -> None:
    served = Result("served/at-once", 97.0)
    assert row_record(served, {})["target"] is None
    assert row_record(served, {})["met"] is None
    row = row_record(served, {"throughput/bf16/128x512": 100.0})
    assert (row["target"], row["met"]) == (97.0, True)


def test_merging_takes_the_latest_and_settles_shares_anew() -> None:
    first = run("2026-01-01 10:00:00", Result("served/at-once", 96.0), Result("decode/bf16/1", 5.0))
    second = run("2026-01-01 11:00:00", Result("decode/bf16/1", 3.5, bound=3.45, tokens={"output": 128}))
    third = run("2026-01-01 10:30:00", Result("throughput/bf16/128x512", 100.0))
    merged = merge([second, first, third])
    rows = {row["name"]: row for row in merged["rows"]}
    assert list(rows) == ["decode/bf16/1", "throughput/bf16/128x512", "served/at-once"]
    assert rows["decode/bf16/1"]["value"] == 3.5
    assert (rows["served/at-once"]["target"], rows["served/at-once"]["met"]) == (97.0, False)
    assert [head["date"] for head in merged["runs"]] == [run["date"] for run in (first, third, second)]
    again = merge([merged, run("2026-01-01 12:00:00", Result("served/at-once", 98.0))])
    assert len(again["runs"]) == 4
    assert next(row for row in again["rows"] if row["name"] == "served/at-once")["met"] is True
    assert "NVIDIA H200" in whole_report(again)


def test_the_table_has_a_line_a_row() -> None:
    results = [Result(f"decode/bf16/{batch}", value) for batch, value in ((1, 3.9), (8, 4.5), (32, 4.5), (128, 6.1))]
    rows = records([*results, Result("something/else", 1.5), Result("decode/moe/8", 7.0, bound=6.0, valid=False)])
    lines = table(rows).splitlines()
    assert lines[2] == "| Llama-3.1-8B bf16, decode step, batch 1 | ms | 4.97 | 3.95 | 3.90 | - | - | yes |"
    assert [line.split(" | ")[-1] for line in lines[2:6]] == ["yes |", "no |", "yes |", "yes |"]
    assert lines[-2] == "| Qwen3-30B-A3B bf16, decode step, batch 8 | ms | 9.33 | 7.50 | 7.00 | 6.00 | 86% | invalid |"
    assert lines[-1] == "| something/else |  | - | - | 1.50 | - | - | - |"
    exact = table(records([Result("numerics/demo/error", 0.003), Result("numerics/demo/covered", 90.0)]))
    assert "| demo model: relative logit error |  | - | 1.0e-02 | 3.0e-03 | - | - | yes |" in exact
    assert "| demo model: positions covered | % | - | 80.0 | 90.0 | - | - | yes |" in exact


def test_titles_of_rows_differ() -> None:
    assert len({spec.title for spec in SPECS.values()}) == len(SPECS)


def test_cases_are_merged_and_counted() -> None:
    one, other = ({"name": f"memory/{name}", "ok": ok, "said": ""} for name, ok in (("hog", True), ("tiny", False)))
    first = run("2026-01-01 10:00:00") | {"cases": [one, other]}
    second = run("2026-01-01 11:00:00") | {"cases": [other | {"ok": True}]}
    assert case_lines(merge([first])["cases"]) == "FAIL: 1 of 2 cases: memory/tiny"
    assert case_lines(merge([first, second])["cases"]) == "OK: all 2 cases"
    assert "cases" not in merge([run("2026-01-01 10:00:00")])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "-"),
        (0.0123, "", "1.2e-02"),
        (4.567, "ms", "4.57"),
        (23.45, "ms", "23.4"),
        (12345.6, "s", "12,346"),
    ],
)
def test_numbers(value: float | None, unit: str, text: str) -> None:
    assert number(value, unit) == text


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no \*\.json"):
        read_runs(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(run("2026-01-01 10:00:00", Result("decode/bf16/1", 5.0))))
    assert len(read_runs(tmp_path)) == 1
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"b\.json"):
        read_runs(tmp_path)
