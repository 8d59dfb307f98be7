"""A device's memory: what is free, what this process holds of it, and which errors mean that there is too little."""

from __future__ import annotations

from typing import Protocol

import torch

SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """The allocator's own error, or what libraries say that found no room beside it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class DeviceMemory(Protocol):
    """All in bytes. Tests bring one of their own."""

    name: str
    total: int

    def free(self) -> int:
        """What nobody holds, this process or another."""
        ...

    def reserved(self) -> int:
        """What this process's allocator holds, in use or cached."""
        ...

    def allocated(self) -> int:
        """What this process's tensors take."""
        ...

    def peak(self) -> int:
        """The most that `allocated` was since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def give_back(self) -> None:
        """Return what is cached to the device, once what runs has ended."""
        ...

    def drop_workspaces(self) -> None:
        """Of the vendor's matrix library, which keeps one for every thread that has ever called it. No graph may have
        been captured: it would go on to use them."""
        ...


class GpuMemory:
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

    def give_back(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def drop_workspaces(self) -> None:
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()


class HostMemory:
    """A CPU's: everybody's, and nothing in it is profiled."""

    name = "CPU"

    def __init__(self) -> None:
        self.total = _meminfo("MemTotal")

    def free(self) -> int:
        return _meminfo("MemAvailable")

    def reserved(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def drop_workspaces(self) -> None:
        pass


def device_memory(device: torch.device) -> DeviceMemory:
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


def _meminfo(wanted: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            name, value = line.split(":")
            if name == wanted:
                return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {wanted}")
