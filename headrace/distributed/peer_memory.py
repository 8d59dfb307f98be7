"""Gives the GPUs of a group buffers in each other's memory, for kernels that sum over them (kernels/peers.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.peers import EMPTY, QUICK_BITS, Peers, TwoShots

MOST_SENT = 8 * 2**20
"""Bytes that a rank writes to all others together in one shot; others sum larger messages in fewer."""
BUFFER = 64 * 2**20
"""bytes of a rank's memory that the others write to"""
FASTER_FROM: dict[tuple[str, int], dict[int, int]] = {
    ("NVIDIA H100 80GB HBM3", 2): {16: 32 * 2**20, 8: 8 * 2**20, 6: 2 * 2**20, 4: 2 * 2**20},
}
"""(GPU, ranks) -> bits in which numbers travel -> bytes of a share from which two shots were faster than one and than
NCCL, where they were, as `bench/many_gpus.py --part collectives` found"""


def connect(
    device: torch.device,
    rank: int,
    ranks: int,
    processes: Any,
    all_gather: Callable[[Tensor], Tensor],
    library: Callable[[Tensor], Tensor],
    quick_reduce: str = "NONE",
    quick_most: int = 2**31,
) -> tuple[Peers | None, str]:
    """Return the buffers of a group of `ranks` processes, each with a GPU, and why there are none. All ranks call it
    together, and get buffers together or not at all.

    `processes`: torch's group of them; `all_gather`: [1, n] on each rank -> [1, ranks * n] on all; `library`: sums over
    the ranks in place; `quick_reduce`: how the numbers of large sums travel, by the names of QUICK_BITS, of at most
    `quick_most` bytes.
    """

    def agreed(problem: str) -> str:
        """Return this rank's problem, or that another has one, if any has."""
        count = int(all_gather(torch.tensor([[len(problem) > 0]], dtype=torch.int32, device=device)).sum())
        return problem or (f"{count} of {ranks} ranks cannot" if count else "")

    if problem := agreed(_obstacle(device, all_gather)):
        return None, problem
    room = BUFFER // ranks // 2 // 64 * 64
    memory: Tensor | None = None
    try:
        memory, addresses = _shared(device, processes, room * ranks * 2, ranks)
        problem = "" if addresses[rank] == memory.data_ptr() else "its memory is not where its buffer begins"
    except (RuntimeError, ImportError, AttributeError) as error:  # torch calls this part of itself unfinished
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if problem := agreed(problem):
        return None, problem
    assert memory is not None
    most, two_shots = MOST_SENT // (ranks - 1), None
    if device.type == "cuda":
        two_shots = _two_shots(torch.cuda.get_device_name(device), ranks, quick_reduce, quick_most)
    return Peers(rank, torch.tensor(addresses, device=device), room, library, memory, most, two_shots), ""


def _two_shots(gpu: str, ranks: int, asked: str, most: int) -> TwoShots | None:
    """Return which shares are summed in two shots: where it was measured to be faster, in the bits that are asked for,
    or else in 16, which rounds nothing that NCCL does not."""
    known = FASTER_FROM.get((gpu, ranks), {})
    bits = QUICK_BITS.get(asked, 16)
    bits = bits if bits in known else 16
    return TwoShots(bits, known[bits], most) if bits in known else None


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
