"""Reads CUDA_VISIBLE_DEVICES and its relatives: which GPUs a value leaves, and what is wrong with it.

The rules are those of the CUDA runtime, which HIP shares: reading stops at the first entry that names no GPU, and an
entry given twice leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.advice.doctor.gpu import Gpu

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Selection:
    """Holds the GPUs that the variables leave."""

    gpus: tuple[Gpu, ...]
    by: tuple[str, ...] = ()
    """The variables that chose, as NAME=value."""
    wrong: tuple[str, ...] = ()
    """Those of them in which an entry names no GPU, or one again."""


def select(environment: Mapping[str, str], vendor: str, gpus: tuple[Gpu, ...]) -> Selection:
    """Return what the variables leave. On AMD ROCR_VISIBLE_DEVICES comes first, and HIP counts what it left."""
    variables = [ROCR, HIP if HIP in environment else CUDA] if vendor == "amd" else [CUDA]
    left, by, wrong = gpus, [], []
    for variable in filter(environment.__contains__, variables):
        by.append(f"{variable}={environment[variable]}")
        left, is_right = _left(environment[variable], left)
        wrong += [] if is_right else by[-1:]
    return Selection(left, tuple(by), tuple(wrong))


def _left(value: str, gpus: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], bool]:
    """(The GPUs that a value leaves, whether each of its entries names another one)."""
    if value.startswith("MIG-"):
        return gpus, True  # names an instance, not a GPU
    chosen: list[Gpu] = []
    for entry in value.split(","):
        gpu = _find(entry.strip(), gpus)
        if gpu is None:
            return tuple(chosen), False
        if gpu in chosen:
            return (), False
        chosen.append(gpu)
    return tuple(chosen), True


def _find(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.startswith("GPU-"):
        return next((gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())), None)
    # CUDA reads as much of an entry as is a number.
    match = re.match(r"\d+", entry)
    return gpus[int(match[0])] if match and int(match[0]) < len(gpus) else None
