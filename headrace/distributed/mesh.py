"""Joins ranks into groups and runs their collectives.

A group of one rank has the same collectives and they do nothing, so that no caller asks how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.distributed.peer_memory import connect
from headrace.distributed.progress import Progress
from headrace.distributed.ranks import Kind, Ranks
from headrace.errors import ConfigError
from headrace.kernels import exchange
from headrace.kernels import peers as own
from headrace.kernels.norm import Unsummed, add_up
from headrace.kernels.peers import Peers


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nobody(tensor: Tensor, other: int) -> Any:
    raise ConfigError(f"a group of one rank has no member {other} to exchange a tensor with")


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
    gather_rows: Callable[[Tensor], Tensor] = _same
    """[n, width] on each rank -> [size * n, width] on all, in the order of ranks"""
    scatter_rows: Callable[[Tensor], Tensor] = _same
    """[size * n, width] on each rank -> the sum over the ranks of this rank's n rows # [n, width]"""
    send: Callable[[Tensor, int], Callable[[], Any]] = _nobody
    """begins to send a tensor, which must not change meanwhile, to a member; what it returns waits until it has left.
    What two ranks send each other arrives in order"""
    receive: Callable[[Tensor, int], Tensor] = _nobody
    """fills a tensor with what a member sends next, and returns it"""
    peers: Peers | None = None
    """memory of the members in which kernels sum what is small"""
    no_peers: str = ""
    """why there is none"""

    def added(self, share: Tensor, residual: Tensor, leaves: bool) -> Any:
        """Return the sum over the ranks of `share` [num_tokens, hidden] plus `residual`, written over it. If `leaves`,
        it is Unsummed (kernels/norm.py), for whoever norms it to add up in the same pass."""
        if self.peers is None or not self.peers.take(share):
            total = self.all_reduce(share)
            return Unsummed(residual, total) if leaves else residual.add_(total)
        unsummed = Unsummed(residual, share, peers=self.peers)
        return unsummed if leaves else add_up(unsummed)

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
    pp: Group = Group()
    """the stages that pass hidden states on (pipeline parallelism)"""
    back: Group = Group()
    """the same ranks, for what goes from the last stage to the first: it must not wait behind hidden states"""
    dp: Group = Group()
    """the ranks in this one's place in other engines (data parallelism)"""
    all: Group = Group()
    """every rank: all of them compute at the same time, whatever their engines' requests are"""
    experts: Group = Group()
    """all ranks that hold experts of this one's layers, whole ones each (expert parallelism)"""
    close: Callable[[], None] = lambda: None
    """leaves the groups; call it once, at the end"""


GROUPS: dict[str, Kind] = {"tp": "tp", "pp": "pp", "back": "pp", "dp": "dp", "all": "all", "experts": "experts"}
"""group of a Mesh -> which ranks belong to it"""


def init_mesh(
    rank: int,
    ranks: Ranks,
    rendezvous: str | dist.Store | None = None,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
    progress: Progress | None = None,
    no_peers: str = "",
    address: str = "127.0.0.1",
    quick_reduce: str = "NONE",
    quick_most: int = 2**31,
) -> Mesh:
    """Join the other ranks and return when all have joined. `progress` counts the collectives; `no_peers`: why small
    sums over GPUs are left to NCCL; empty: headrace's own kernels make them, where GPUs reach each other's memory.
    `quick_reduce`, `quick_most`: see `connect`.

    `rendezvous` is the path of a file that does not exist yet, in a folder that only this user can enter, the same for
    every rank (torch's TCPStore would listen on all networks), or a store that ranks on several machines share, which
    the caller keeps; a mesh of one rank needs none. CPU ranks communicate over gloo, listening on `address` alone, CUDA
    ranks over NCCL. Raises ConfigError for a rank or rendezvous that cannot work, and
    torch's DistStoreError when a rank does not join in time.
    """
    if not 0 <= rank < ranks.world:
        raise ConfigError(f"rank must be in [0, {ranks.world}), got {rank}")
    if ranks.world == 1:
        return Mesh()
    if not rendezvous:
        raise ConfigError(f"{ranks.world} ranks need a rendezvous: the path of a file")
    if isinstance(rendezvous, str) and not Path(rendezvous).parent.is_dir():
        raise ConfigError(f"rendezvous {rendezvous!r}: its folder does not exist")
    store = dist.FileStore(rendezvous, ranks.world) if isinstance(rendezvous, str) else rendezvous
    device = torch.device(device)
    if progress is not None:
        progress.enter("rendezvous")
    if device.type == "cuda":
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=ranks.world, timeout=timeout, device_id=device
        )
        groups = _groups(rank, ranks, partial(_nccl_group, no_peers, quick_reduce, quick_most), progress)
        return Mesh(**groups, close=dist.destroy_process_group)
    # Without torch's default group there is nothing to clean up but `joined`, and it listens on `address` only.
    joined: list[Any] = []

    def join(name: str, members: list[int]) -> Group:
        if rank not in members:
            return Group()
        prefix = dist.PrefixStore(f"{name}-{members[0]}", store)
        joined.append(_gloo(prefix, members.index(rank), len(members), timeout, address))
        return _gloo_group(joined[-1])

    groups = _groups(rank, ranks, join, progress)

    def close() -> None:
        for processes in joined:
            processes.shutdown()

    return Mesh(**groups, close=close)


