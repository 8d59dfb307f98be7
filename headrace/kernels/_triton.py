"""The one place that imports Triton. Where it is missing, stand-ins let kernel files load for their references."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.errors import TritonError

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class TritonError(Exception):  # type: ignore[no-redef]
        """What a launch raises that the GPU has not enough shared memory or registers for."""

    class _Missing:
        """Enough of `triton` and `tl` to define kernels that will never be launched."""

        constexpr = int

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda decorated: decorated

    triton = tl = _Missing()

DEVICE_FAMILY = "hip" if torch.version.hip else "cuda"
"""Vendor of the GPUs that this build of torch drives: it keys the tables of kernel configurations."""


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first line of every kernel launched with `overlap()`, or the first after loads of constants (weights): lets
    the next kernel start beside this one, then waits until all before it has been written. A program that returns
    without waiting would let the next kernel believe that everything before this one is done."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_before_next(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """`wait_for_inputs` the other way round: the next kernel starts when all before this one has been written, and may
    read that, past its processor's own cache, before it waits for what this one writes."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_inputs(offset, DIVISOR: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """`offset`, a multiple of DIVISOR, once everything before this kernel has been written: loads at addresses made of
    it have waited, and others in the same loop, of constants, are on their way meanwhile. For a kernel that has let
    the next one start; behind the loop it waits once more, for what it loads there."""
    if OVERLAP:
        waited = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [offset], dtype=tl.int32, is_pure=True, pack=1
        )  # a load that depends on it cannot be moved before it
        offset = tl.multiple_of(offset + waited, DIVISOR)
    return offset


_OVERLAP, _NO_OVERLAP = {"OVERLAP": True, "launch_pdl": True}, {"OVERLAP": False}


@lru_cache(maxsize=1)
def overlap() -> dict[str, bool]:
    """Launch options of kernels that begin with `wait_for_inputs`: programmatic dependent launch where the GPU has it
    (NVIDIA, compute capability 9.0 and above), so that a kernel is on the chip when the one before it ends."""
    if triton.knobs.runtime.interpret:
        return _NO_OVERLAP
    target = triton.runtime.driver.active.get_current_target()
    return _OVERLAP if target.backend == "cuda" and target.arch >= 90 else _NO_OVERLAP


@lru_cache(maxsize=16)
def fp8_dtype(device: torch.device) -> torch.dtype:
    """The e4m3 that `device` computes with: on gfx942 the one without negative zero, whose largest number is 240."""
    if device.type == "cuda" and torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        if name.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


__all__ = [
    "DEVICE_FAMILY", "HAS_TRITON", "after_inputs", "fp8_dtype", "next_power_of_2", "overlap", "tl", "triton",
    "wait_before_next", "wait_for_inputs",
]  # fmt: skip
