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
class Problem:
    """Says what is wrong with a variable."""

    seen: str
    fix: str


@dataclass(frozen=True)
class Selection:
    """Holds the GPUs that the variables leave."""

    gpus: tuple[Gpu, ...]
    by: tuple[str, ...] = ()
    """The variables that chose, as NAME=value."""
    problems: tuple[Problem, ...] = ()


def select(environment: Mapping[str, str], vendor: str, gpus: tuple[Gpu, ...]) -> Selection:
    """Return what the variables leave. On AMD ROCR_VISIBLE_DEVICES comes first, and HIP counts what it left."""
    variables = [CUDA]
    if vendor == "amd":
        variables = [ROCR, HIP if HIP in environment else CUDA]
    left, by, problems = gpus, [], []
    for variable in variables:
        if variable in environment:
            left, problem = _apply(variable, environment[variable], left)
            by.append(f"{variable}={environment[variable]}")
            problems += [problem] if problem else []
    return Selection(left, tuple(by), tuple(problems))


def _apply(variable: str, value: str, gpus: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], Problem | None]:
    chosen: list[Gpu] = []
    unset = f"unset {variable}"
    if not value.strip():
        return (), Problem(f"{variable} is set but empty, which hides every GPU", unset)
    if value.startswith("MIG-"):
        return gpus, None  # names an instance, not a GPU
    for entry in value.split(","):
        gpu = _find(entry.strip(), gpus)
        if gpu is None:
            range_ = f"0-{len(gpus) - 1}" if len(gpus) > 1 else "0 alone"
            seen = f"{variable}={value}: {entry.strip() or 'an empty entry'!r} names no GPU (there is {range_})"
            if not chosen:
                return (), Problem(f"{seen}, so none is visible", unset)
            kept = ",".join(value.split(",")[: len(chosen)])
            return tuple(chosen), Problem(f"{seen}; it and all after it are ignored", f"export {variable}={kept}")
        if gpu in chosen:
            kept = ",".join(dict.fromkeys(value.replace(" ", "").split(",")))
            return (), Problem(
                f"{variable}={value} names a GPU twice, which hides all of them", f"export {variable}={kept}"
            )
        chosen.append(gpu)
    return tuple(chosen), None


def _find(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.startswith("GPU-"):
        return next((gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())), None)
    # CUDA reads as much of an entry as is a number.
    match = re.match(r"\d+", entry)
    return gpus[int(match[0])] if match and int(match[0]) < len(gpus) else None
