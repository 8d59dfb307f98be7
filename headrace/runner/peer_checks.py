"""Checks at load the kernels that sum or exchange rows over GPUs, which all ranks run together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from headrace.distributed.mesh import Group, Mesh
from headrace.kernels.cases import Inputs, relative_error, rows_of_ranks, sums_in_two, sums_over_ranks
from headrace.kernels.peers import QUICK_BITS, Peers
from headrace.runner.self_check import Check

ROWS = (1, 3, 70)


def peer_checks(mesh: Mesh, hidden: int, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Yield the checks of sums over the ranks that share layers, and of exchanges with other engines, where kernels
    make them. Errors are in multiples of what is allowed."""
    ways: list[tuple[Group, str, Any]] = [
        (mesh.tp, "all_reduce", sums_over_ranks), (mesh.dp, "exchange", rows_of_ranks),
    ]  # fmt: skip
    if mesh.tp.peers is not None and mesh.tp.peers.two_shots is not None and dtype.itemsize == 2:
        in_bits = (mesh.tp.peers.two_shots.bits,)
        ways.append((mesh.tp, "all_reduce_in_two", partial(sums_in_two, in_bits=in_bits)))
    for group, name, cases in ways:
        if group.peers is None:
            continue

        def error(group: Group = group, own: Peers = group.peers, cases: Any = cases) -> float:
            group.largest(0.0, device)  # kernels wait less long for a rank that reads its weights late
            worst = 0.0
            for rows in (rows for rows in ROWS if rows * hidden * dtype.itemsize <= own.most):
                for run, expected, bound in cases(Inputs(dtype, device, rows), own, rows, hidden):
                    worst = max(worst, relative_error(run(), expected) / (bound or 1.0))
            return math.inf if own.gave_up else worst

        def demote(own: Peers = group.peers) -> str:
            own.on = False
            return "NCCL"

        yield Check(name, error, 1.0, demote)


def describe_peers(mesh: Mesh, quick_reduce: str = "NONE") -> list[str]:
    """Return lines for the start-up log that say what sums over GPUs, and what exchanges rows with other engines, none
    where there is one GPU, or none; and why sums are not Quick Reduce's, if that was asked for."""
    lines = []
    for group, begin, how in (
        (mesh.tp, f"Sums over {mesh.tp.size} GPUs:", ", with residual and norm"),
        (mesh.dp, f"Exchanges of {mesh.dp.size} engines:", ""),
    ):
        own = group.peers
        if own is not None and own.on:
            above, two = "NCCL above", own.two_shots if how else None
            if two is not None:
                least, most = two.least / 2**20, two.most >> 20
                above = f"from {least:.3g} to {most} MiB in two shots of {two.bits} bits; NCCL for all others"
            lines.append(f"{begin} kernels of headrace's own up to {own.most / 2**20:.3g} MiB{how}; {above}.")
        elif why := group.no_peers if own is None else "see the self-check":
            lines.append(f"{begin} NCCL, {why}.")
    own = mesh.tp.peers
    if quick_reduce == "NONE":
        return lines
    if own is None or not own.on:
        why = "one GPU has nothing to sum" if mesh.tp.size == 1 else "the library sums"
    elif own.two_shots is None or own.two_shots.bits != QUICK_BITS[quick_reduce]:
        why = "it was not measured to be faster on these GPUs, or answers must not depend on the batch"
    else:
        return lines
    return [*lines, f"Quick Reduce {quick_reduce}: no effect, {why}."]
