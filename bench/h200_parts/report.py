"""Turns figures into JSON and Markdown tables, and the JSON files of several runs into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from h200_parts.rows import SPECS, Result, row_record

Record = dict[str, Any]
HEADER = "| row | unit | vLLM 0.26 | target | headrace | bound | of bound | met |\n|---|---|---|---|---|---|---|---|"


def number(value: float | None, unit: str = "") -> str:
    """Format with three digits, or all those before the point; `-` for none."""
    if value is None:
        return "-"
    if value != 0 and abs(value) < 0.1 and unit == "":
        return f"{value:.1e}"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 20 else 2
    return f"{value:,.{digits}f}"


def table(rows: list[Record]) -> str:
    """Return one line a row, in the order of SPECS; readings that SPECS lacks come last."""
    lines = [HEADER]
    for row in in_order(rows):
        title = SPECS[row["name"]].title if row["name"] in SPECS else row["name"]
        cells = [title, row["unit"], *(number(row[key], row["unit"]) for key in ("vllm", "target", "value", "bound"))]
        share = "-" if row["share_of_bound"] is None else f"{row['share_of_bound']:.0%}"
        met = {None: "-", True: "yes", False: "no"}[row["met"]] if row["valid"] else "invalid"
        lines.append("| " + " | ".join([*cells, share, met]) + " |")
    return "\n".join(lines)


def in_order(rows: list[Record]) -> list[Record]:
    order = {name: place for place, name in enumerate(SPECS)}
    return sorted(rows, key=lambda row: order.get(row["name"], len(order)))


def details(rows: list[Record]) -> str:
    """Return samples, token counts and notes of the rows that have any."""
    lines = []
    for row in in_order(rows):
        parts = []
        if row["samples"]:
            parts.append("median of " + " ".join(f"{sample:.4g}" for sample in row["samples"]))
        parts += [f"{count:,} {kind} tokens" for kind, count in row["tokens"].items()]
        parts += row["notes"]
        if parts:
            lines.append(f"{row['name']}: " + "; ".join(parts))
    return "\n".join(lines)


def case_lines(cases: list[Record]) -> str:
    """Return how many of the cases passed, and which failed."""
    failed = [case["name"] for case in cases if not case["ok"]]
    if failed:
        return f"FAIL: {len(failed)} of {len(cases)} cases: {', '.join(failed)}"
    return f"OK: all {len(cases)} cases" if cases else ""


def ceilings_line(record: Record) -> str:
    ceilings = record.get("ceilings")
    if not ceilings:
        return ""
    return (
        f"copy {ceilings['copy'] / 1e12:.2f} TB/s (read + written), read {ceilings['read'] / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings['bf16'] / 1e12:.0f} TFLOP/s, fp8 matmul {ceilings['fp8'] / 1e12:.0f} TFLOP/s"
    )


def records(results: list[Result]) -> list[Record]:
    values = {result.name: result.value for result in results}
    return [row_record(result, values) for result in results]


def merge(runs: list[Record]) -> Record:
    """Join the records of several runs: the latest of equal rows stays, and targets that are shares are set again."""
    runs = sorted(runs, key=lambda run: run["date"])
    latest: dict[str, Record] = {row["name"]: row for run in runs for row in run["rows"]}
    keys = Result.__dataclass_fields__.keys()
    results = [Result(**{key: row[key] for key in keys}) for row in latest.values()]
    own = [{key: value for key, value in run.items() if key not in ("rows", "cases")} for run in runs]
    heads = [head for run, alone in zip(runs, own, strict=True) for head in run.get("runs", [alone])]
    cases = {case["name"]: case for run in runs for case in run.get("cases", [])}
    newest = heads[-1] if heads else {}
    merged = {"runs": heads, **newest, "rows": in_order(records(results))}
    return merged | ({"cases": list(cases.values())} if cases else {})


def read_runs(folder: Path) -> list[Record]:
    """Read every run's JSON in a folder. Raises SystemExit naming a file that is none."""
    runs = []
    for path in sorted(folder.glob("*.json")):
        try:
            run = json.loads(path.read_text())
            if not isinstance(run, dict) or not {"rows", "date"} <= run.keys():
                raise ValueError("no rows")
        except ValueError as error:
            raise SystemExit(f"{path} is no result of bench/h200.py: {error}") from None
        runs.append(run)
    if not runs:
        raise SystemExit(f"no *.json in {folder}")
    return runs


def whole_report(record: Record) -> str:
    """Return Markdown: the table, its details, the cases, and the hardware, software and command of each run."""
    about = []
    for run in record.get("runs") or [record]:
        if "versions" not in run:
            about.append(f"- {run['date']}: ended before the chip was measured. `{run['command']}`")
            continue
        versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
        about.append(
            f"- {run['date']}, {', '.join(run['parts'])}: {run['gpu']}, {versions}, commit {run['commit'] or '?'}. "
            f"Ceilings: {ceilings_line(run) or 'not measured'}. `{run['command']}`"
        )
    rows = record["rows"]
    cases = case_lines(record.get("cases", []))
    parts = [table(rows) if rows else "", details(rows), cases, "\n".join(about)]
    return "\n\n".join(part for part in parts if part)
