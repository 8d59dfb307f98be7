"""At load, what is fast is compared with what is plainly right, on this model's weights; what disagrees is replaced.

Kernels are called through switches, which whoever holds one need not know. How each one is run and compared stands in
kernel_checks.py and step_checks.py. Every rank demotes what any of them found wrong.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headrace.distributed.mesh import Group
from headrace.kernels.table import REFERENCE_KERNELS, KernelTable
from headrace.runner.memory import first_line, is_out_of_memory

WAITS_FOR_THE_HOST = frozenset({"prepare_batch", "rotary_and_cache", "step_angles", "fused_moe"})
"""Kernels whose references look at values on the host: no graph can hold them."""


COMPILING_THREADS = 16


class Switch:
    """A kernel that can be turned to its reference while others hold it."""

    def __init__(self, fast: Callable[..., Any], reference: Callable[..., Any]) -> None:
        self.fast = fast
        self.reference = reference
        self.call = fast

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.call(*arguments, **options)

    def demote(self) -> None:
        self.call = self.reference


def with_switches(table: KernelTable) -> KernelTable:
    """The same kernels, those that are not references behind switches."""
    changed = {}
    for name, reference in vars(REFERENCE_KERNELS).items():
        if (fast := getattr(table, name)) is not reference:
            changed[name] = Switch(fast, reference)
    return replace(table, **changed)


def switches(table: KernelTable) -> dict[str, Switch]:
    """by kernel"""
    found = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: kernel for name, kernel in found.items() if isinstance(kernel, Switch)}


@dataclass(frozen=True)
class Check:
    name: str
    """of what is demoted, as the log and /metrics call it"""
    error: Callable[[], float]
    """relative; runs on this rank alone, unless `together`"""
    bound: float
    demote: Callable[[], str]
    """Replaces it; says by what. May raise where nothing can replace it."""
    together: bool = False
    """Every rank takes part in running it, so that of several none may fail alone: what it raises ends the start"""


@dataclass(frozen=True)
class Demotion:
    name: str
    error: float
    """the largest of all ranks; infinite: not numbers, or it could not run"""
    said: str
    """a line for the start-up log"""


class SelfCheck:
    """`run` one list of checks after the other; then `notes`."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._count = 0
        self._seconds = 0.0
        self.demotions: list[Demotion] = []

    @property
    def notes(self) -> list[str]:
        """Lines for the start-up log; none where there was nothing to check."""
        if not self._count:
            return []
        verdict = f"{len(self.demotions)} demoted" if self.demotions else "all agree"
        summary = f"Self-check: {self._count} checks in {self._seconds:.1f} s, {verdict}."
        return [summary, *(f"Self-check: {demotion.said}." for demotion in self.demotions)]

    @property
    def demoted(self) -> list[str]:
        return [demotion.name for demotion in self.demotions]

    def compile_ahead(self, checks: Iterable[Check]) -> None:
        """Run checks side by side, their results unseen, so that many cores compile the kernels that this machine has
        never had: Triton's compiler lets go of Python's lock for most of its work. What fails here fails again in
        `run`, where it counts."""
        if self._device.type != "cuda":
            return

        def attempt(check: Check) -> None:
            with torch.inference_mode(), torch.cuda.device(self._device), contextlib.suppress(Exception):
                check.error()

        began = time.perf_counter()
        with ThreadPoolExecutor(COMPILING_THREADS) as threads:
            for check in checks:
                threads.submit(attempt, check)
        torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - began

    @torch.inference_mode()
    def run(self, checks: Iterable[Check]) -> None:
        """One after the other: what one demotes, the next does without. The same checks on every rank."""
        began = time.perf_counter()
        for check in checks:
            self._count += 1
            own, said = self._attempt(check)
            error = self._largest(own)
            if not error <= check.bound:
                replaced = check.demote()
                how = said or f"disagrees with its reference (relative error {error:.1e} > {check.bound:.0e})"
                self.demotions.append(Demotion(check.name, error, f"{check.name} {how} and is replaced by {replaced}"))
        self._seconds += time.perf_counter() - began

    def _attempt(self, check: Check) -> tuple[float, str]:
        """(relative error, what it died of). A kernel that cannot run is as wrong as one that lies."""
        if check.together and self._group.size > 1:
            return check.error(), ""
        try:
            return check.error(), ""
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return math.inf, f"cannot run ({type(error).__name__}: {first_line(error)})"

    def _largest(self, error: float) -> float:
        """Of all ranks."""
        if self._group.size == 1:
            return error
        mine = torch.tensor([[math.inf if math.isnan(error) else error]], device=self._device)
        return float(self._group.all_gather(mine).max())
