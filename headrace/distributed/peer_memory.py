"""Gives the GPUs of a group buffers in each other's memory, for kernels that sum over them (kernels/peers.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.peers import EMPTY, Peers

MOST_SENT = 8 * 2**20
"""Bytes that a rank writes to all others together in one sum; a library sums larger messages in fewer."""


def connect(
    device: torch.device,
    rank: int,
    ranks: int,
    processes: Any,
    all_gather: Callable[[Tensor], Tensor],
    library: Callable[[Tensor], Tensor],
) -> tuple[Peers | None, str]:
    """Return the buffers of a group of `ranks` processes, each with a GPU, and why there are none. All ranks call it
    together, and get buffers together or not at all.

    `processes`: torch's group of them; `all_gather`: [1, n] on each rank -> [1, ranks * n] on all; `library`: sums over
    the ranks in place.
    """

    def agreed(problem: str) -> str:
        """Return this rank's problem, or that another has one, if any has."""
        count = int(all_gather(torch.tensor([[len(problem) > 0]], dtype=torch.int32, device=device)).sum())
        return problem or (f"{count} of {ranks} ranks cannot" if count else "")

    if problem := agreed(_obstacle(device, all_gather)):
        return None, problem
    room = MOST_SENT // (ranks - 1) // 64 * 64
    memory: Tensor | None = None
    try:
        memory, addresses = _shared(device, processes, room * ranks * 2, ranks)
        problem = "" if addresses[rank] == memory.data_ptr() else "its memory is not where its buffer begins"
    except (RuntimeError, ImportError, AttributeError) as error:  # torch calls this part of itself unfinished
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if problem := agreed(problem):
        return None, problem
    assert memory is not None
    return Peers(rank, torch.tensor(addresses, device=device), room, library, memory=memory), ""


def _obstacle(device: torch.device, all_gather: Callable[[Tensor], Tensor]) -> str:
    """Return why this GPU cannot reach the memory of the others."""
    numbers = all_gather(torch.tensor([[device.index]], dtype=torch.int32, device=device)).flatten().tolist()
    if DEVICE_FAMILY == "hip":
        return "it was never measured on AMD's GPUs"
    apart = [other for other in numbers if other != device.index]
    far = [other for other in apart if not torch.cuda.can_device_access_peer(device.index, other)]
    return f"GPU {device.index} does not reach the memory of GPU {far[0]}" if far else ""


def _shared(device: torch.device, processes: Any, size: int, ranks: int) -> tuple[Tensor, list[int]]:
    """Return `size` bytes of this GPU, all EMPTY, and the addresses at which it reaches those of each rank."""
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(size // 2, dtype=torch.int16, device=device).fill_(EMPTY)
    torch.cuda.synchronize(device)
    handle: Any = symmetric.rendezvous(memory, processes)
    buffers = [handle.get_buffer(other, memory.shape, memory.dtype) for other in range(ranks)]
    return memory, [buffer.data_ptr() for buffer in buffers]
