"""The one place that imports Triton. Where it is missing, stand-ins let kernel files load for their references."""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Missing:
        """Enough of `triton` and `tl` to define kernels that will never be launched."""

        constexpr = int

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else lambda decorated: decorated

    triton = tl = _Missing()

DEVICE_FAMILY = "hip" if torch.version.hip else "cuda"
"""Vendor of the GPUs that this build of torch drives: it keys the tables of kernel configurations."""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


__all__ = ["DEVICE_FAMILY", "HAS_TRITON", "next_power_of_2", "tl", "triton"]
