"""Checks at load the kernels that sum over GPUs, which all ranks run together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from headrace.distributed.mesh import Group
from headrace.kernels.cases import Inputs, relative_error, sums_over_ranks
from headrace.runner.self_check import Check

ROWS = (1, 3, 70)


def peer_checks(group: Group, hidden: int, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Yield the check of sums over `group`, if kernels make them. Its error is in multiples of what is allowed."""
    own = group.peers
    if own is None:
        return

    def error() -> float:
        worst = 0.0
        for rows in (rows for rows in ROWS if rows * hidden * dtype.itemsize <= own.room):
            for run, expected, bound in sums_over_ranks(Inputs(dtype, device, rows), own, rows, hidden):
                worst = max(worst, relative_error(run(), expected) / (bound or 1.0))
        return math.inf if own.gave_up else worst

    def demote() -> str:
        own.on = False
        return "NCCL"

    yield Check("all_reduce", error, 1.0, demote)


def describe_sums(group: Group, demoted: bool = False) -> list[str]:
    """Return the line for the start-up log that says what sums over the GPUs of `group`; none where there is one GPU,
    or none."""
    own, begin = group.peers, f"Sums over {group.size} GPUs:"
    if own is not None and not demoted:
        largest = f"{own.room / 2**20:.3g} MiB"
        return [f"{begin} kernels of headrace's own up to {largest}, with residual and norm; NCCL above."]
    why = "see the self-check" if own is not None else group.no_peers
    return [f"{begin} NCCL, {why}."] if why else []
