"""Measures and frees a device's memory, and tells which errors mean that there is too little of it."""

from __future__ import annotations

from typing import Protocol

import torch

OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` comes from torch's allocator, or from a library that could not allocate beside it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_MESSAGES)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


class DeviceMemory(Protocol):
    """Reports a device's memory in bytes. What a device has no allocator of torch's for is 0, and freeing it does
    nothing."""

    name: str
    total: int

    def free(self) -> int:
        """Return what neither this process nor another holds."""
        ...

    def reserved(self) -> int:
        """Return what this process's allocator holds, in use or cached."""
        return 0

    def allocated(self) -> int:
        """Return what this process's tensors take."""
        return 0

    def peak(self) -> int:
        """Return the most that `allocated` was since `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Begin to measure a new `peak`."""
        return

    def empty_cache(self) -> None:
        """Wait for the device, then give cached memory back to it."""
        return

    def drop_workspaces(self) -> None:
        """Free the matrix library's workspaces, one for each thread that ever called it. No graph may have been
        captured: a graph goes on using the workspace of its capture."""
        return


class GpuMemory(DeviceMemory):
    """Reports a GPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = torch.cuda.get_device_name(device)
        self.total = torch.cuda.get_device_properties(device).total_memory

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def drop_workspaces(self) -> None:
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()


class HostMemory(DeviceMemory):
    """Reports a CPU's memory, which all processes share and which is not profiled."""

    name = "CPU"

    def __init__(self) -> None:
        self.total = _meminfo("MemTotal")

    def free(self) -> int:
        return _meminfo("MemAvailable")


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of `device`."""
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


def _meminfo(wanted: str) -> int:
    """Return an entry of /proc/meminfo in bytes."""
    with open("/proc/meminfo") as file:
        for line in file:
            name, value = line.split(":")
            if name == wanted:
                return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {wanted}")
