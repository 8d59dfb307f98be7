"""Deployments and workloads that several tests of the planner's arithmetic share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.planner.catalogue import find_model
from headrace.planner.chips import find_chip
from headrace.planner.cost import Deployment, Parallel

MEASURED = Path(__file__).parent / "measured"


@dataclass(frozen=True)
class Room:
    """A cache of so many tokens: what `predict` reads of a memory map."""

    kv_tokens: int


def deployment(
    model: str = "llama-3.1-8b",
    chip: str = "h200",
    parallel: Parallel | None = None,
    weight_format: str | None = None,
    kv_dtype_bytes: float = 2.0,
    engine: str = "headrace",
) -> Deployment:
    shape = find_model(model)
    return Deployment(
        shape,
        find_chip(chip),
        parallel or Parallel(),
        weight_format or shape.weight_format,
        kv_dtype_bytes,
        engine,
    )
