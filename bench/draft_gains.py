"""Draws how many times as many tokens a second guessing gives, against the requests that run at once.

    python bench/draft_gains.py --results out.json --output docs/images/drafts.svg

Results are what `bench/h200.py --part drafts --json out.json` measured.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from headrace.advice.tune.page import HEIGHT, WIDTH, Frame

Curves = dict[str, dict[int, float]]
"""what guesses -> requests at once -> tokens a second over those without"""
MOST = 256
MEASURED = {
    "eagle3": "3 guesses, 2.5 tokens a step",
    "fixed": "3 guesses, 40% right",
    "adaptive": "adaptive, 40% right",
}
"""kind of a measured row -> what is guessed"""
COLOURS = ("#0072b2", "#e08a00", "#009e73")
STYLE = (
    "svg{color:#222;font-family:system-ui,sans-serif}text{font-size:12px;fill:currentColor}"
    ".grid{stroke:currentColor;opacity:.15}"
)


def measured(record: dict[str, Any]) -> Curves:
    """Return what was measured with the head."""
    values = {row["name"]: row["value"] for row in record["rows"]}
    curves: Curves = {name: {} for name in MEASURED.values()}
    for name, value in values.items():
        part, model, kind, *batch = name.split("/")
        if part == "drafts" and kind in MEASURED and model == "8b-eagle3":
            curves[MEASURED[kind]][int(batch[0])] = value / values[f"drafts/{model}/plain/{batch[0]}"]
    return curves


def picture(curves: Curves, title: str) -> str:
    """Return a plot as SVG: requests at once to the right, each line twice as many as the one before."""
    highest = max(gain for curve in curves.values() for gain in curve.values())
    frame = Frame((0.0, math.log2(MOST)), (0.0, 1.3 * highest))  # above the curves is room for their names
    counts = {float(power): str(1 << power) for power in range(MOST.bit_length())}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *frame.grid(counts, "requests at once", f"tokens a second, without guesses 1: {title}"),
    ]
    (left, one), (right, _) = frame.at(0, 1), frame.at(frame.x[1], 1)
    parts.append(f'<path stroke="#222" d="M{left:.1f} {one:.1f}H{right:.1f}"/>')
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join("{:.1f},{:.1f}".format(*frame.at(math.log2(n), gain)) for n, gain in sorted(curve.items()))
        colour, y = COLOURS[number], 46 + 17 * number
        parts.append(f'<polyline fill="none" stroke-width="2" stroke="{colour}" points="{points}"/>')
        parts.append(f'<path stroke-width="2" stroke="{colour}" d="M{WIDTH - 176} {y - 4}h18"/>')
        parts.append(f'<text x="{WIDTH - 152}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON of bench/h200.py")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    record = json.loads(args.results.read_text())
    args.output.write_text(picture(measured(record), f"8B bf16, {record['gpu']}, {record['date'][:10]}"))


if __name__ == "__main__":
    main()
