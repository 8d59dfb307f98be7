"""Defines `CodedWeight`: a weight of 4 or 8 bits whose neighbouring inputs share a scale, in one form, whichever way a
checkpoint packs it. Kernels read it in tiles (tiled.py).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Values = Literal["integer", "e2m1", "e4m3"]
"""What a code stands for. integer: code - zero. e2m1: a float with two bits of exponent and one of mantissa. e4m3: a
float of 8 bits, torch's float8_e4m3fn, which only experts have here."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""the value of each code of e2m1 (OCP Microscaling Formats, 5.3.3)"""


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """Holds a weight [out, in] or, with one more dimension in front, those of experts.

    Its value at (row, column) is value(code) * scale of the group that the column is in * the row's factor.
    """

    codes: Tensor
    """[..., out, in] uint8, one a byte"""
    scales: Tensor
    """[..., out, groups]: a floating type, or float8_e4m3fn, or uint8, which is e8m0: 2 ** (scale - 127)"""
    zeros: Tensor | None = None
    """[..., out, groups] uint8; None: 2 ** (bits - 1) for integers, none for floats"""
    factors: Tensor | None = None
    """[..., out] fp32; None: 1"""
    _: KW_ONLY
    bits: int
    """of a code: 4 or 8"""
    values: Values = "integer"
    group_size: int
    """inputs that share a scale; of what is tiled a multiple of 16 or, with one group, all inputs"""
    order: Tensor | None = None
    """[in] int64: the column of the checkpoint's weight that column i here is; None: the same. Activations are to be
    taken in that order."""

    def expert(self, index: int) -> CodedWeight:
        """Return one expert's weight [out, in], a view."""
        own: dict[str, Any] = {name: one[index] for name, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **own)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., out, in] in `dtype`, computed in fp32, its columns in the checkpoint's order."""
        codes = self.codes
        if self.values == "e2m1":
            wide = torch.tensor(E2M1, device=codes.device)[codes.int()]
        elif self.values == "e4m3":
            wide = codes.view(torch.float8_e4m3fn).float()
        elif self.zeros is None:
            wide = codes.float() - (1 << (self.bits - 1))
        else:
            wide = codes.float() - self._of_columns(self.zeros.float())
        scales = e8m0_to_float(self.scales) if self.scales.dtype == torch.uint8 else self.scales.float()
        if self.factors is not None:
            scales = scales * self.factors[..., None]
        wide = (wide * self._of_columns(scales)).to(dtype)
        if self.order is None:
            return wide
        return torch.empty_like(wide).index_copy_(-1, self.order, wide)

    def _of_columns(self, of_groups: Tensor) -> Tensor:
        """Return [..., out, in] given [..., out, groups]."""
        return of_groups.repeat_interleave(self.group_size, -1)[..., : self.codes.shape[-1]]


def e8m0_to_float(scales: Tensor) -> Tensor:
    """Return 2 ** (scales - 127) in fp32; 255 is NaN (OCP Microscaling Formats, 5.4.1)."""
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return powers.masked_fill_(scales == 255, torch.nan)
