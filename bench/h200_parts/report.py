"""From figures to JSON and tables, and from the JSON of several runs to one. Pure, but for the files it is to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from h200_parts.rows import SPECS, Result, row_record

Record = dict[str, Any]
HEADER = "| row | unit | vLLM 0.26 | target | headrace | bound | of bound | met |\n|---|---|---|---|---|---|---|---|"
SHORT_HEADER = "| | vLLM 0.26 | target | headrace | met |\n|---|---|---|---|---|"


def number(value: float | None, unit: str = "") -> str:
    """Three digits or all that stand before the point; `-` for none."""
    if value is None:
        return "-"
    if value != 0 and abs(value) < 0.1 and unit == "":
        return f"{value:.1e}"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 20 else 2
    return f"{value:,.{digits}f}"


def full_table(rows: list[Record]) -> str:
    """One line a row, in the order of the specs; readings without a spec come last."""
    lines = [HEADER]
    for row in in_order(rows):
        spec = SPECS.get(row["name"])
        title = f"{spec.line.split(' at batch 1 /')[0].split(':')[0]}, {spec.label}" if spec else row["name"]
        share = "-" if row["share_of_bound"] is None else f"{row['share_of_bound']:.0%}"
        cells = [title, row["unit"], *(number(row[key], row["unit"]) for key in ("vllm", "target", "value", "bound"))]
        lines.append("| " + " | ".join([*cells, share, verdict(row)]) + " |")
    return "\n".join(lines)


def short_table(rows: list[Record]) -> str:
    """One line a group of rows, figures beside each other; `-` for what was not measured."""
    measured = {row["name"]: row for row in rows}
    lines: dict[str, list[Record]] = {}
    for name, spec in SPECS.items():
        missing = {"name": name, "value": None, "valid": True, "met": None, "unit": spec.unit, "vllm": spec.vllm}
        missing["target"] = None if spec.share_of else spec.target
        lines.setdefault(spec.line, []).append(measured.get(name, missing))
    found = [SHORT_HEADER]
    for line, group in lines.items():
        if all(row["value"] is None for row in group):
            continue
        unit = SPECS[group[0]["name"]].unit
        vllm, value = (" / ".join(number(row[key], row["unit"]) for row in group) for key in ("vllm", "value"))
        verdicts = [verdict(row) for row in group]
        met = verdicts[0] if len(set(verdicts)) == 1 else " / ".join(verdicts)
        cells = [line + (f", {unit}" if unit else ""), vllm, _targets(group), value, met]
        found.append("| " + " | ".join(cells) + " |")
    return "\n".join(found)


def _targets(group: list[Record]) -> str:
    """`<= 3.95 / 4.2`, with a sign for each where they differ."""
    signs = [">= " if SPECS[row["name"]].higher_is_better else "<= " for row in group]
    numbers = [number(row["target"], row["unit"]) for row in group]
    if set(numbers) == {"-"}:
        return "-"
    if len(set(signs)) == 1:
        return signs[0] + " / ".join(numbers)
    return " / ".join(sign + text for sign, text in zip(signs, numbers, strict=True))


def verdict(row: Record) -> str:
    if not row["valid"]:
        return "invalid"
    return {None: "-", True: "yes", False: "no"}[row["met"]]


def in_order(rows: list[Record]) -> list[Record]:
    order = {name: place for place, name in enumerate(SPECS)}
    return sorted(rows, key=lambda row: order.get(row["name"], len(order)))


def details(rows: list[Record]) -> str:
    """Samples, token counts and notes of the rows that have any."""
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
    """One record of several runs: of equal rows the latest stands, and shares of other rows are settled anew."""
    runs = sorted(runs, key=lambda run: run["date"])
    latest: dict[str, Record] = {row["name"]: row for run in runs for row in run["rows"]}
    keys = Result.__dataclass_fields__.keys()
    results = [Result(**{key: row[key] for key in keys}) for row in latest.values()]
    heads = [head for run in runs for head in run.get("runs", [{k: v for k, v in run.items() if k != "rows"}])]
    newest = heads[-1] if heads else {}
    return {"runs": heads, **newest, "rows": in_order(records(results))}


def read_runs(folder: Path) -> list[Record]:
    """Every run's JSON in a folder. Raises SystemExit naming a file that is none."""
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
    """Markdown: the full table, the short one, and what the run was."""
    runs = record.get("runs") or [record]
    about = []
    for run in runs:
        if "versions" not in run:
            about.append(f"- {run['date']}: cut off before the chip was measured. `{run['command']}`")
            continue
        versions = ", ".join(f"{name} {value}" for name, value in run["versions"].items())
        about.append(
            f"- {run['date']}, {', '.join(run['parts'])}: {run['gpu']}, {versions}, commit {run['commit'] or '?'}. "
            f"Ceilings: {ceilings_line(run) or 'not measured'}. `{run['command']}`"
        )
    parts = [full_table(record["rows"]), short_table(record["rows"]), details(record["rows"]), "\n".join(about)]
    return "\n\n".join(part for part in parts if part)