def _groups(
    rank: int, ranks: Ranks, join: Callable[[str, list[int]], Group], progress: Progress | None
) -> dict[str, Any]:
    """Return the groups of `rank` that have other members. Every rank calls `join` for all groups, its own or not, in
    one order; groups of the same ranks are one, but `back`. `progress` has counted that the rank joins."""
    made: dict[tuple[int, ...], Group] = {}
    found: dict[str, Any] = {}
    for name, kind in GROUPS.items():
        for other in range(ranks.world):
            members = tuple(ranks.members(kind, other))
            if len(members) > 1 and other == members[0] and (name == "back" or members not in made):
                made[members] = join(name, list(members))
        own = tuple(ranks.members(kind, rank))
        if len(own) > 1:
            found[name] = made[own] if progress is None else _counted(made[own], name, progress)
    if progress is not None:
        progress.leave()
    return found


def _counted(group: Group, name: str, progress: Progress) -> Group:
    """Return a group whose collectives count themselves."""

    def counted(verb: str) -> Callable[..., Any]:
        call, label = getattr(group, verb), f"{name}.{verb}"

        def counting(*arguments: Any) -> Any:
            progress.enter(label)
            result = call(*arguments)
            progress.leave()
            return result

        return counting

    return replace(
        group,
        all_reduce=counted("all_reduce"),
        all_gather=counted("all_gather"),
        gather_rows=counted("gather_rows"),
        scatter_rows=counted("scatter_rows"),
        send=counted("send"),
        receive=counted("receive"),
    )


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _gloo_group(processes: Any) -> Group:
    def receive(tensor: Tensor, other: int) -> Tensor:
        processes.recv([tensor], other, 0).wait()
        return tensor

    return _group(
        processes.rank(),
        processes.size(),
        lambda tensor: processes.allreduce([tensor]).wait(),
        lambda gathered, tensor: processes._allgather_base(gathered, tensor).wait(),
        lambda own, tensor: processes._reduce_scatter_base(own, tensor).wait(),
        lambda tensor, other: processes.send([tensor], other, 0).wait,
        receive,
    )


def _nccl_group(no_peers: str, quick_reduce: str, quick_most: int, name: str, members: list[int]) -> Group:
    whole = len(members) == dist.get_world_size() and name != "back"
    group: Any = None if whole else dist.new_group(members, group_desc=name)  # None: the one that all have joined

    def send(tensor: Tensor, other: int) -> Callable[[], Any]:
        work = dist.isend(tensor, members[other], group)
        assert work is not None
        return work.wait

    def receive(tensor: Tensor, other: int) -> Tensor:
        work = dist.irecv(tensor, members[other], group)
        assert work is not None
        work.wait()  # the current stream waits, not the host
        return tensor

    made = _group(
        members.index(dist.get_rank()) if dist.get_rank() in members else 0,
        len(members),
        partial(dist.all_reduce, group=group),
        partial(dist.all_gather_into_tensor, group=group),
        partial(dist.reduce_scatter_tensor, group=group),
        send,
        receive,
    )
    if name not in ("tp", "dp") or dist.get_rank() not in members:
        return made
    if no_peers:
        return replace(made, no_peers=no_peers)
    processes = dist.group.WORLD if group is None else group
    device = torch.device("cuda", torch.cuda.current_device())
    found, problem = connect(
        device, made.rank, made.size, processes, made.all_gather, made.all_reduce,
        quick_reduce if name == "tp" else "NONE", quick_most,
    )  # fmt: skip
    if found is None:
        return replace(made, no_peers=problem)

    def all_reduce(tensor: Tensor) -> Tensor:
        if bits := found.bits_in_two(tensor):
            return own.all_reduce_in_two(tensor, found, bits)
        return own.all_reduce(tensor, found) if found.take(tensor) else made.all_reduce(tensor)

    def gather_rows(tensor: Tensor) -> Tensor:
        return exchange.gather_rows(tensor, found) if found.fit(tensor) else made.gather_rows(tensor)

    def scatter_rows(tensor: Tensor) -> Tensor:
        fits = found.fit(tensor, made.size)
        return exchange.scatter_rows(tensor, found) if fits else made.scatter_rows(tensor)

    return replace(made, all_reduce=all_reduce, gather_rows=gather_rows, scatter_rows=scatter_rows, peers=found)


def _group(
    rank: int,
    size: int,
    sum_in_place: Callable[[Tensor], Any],
    gather_into: Callable[[Tensor, Tensor], Any],
    sum_rows_into: Callable[[Tensor, Tensor], Any],
    send: Callable[[Tensor, int], Callable[[], Any]],
    receive: Callable[[Tensor, int], Tensor],
) -> Group:
    def all_reduce(tensor: Tensor) -> Tensor:
        sum_in_place(tensor)
        return tensor

    def gather_rows(tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
        gather_into(gathered, tensor.contiguous())
        return gathered

    def all_gather(tensor: Tensor) -> Tensor:
        return gather_rows(tensor).unflatten(0, (size, -1)).movedim(0, -2).flatten(-2)

    def scatter_rows(tensor: Tensor) -> Tensor:
        own = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        sum_rows_into(own, tensor.contiguous())
        return own

    return Group(rank, size, all_reduce, all_gather, gather_rows, scatter_rows, send, receive)
