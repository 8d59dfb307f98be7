"""Joins ranks into groups and runs their collectives.

A group of one rank has the same collectives and they do nothing, so that no caller asks how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import ConfigError


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Group:
    """Holds a group's collectives. Every rank of the group must call the same ones in the same order: a rank that calls
    one more waits for ever. So what a rank alone has measured (a time, free memory, an error) must not decide what is
    called next, before `largest` has made it the same everywhere."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _same
    """sums over the ranks, in place, and returns its argument"""
    all_gather: Callable[[Tensor], Tensor] = _same
    """[..., n] on each rank -> [..., size * n] on all, in the order of ranks"""

    def most(self, values: Tensor) -> Tensor:
        """Return the largest of all ranks for each of `values` [..., n], which may be as it is given."""
        return values if self.size == 1 else self.all_gather(values).unflatten(-1, (-1, values.shape[-1])).amax(-2)

    def largest(self, value: float, device: torch.device) -> float:
        """Return the largest value of all ranks, the same on each; among several ranks NaN counts as infinite."""
        if self.size == 1:
            return value
        mine = torch.tensor([[math.inf if math.isnan(value) else value]], device=device)
        return float(self.all_gather(mine).max())


@dataclass(frozen=True)
class Mesh:
    """Holds the groups that this rank belongs to."""

    tp: Group = Group()
    """the ranks over which each layer is split (tensor parallelism)"""
    close: Callable[[], None] = lambda: None
    """leaves the groups; call it once, at the end"""


def init_mesh(
    rank: int,
    tp_size: int,
    rendezvous: str | None = None,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
) -> Mesh:
    """Join the other ranks and return when all have joined.

    `rendezvous` is the path of a file that does not exist yet, in a folder that only this user can enter, the same for
    every rank (torch's TCPStore would listen on all networks); a mesh of one rank needs none. CPU ranks communicate
    over gloo on loopback, CUDA ranks over NCCL. Raises ConfigError for a rank or rendezvous that cannot work, and
    torch's DistStoreError when a rank does not join in time.
    """
    if not 0 <= rank < tp_size:
        raise ConfigError(f"rank must be in [0, {tp_size}), got {rank}")
    if tp_size == 1:
        return Mesh()
    if not rendezvous:
        raise ConfigError(f"tensor_parallel_size {tp_size} needs a rendezvous: the path of a file")
    if not Path(rendezvous).parent.is_dir():
        raise ConfigError(f"rendezvous {rendezvous!r}: its folder does not exist")
    store = dist.FileStore(rendezvous, tp_size)
    device = torch.device(device)
    if device.type == "cuda":
        dist.init_process_group("nccl", store=store, rank=rank, world_size=tp_size, timeout=timeout, device_id=device)
        group = _group(rank, tp_size, dist.all_reduce, dist.all_gather_into_tensor)
        return Mesh(group, close=dist.destroy_process_group)
    # Without torch's default group there is nothing to clean up but `processes`, and it listens on loopback only.
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    processes = gloo(dist.PrefixStore("tp", store), rank, tp_size, options)
    group = _group(
        rank,
        tp_size,
        lambda tensor: processes.allreduce([tensor]).wait(),
        lambda gathered, tensor: processes._allgather_base(gathered.flatten(0, 1), tensor).wait(),
    )
    return Mesh(group, close=processes.shutdown)


def _group(
    rank: int, size: int, sum_in_place: Callable[[Tensor], Any], gather_into: Callable[[Tensor, Tensor], Any]
) -> Group:
    def all_reduce(tensor: Tensor) -> Tensor:
        sum_in_place(tensor)
        return tensor

    def all_gather(tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((size, *tensor.shape))
        gather_into(gathered, tensor.contiguous())
        return gathered.movedim(0, -2).flatten(-2)

    return Group(rank, size, all_reduce, all_gather)
