"""Makes figures of samples: lm_eval's result file, a table with error bars, and two runs compared item by item."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.evaluate.samples import Record
from headrace.evaluate.statistics import (
    Z95,
    interval_of_proportions,
    mcnemar,
    mean_stderr,
    pooled_stderr,
    ratio_stderr,
)

BAR_WIDTH = 40
FLIPS_SHOWN = 12
UNITS = {"word_perplexity": "words", "byte_perplexity": "bytes", "token_perplexity": "tokens"}


@dataclass(frozen=True)
class Figure:
    """Holds a figure and its standard error; None where one item has none."""

    value: float
    stderr: float | None


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Return the figures of a task, by `metric,filter`; those of parts of a task come under `part/metric,filter`."""
    if "loglikelihood" in records[0]:
        return _perplexities(records)
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["group"]].append(record)
    found: dict[str, Figure] = {}
    for name in records[0]["scores"]:
        parts = {group: Figure(*mean_stderr([one["scores"][name] for one in of])) for group, of in groups.items()}
        mean, stderr = mean_stderr([record["scores"][name] for record in records])
        if len(groups) > 1:
            stderr = pooled_stderr([part.stderr for part in parts.values()], [len(of) for of in groups.values()])
            found |= {f"{group}/{name}": parts[group] for group in sorted(parts)}
        found[name] = Figure(mean, stderr)
    return found


def _perplexities(records: Sequence[Record]) -> dict[str, Figure]:
    found = {}
    sums = [record["loglikelihood"] for record in records]
    for name, unit in UNITS.items():
        mean, stderr = ratio_stderr(sums, [record[unit] for record in records])
        value = math.exp(-mean)
        found[f"{name},none"] = Figure(value, None if stderr is None else value * stderr)
        if unit == "bytes":
            bits = None if stderr is None else stderr / math.log(2)
            found["bits_per_byte,none"] = Figure(-mean / math.log(2), bits)
    return found


def results_json(
    task: str, settings: Mapping[str, Any], records: Sequence[Record], size: int, seconds: float, date: float
) -> dict[str, Any]:
    """Return the result file under lm_eval's names. `size`: items in the data, of which `records` may be the first."""
    results: dict[str, dict[str, Any]] = {task: {"alias": task}}
    found = figures(records)
    for name, figure in found.items():
        part, _, full = name.rpartition("/")
        subtask = f"{task}_{part.replace(' ', '_')}" if part else task
        metric, _, filter_name = full.partition(",")
        of = results.setdefault(subtask, {"alias": part or task})
        of[full] = figure.value
        of[f"{metric}_stderr,{filter_name}"] = "N/A" if figure.stderr is None else figure.stderr
    counts = Counter(f"{task}_{record['group'].replace(' ', '_')}" for record in records if record.get("group"))
    samples = {name: {"original": counts[name], "effective": counts[name]} for name in results if name != task}
    return {
        "results": results,
        "n-shot": dict.fromkeys(results, settings.get("num_fewshot", 0)),
        "n-samples": samples | {task: {"original": size, "effective": len(records)}},
        "higher_is_better": {
            task: {name.split(",")[0]: "loglikelihood" not in records[0] for name in found if "/" not in name}
        },
        "config": dict(settings),
        "model_name": settings.get("model"),
        "date": date,
        "total_evaluation_time_seconds": seconds,
    }


def bar(figure: Figure, top: float, width: int = BAR_WIDTH) -> str:
    """Draw a figure from 0 to `top`, with the 95% interval over the end of its bar."""

    def at(value: float) -> int:
        return min(width - 1, max(0, round(value / top * (width - 1)))) if top > 0 else 0

    end = at(figure.value)
    cells = ["█" if cell < end else " " for cell in range(width)]
    if figure.stderr:
        low, high = at(figure.value - Z95 * figure.stderr), at(figure.value + Z95 * figure.stderr)
        cells[low : high + 1] = "─" * (high + 1 - low)
        cells[low], cells[high] = "├", "┤"
    cells[end] = "┼" if figure.stderr else "█"
    return "".join(cells)


