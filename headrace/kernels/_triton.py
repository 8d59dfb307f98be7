"""Imports Triton for all kernels. Where it is missing, stand-ins let their files be imported for the references."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch

try:
    import triton
    import triton.language as tl
    from triton.errors import TritonError

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class TritonError(Exception):
        """Is raised by a launch that needs more shared memory or registers than the GPU has."""

    class _Missing:
        """Stands for `triton` and `tl` where kernels are defined that will never be launched."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda decorated: decorated

    triton = tl = cast(Any, _Missing())

DEVICE_FAMILY = "hip" if torch.version.hip else "cuda"
"""the vendor of the GPUs that this build of torch drives; tables of kernel configurations are keyed by it"""


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Let the next kernel start beside this one, then wait until all kernels before this one have written.

    It is the first line of every kernel launched with `overlap()`, or the first after loads of what no kernel writes
    (weights). Every program must call it: one that returns before waiting tells the next kernel, wrongly, that all
    before is done.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_before_next(OVERLAP: tl.constexpr):
    """Do the same in the other order: wait, then let the next kernel start. The next kernel may then read what kernels
    before this one wrote, past its processor's own cache, before it waits for this one."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_inputs(offset, DIVISOR: tl.constexpr, OVERLAP: tl.constexpr):
    """Return `offset`, a multiple of DIVISOR, after a wait like that of `wait_for_inputs`. Loads at addresses computed
    from the result come after the wait, while other loads of the same loop (of weights) do not wait. The kernel must
    have let the next one start before, and must wait once more behind the loop."""
    if OVERLAP:
        waited = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [offset], dtype=tl.int32, is_pure=True, pack=1
        )  # a load that depends on it cannot be moved before it
        offset = tl.multiple_of(offset + waited, DIVISOR)
    return offset


@triton.jit
def into_l2(pointers):
    """Ask an NVIDIA GPU to bring the lines (128 bytes) at `pointers` into its L2 cache, and wait for nothing."""
    addresses = pointers.to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], tl.int32, False, 1)


_OVERLAP, _NO_OVERLAP = {"OVERLAP": True, "launch_pdl": True}, {"OVERLAP": False}


@lru_cache(maxsize=1)
def overlap() -> dict[str, bool]:
    """Return the launch options of kernels that call `wait_for_inputs`: programmatic dependent launch, where there is.
    NVIDIA GPUs of compute capability 9.0 and above have it: a kernel is then on the chip when the one before it
    ends."""
    if triton.knobs.runtime.interpret:
        return _NO_OVERLAP
    target = triton.runtime.driver.active.get_current_target()
    return _OVERLAP if target.backend == "cuda" and target.arch >= 90 else _NO_OVERLAP


@lru_cache(maxsize=1)
def pairs_in_registers() -> bool:
    """Tell whether kernels may use the instructions of NVIDIA's GPUs (9.0 and above) for two 16-bit numbers at once."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


@lru_cache(maxsize=16)
def fp8_dtype(device: torch.device) -> torch.dtype:
    """Return the e4m3 type that `device` computes with: gfx942 has one without negative zero, which ends at 240."""
    if device.type == "cuda" and torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        if name.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
