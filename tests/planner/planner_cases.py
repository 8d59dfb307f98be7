"""Deployments and workloads that several tests of the planner's arithmetic share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.planner.catalogue import find_model
from headrace.planner.chips import Chip, find_chip
from headrace.planner.cost import StepCost, StepWork, step_model
from headrace.planner.deployment import Deployment
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import ModelShape

MEASURED = Path(__file__).parent / "measured"


def step_cost(deployment: Deployment, work: StepWork) -> StepCost:
    return step_model(deployment).cost(work)


def mapped(
    shape: ModelShape,
    chip: Chip,
    parallel: Parallel,
    *,
    weight_format: str | None = None,
    kv_dtype_bytes: float = 2.0,
    engine: str = "headrace",
    **limits: Any,
) -> MemoryMap:
    """The memory map of a deployment by its parts; `weight_format` is the checkpoint's unless given."""
    form = weight_format or shape.weight_format
    return memory_map(Deployment(shape, chip, parallel, form, kv_dtype_bytes, engine), **limits)


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