def table(runs: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """Return lines with every run's figures and their bars. `runs`: name of a run -> its figures."""
    names = list(dict.fromkeys(name for of in runs.values() for name in of))
    width = max(map(len, runs))
    lines = []
    for name in names:
        shown = {run: of[name] for run, of in runs.items() if name in of}
        highest = max(figure.value + Z95 * (figure.stderr or 0.0) for figure in shown.values())
        top = highest if "perplexity" in name or "bits" in name else 1.0
        lines.append(name)
        for run, figure in shown.items():
            error = "        " if figure.stderr is None else f"± {figure.stderr:.4f}"
            lines.append(f"  {run:{width}}  {figure.value:8.4f} {error} |{bar(figure, top)}|")
    return lines


Comparison = tuple[dict[str, Any], list[str]]
"""Two runs on the same items: as a record, and as the lines that say it."""


def compare(first: Sequence[Record], second: Sequence[Record], names: tuple[str, str]) -> list[Comparison]:
    """Compare two runs of one task on the items that both have, metric by metric. Raises ConfigError where there is
    none."""
    ones, others = _by_content(first), _by_content(second)
    pairs = [(ones[key], others[key]) for key in ones if key in others]
    if not pairs:
        raise ConfigError(f"{names[0]} and {names[1]} have no item in common")
    alone = len(ones) + len(others) - 2 * len(pairs)
    note = f", {alone} items of one run alone left out" if alone else ""
    head = f"{names[1]} against {names[0]}, {len(pairs)} items{note}"
    if "loglikelihood" in pairs[0][0]:
        return [_compare_texts(pairs, head)]
    return [_compare_answers(pairs, metric, head) for metric in pairs[0][0]["scores"]]


def _by_content(records: Sequence[Record]) -> dict[tuple[str, int], Record]:
    """Records by what their item says, whatever its place in the data; equal items are told by their order."""
    seen: Counter[str] = Counter()
    found = {}
    for record in records:
        found[record["doc_hash"], seen[record["doc_hash"]]] = record
        seen[record["doc_hash"]] += 1
    return found


def _compare_answers(pairs: Sequence[tuple[Record, Record]], metric: str, head: str) -> Comparison:
    before = [one["scores"][metric] for one, _ in pairs]
    after = [other["scores"][metric] for _, other in pairs]
    lost = [one["doc_id"] for (one, _), a, b in zip(pairs, before, after, strict=True) if a > b]
    won = [one["doc_id"] for (one, _), a, b in zip(pairs, before, after, strict=True) if a < b]
    test = mcnemar(len(lost), len(won))
    low, high = interval_of_proportions(len(lost), len(won), len(pairs))
    difference = (len(won) - len(lost)) / len(pairs)
    record = {
        "metric": metric, "items": len(pairs), "difference": difference, "interval_95": [low, high],
        **asdict(test), "right_in_first_only": lost, "right_in_second_only": won,
    }  # fmt: skip
    lines = [
        f"{metric}: {head}",
        f"  difference {difference:+.4f}, 95% interval [{low:+.4f}, {high:+.4f}]",
        f"  McNemar: exact p = {test.exact_p:.4g}; chi-square {test.chi_square:.4g}, p = {test.chi_square_p:.4g}",
        f"  with continuity correction {test.corrected_chi_square:.4g}, p = {test.corrected_p:.4g}",
        f"  no longer right: {_listed(lost)}",
        f"  newly right: {_listed(won)}",
    ]
    return record, lines


def _compare_texts(pairs: Sequence[tuple[Record, Record]], head: str) -> Comparison:
    """Compare by the log-likelihood of a byte, which other tokenizers leave alone."""
    gains = [other["loglikelihood"] - one["loglikelihood"] for one, other in pairs]
    mean, stderr = ratio_stderr(gains, [one["bytes"] for one, _ in pairs])
    ratio = math.exp(-mean)
    record: Record = {"metric": "byte_perplexity,none", "items": len(pairs), "ratio": ratio, "interval_95": None}
    lines = [f"byte_perplexity,none: {head}", f"  {ratio:.5f} times as high"]
    if stderr is not None:
        low, high = math.exp(-mean - Z95 * stderr), math.exp(-mean + Z95 * stderr)
        record["interval_95"] = [low, high]
        lines[1] += f", 95% interval [{low:.5f}, {high:.5f}]"
    return record, lines


def _listed(items: Sequence[int]) -> str:
    more = f" and {len(items) - FLIPS_SHOWN} more" if len(items) > FLIPS_SHOWN else ""
    return f"{len(items)} items" + (f" ({', '.join(map(str, items[:FLIPS_SHOWN]))}{more})" if items else "")
