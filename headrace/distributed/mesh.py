"""Groups of ranks and the collectives they run. A group of one has the same verbs and does nothing, so that no caller
asks how many ranks there are. Knows nothing of layers, nor of who started the ranks.
"""

from __future__ import annotations

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
    """Some ranks that hold slices of one thing. Every rank of the group must call the same verbs in the same order."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _same
    """Sum over the ranks, in place; returns its argument."""
    all_gather: Callable[[Tensor], Tensor] = _same
    """[..., n] on each rank -> [..., size * n], in the order of ranks."""
    broadcast: Callable[[Tensor], Tensor] = _same
    """Rank 0's values to everyone, in place; returns its argument."""


@dataclass(frozen=True)
class Mesh:
    """Which groups this rank belongs to."""

    tp: Group = Group()
    """The ranks over which each layer is split."""
    close: Callable[[], None] = lambda: None
    """Leave the groups; call once, at the end."""


def init_mesh(
    rank: int,
    tp_size: int,
    rendezvous: str | None = None,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
) -> Mesh:
    """Join the other ranks; returns when all are there.

    `rendezvous` is the path of a file that does not exist yet, in a folder that only this user can enter, the same for
    every rank (torch's TCPStore would listen on all networks); a mesh of one rank needs none. CPU ranks talk over gloo
    on loopback, CUDA ranks over NCCL.
    Raises ConfigError on a rank or rendezvous that cannot work, torch's DistStoreError when somebody stays away.
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
        return Mesh(_nccl_group(rank, tp_size), close=dist.destroy_process_group)
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    processes = gloo(dist.PrefixStore("tp", store), rank, tp_size, options)
    return Mesh(_gloo_group(rank, tp_size, processes), close=processes.shutdown)


def _nccl_group(rank: int, size: int) -> Group:
    def all_reduce(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_gather(tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((size, *tensor.shape))
        dist.all_gather_into_tensor(gathered, tensor.contiguous())
        return gathered.movedim(0, -2).flatten(-2)

    def broadcast(tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, src=0)
        return tensor

    return Group(rank, size, all_reduce, all_gather, broadcast)


def _gloo_group(rank: int, size: int, processes: Any) -> Group:
    """Without torch's global default group: nothing to clean up but `processes`, and it listens on loopback only."""

    def all_reduce(tensor: Tensor) -> Tensor:
        processes.allreduce([tensor]).wait()
        return tensor

    def all_gather(tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((size, *tensor.shape))
        processes._allgather_base(gathered.flatten(0, 1), tensor.contiguous()).wait()
        return gathered.movedim(0, -2).flatten(-2)

    def broadcast(tensor: Tensor) -> Tensor:
        processes.broadcast([tensor]).wait()
        return tensor

    return Group(rank, size, all_reduce, all_gather, broadcast)
