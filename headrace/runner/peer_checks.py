"""Checks at load the kernels that sum over GPUs, which all ranks run together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from headrace.distributed.mesh import Group
from headrace.kernels import norm, peers
from headrace.kernels.cases import Inputs, add_up_over_ranks, all_reduce, rms_norm_over_ranks
from headrace.runner.self_check import Check

ROWS = (1, 3, 70)
NAME = "all_reduce"


def sum_error(make: Callable[[], Inputs], own: peers.Peers, rows: int, hidden: int) -> float:
    """Return the largest error, in multiples of its bound, of all ways to sum `rows` over the ranks, all of which must
    call it. `make`: gives inputs of the same seed on every rank."""
    given = own, rows, hidden
    ways = (
        (peers.all_reduce, peers.all_reduce_reference, all_reduce(make(), *given)),
        (norm.rms_norm, norm.rms_norm_reference, rms_norm_over_ranks(make(), *given)),
        (norm.add_up, norm.add_up_reference, add_up_over_ranks(make(), *given)),
    )
    errors = [(case.error(fast, plain), case.bound) for fast, plain, cases in ways for case in cases]
    if own.gave_up:
        return math.inf
    return max(error / bound if bound else math.inf if error else 0.0 for error, bound in errors)


def peer_checks(group: Group, hidden: int, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    """Yield the check of sums over `group`, if kernels make them."""
    own = group.peers
    if own is None:
        return

    def error() -> float:
        fitting = [rows for rows in ROWS if rows * hidden * dtype.itemsize <= own.room]
        return max(
            (sum_error(partial(Inputs, dtype, device, rows), own, rows, hidden) for rows in fitting), default=0.0
        )

    def demote() -> str:
        own.on = False
        return "NCCL"

    yield Check(NAME, error, 1.0, demote)


def describe_sums(group: Group, demoted: bool = False) -> list[str]:
    """Return the line for the start-up log that says what sums over the GPUs of `group`; none where there is one GPU,
    or none."""
    own, begin = group.peers, f"Sums over {group.size} GPUs:"
    if own is not None and not demoted:
        largest = f"{own.room / 2**20:.3g} MiB"
        return [f"{begin} kernels of headrace's own up to {largest}, with residual and norm; NCCL above."]
    why = "see the self-check" if own is not None else group.no_peers
    return [f"{begin} NCCL, {why}."] if why else []
