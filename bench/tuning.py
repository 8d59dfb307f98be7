"""Compiles what a tuner tries, in parallel processes, and says which of it the chip cannot run."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

import torch

SHARED_MEMORY = 220_000
"""bytes that the buffers of a configuration may take; larger ones are not tried"""
INEXACT = 1e-2
"""Relative error beside fp32 from which a configuration counts as wrong."""
FP8 = torch.float8_e4m3fn
Job = TypeVar("Job")


def plain_dtype(device_type: str) -> torch.dtype:
    """Return the 16-bit type: Triton's interpreter, on a CPU, does not multiply bf16."""
    return torch.bfloat16 if device_type == "cuda" else torch.float16


def compile_all(launch: Callable[[Job], object], jobs: Sequence[Job], processes: int) -> set[Job]:
    """Run `launch` on each job in processes of their own, which fills Triton's cache on disk; return those that fail.

    `launch` is pickled, so it is a function of a module (or a partial of one).
    """
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = list(pool.map(partial(_attempt, launch), jobs, chunksize=4))
    bad = {job: problem for job, problem in zip(jobs, problems, strict=True) if problem}
    print(f"{len(jobs)} configurations compiled, {len(bad)} cannot run", flush=True)
    for job, problem in bad.items():
        print(f"  {job}: {problem}")
    return set(bad)


def _attempt(launch: Callable[[Job], object], job: Job) -> str:
    try:
        launch(job)
        torch.cuda.synchronize()
    except Exception as error:  # not every configuration fits the chip
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that tuners share."""
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU, nothing is timed")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that compile")
