"""Compares fast code with plain references at load, on this model's weights, and replaces what disagrees.

The checks themselves are in kernel_checks.py, layer_checks.py and step_checks.py. Kernels are called through switches,
so that layers need not know what became of a kernel. Every rank demotes what disagrees on any rank.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from headrace.distributed.mesh import Group
from headrace.kernels.table import REFERENCE_KERNELS, KernelTable
from headrace.runner.memory import first_line, is_out_of_memory

WAITS_FOR_THE_HOST = frozenset({
    "prepare_batch", "rotary_and_cache", "latent_rotary_and_cache", "step_angles", "fused_moe", "gated_delta_step",
    "gated_delta_scan", "index_scores",
})  # fmt: skip
"""Kernels whose references read values on the host, which no graph can capture"""
COMPILING_THREADS = 16


class Switch:
    """Calls a kernel, or its reference once the kernel is demoted."""

    def __init__(self, fast: Callable[..., Any], reference: Callable[..., Any]) -> None:
        self.fast = fast
        self.reference = reference
        self.call = fast

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.call(*arguments, **options)

    def demote(self) -> None:
        self.call = self.reference


def with_switches(table: KernelTable) -> KernelTable:
    """Return the same kernels, with a switch in front of each that is not its own reference."""
    changed = {}
    for name, reference in vars(REFERENCE_KERNELS).items():
        if (fast := getattr(table, name)) is not reference:
            changed[name] = Switch(fast, reference)
    return replace(table, **changed)


def switches(table: KernelTable) -> dict[str, Switch]:
    """Return the switches of a table by the names of their kernels."""
    kernels = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: kernel for name, kernel in kernels.items() if isinstance(kernel, Switch)}


@dataclass(frozen=True)
class Check:
    """Describes one comparison with a reference."""

    name: str
    """of what is checked, as the log and /metrics call it"""
    error: Callable[[], float]
    """runs the comparison on this rank and returns the relative error"""
    bound: float
    demote: Callable[[], str]
    """replaces what is checked and returns what replaces it; raises where nothing can"""
    collective: bool = False
    """all ranks run it together, so that none may fail alone: what it raises ends the start"""


class SelfCheck:
    """Runs the checks and remembers what they demoted."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._count = 0
        self._seconds = 0.0
        self._notes: list[str] = []
        self.demoted: list[str] = []
        """names of what was replaced"""

    @property
    def notes(self) -> list[str]:
        """Lines for the start-up log; none if there was nothing to check."""
        if not self._count:
            return []
        verdict = f"{len(self.demoted)} demoted" if self.demoted else "all agree"
        return [f"Self-check: {self._count} checks in {self._seconds:.1f} s, {verdict}.", *self._notes]

    def compile_ahead(self, checks: Iterable[Check]) -> None:
        """Run checks in threads and ignore their results, so that kernels which this machine has never run are compiled
        on many cores: Triton's compiler releases Python's lock for most of its work. What fails here fails again in
        `run`, where it counts."""
        if self._device.type != "cuda":
            return

        def attempt(check: Check) -> None:
            with torch.inference_mode(), torch.cuda.device(self._device), contextlib.suppress(Exception):
                check.error()

        began = time.perf_counter()
        # A thread has no CUDA context until a call needs one, and naming the device makes none where it is the first:
        # cuBLAS, if it came first, would warn of that.
        current = partial(torch.cuda.synchronize, self._device)
        with ThreadPoolExecutor(COMPILING_THREADS, initializer=current) as threads:
            for check in checks:
                threads.submit(attempt, check)
        torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - began

    @torch.inference_mode()
    def run(self, checks: Iterable[Check]) -> None:
        """Run checks one after the other, since each runs without what those before it demoted. Every rank must be
        given the same checks."""
        began = time.perf_counter()
        for check in checks:
            self._count += 1
            own, failure = self._attempt(check)
            error = self._group.largest(own, self._device)
            if not error <= check.bound:
                replaced = check.demote()
                how = failure or f"disagrees with its reference (relative error {error:.1e} > {check.bound:.0e})"
                self.demoted.append(check.name)
                self._notes.append(f"Self-check: {check.name} {how} and is replaced by {replaced}.")
        self._seconds += time.perf_counter() - began

    def _attempt(self, check: Check) -> tuple[float, str]:
        """Return (relative error, why it could not run). A kernel that cannot run is as wrong as one that disagrees."""
        if check.collective and self._group.size > 1:
            return check.error(), ""
        try:
            return check.error(), ""
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return math.inf, f"cannot run ({type(error).__name__}: {first_line(error)})"
