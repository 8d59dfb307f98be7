"""Random weights in codes of every kind, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.coded import CodedWeight

KINDS: dict[str, dict[str, Any]] = {
    "int4 zeros": {"bits": 4, "zeros": True, "group_size": 32},
    "int4 wide groups": {"bits": 4, "zeros": True, "group_size": 128},
    "int4 symmetric": {"bits": 4, "group_size": 16},
    "int4 per output": {"bits": 4, "group_size": 0},
    "int4 ordered": {"bits": 4, "zeros": True, "group_size": 32, "order": True},
    "int8 groups": {"bits": 8, "zeros": True, "group_size": 64},
    "int8 per output": {"bits": 8, "group_size": 0},
    "mxfp4": {"bits": 4, "values": "e2m1", "scales": torch.uint8, "group_size": 32},
    "nvfp4": {"bits": 4, "values": "e2m1", "scales": torch.float8_e4m3fn, "factors": True, "group_size": 16},
}
"""name -> what `random_coded` takes"""
OF_EXPERTS: dict[str, dict[str, Any]] = {
    **{name: kind for name, kind in KINDS.items() if "order" not in kind},
    "fp8 blocks": {"bits": 8, "values": "e4m3", "scales": torch.float32, "group_size": 32},
}
"""those that experts may have"""


def random_coded(
    *shape: int,
    bits: int = 4,
    values: Any = "integer",
    group_size: int = 32,
    zeros: bool = False,
    scales: torch.dtype = torch.float16,
    factors: bool = False,
    order: bool = False,
    device: str | torch.device = "cpu",
) -> CodedWeight:
    """Return a weight of `shape` [..., out, in] whose elements are of about 0.05; group_size 0: one group."""
    size = shape[-1]
    of_groups = (*shape[:-1], -(-size // (group_size or size)))
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, device=device)
    spread = 3.0 if values == "e2m1" else 0.3 * (1 << bits)
    if values == "e4m3":
        spread = 100.0
        codes = (torch.randn(shape, device=device) * spread).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    wide = (torch.rand(of_groups, device=device) + 0.5) * 0.05 / spread
    rows: Tensor | None = None
    if factors:
        rows = torch.rand(shape[:-1], device=device) * 0.01 + 0.005
        wide = wide / rows[..., None]
    if scales == torch.uint8:
        held = (wide.log2().round() + 127).to(torch.uint8)
    else:
        held = wide.to(scales)
    if values == "integer":  # as AutoRound has them
        held[..., ::2] *= -1
    lowest = torch.randint(0, 1 << bits, of_groups, dtype=torch.uint8, device=device) if zeros else None
    permuted = torch.randperm(size, device=device) if order else None
    return CodedWeight(
        codes, held, lowest, rows, bits=bits, values=values, group_size=group_size or size, order=permuted
    )  # fmt: skip
