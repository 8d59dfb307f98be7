"""Reads the rows of the table (rows.json): vLLM 0.26's figure and headrace's target, which a measured figure may meet.

vLLM's figures were measured on an H200 with torch 2.11, at its defaults, with the same shapes and definitions. Targets
of what is lossy follow from rounding: to e4m3 it changes a number by 2.6% on average.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

BOUND = "bound"


@dataclass(frozen=True)
class RowSpec:
    """Describes one row of the table."""

    name: str
    part: str
    title: str
    unit: str
    vllm: float | None = None
    target: float | None = None
    share_of: str = ""
    """`target` is a share of this other row's value, or of the row's own BOUND"""
    higher_is_better: bool = False


@dataclass
class Result:
    """Holds one measured figure."""

    name: str
    value: float
    samples: list[float] = field(default_factory=list)
    """what `value` is the median of"""
    tokens: dict[str, int] = field(default_factory=dict)
    bound: float | None = None
    """the chip's own limit, in the row's unit"""
    notes: list[str] = field(default_factory=list)
    valid: bool = True


SPECS = {
    spec.name: spec
    for spec in msgspec.json.decode(Path(__file__).with_name("rows.json").read_bytes(), type=list[RowSpec])
}


def target_of(spec: RowSpec, values: dict[str, float], bound: float | None = None) -> float | None:
    """Return the target given other rows' `values` and the row's `bound`; None without one, or where the row it is a
    share of is missing."""
    if not spec.share_of or spec.target is None:
        return spec.target
    base = bound if spec.share_of == BOUND else values.get(spec.share_of)
    return None if base is None else spec.target * base


def row_record(result: Result, values: dict[str, float]) -> dict[str, Any]:
    """Return what the JSON file holds of a figure. A name that SPECS lacks is a reading without a target."""
    spec = SPECS.get(result.name) or RowSpec(result.name, "", result.name, "")
    target = target_of(spec, values, result.bound)
    met = None
    if target is not None:
        met = result.valid and (result.value >= target if spec.higher_is_better else result.value <= target)
    share = None
    if result.bound is not None and result.value:
        share = result.value / result.bound if spec.higher_is_better else result.bound / result.value
    known = {"unit": spec.unit, "vllm": spec.vllm, "target": target, "met": met, "share_of_bound": share}
    return asdict(result) | known
