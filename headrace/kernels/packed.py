"""Defines `PackedWeight`: a weight of 4 or 8 bits whose neighbouring inputs share a scale, in the one form that kernels
read, whichever way a checkpoint packs it.

Such a weight meets activations of 16 or 32 bits: kernels widen it on the way to the matrix units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Values = Literal["integer", "e2m1", "e4m3"]
"""What a code stands for. integer: code - zero. e2m1: a float with two bits of exponent and one of mantissa. e4m3: a
float of 8 bits, torch's float8_e4m3fn, which only experts have here."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""the value of each code of e2m1 (OCP Microscaling Formats, 5.3.3)"""
BLOCK = 32
"""Inputs whose 4-bit codes are packed together: byte j of a block's 16 holds input j in its lower four bits and input
j + 16 in its upper ones, so that kernels read activations in runs of 16."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """Holds a weight [out, in] or, with one more dimension in front, those of experts.

    Its value at (row, column) is value(code) * scale of the group that the column is in * the row's factor.
    """

    codes: Tensor
    """[..., out, in rounded up to whole BLOCKs * bits / 8] uint8; codes beyond `in` stand for 0"""
    scales: Tensor
    """[..., out, groups]: a floating type, or float8_e4m3fn, or uint8, which is e8m0: 2 ** (scale - 127)"""
    zeros: Tensor | None
    """[..., out, groups] uint8; None: 2 ** (bits - 1) for integers, none for floats"""
    factors: Tensor | None
    """[..., out] fp32; None: 1"""
    bits: int
    """of a code: 4 or 8"""
    values: Values
    group_size: int
    """inputs that share a scale: a multiple of 16 or, with one group, all inputs"""
    in_features: int
    order: Tensor | None = None
    """[in] int64: the column of the checkpoint's weight that column i here is; None: the same. Activations are to be
    taken in that order."""

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it holds on the device."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def plain_scales(self) -> Tensor:
        """Return the scales as a kernel takes them: those of 8 bits as bytes."""
        return self.scales.view(torch.uint8) if self.scales.itemsize == 1 else self.scales

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by the names of their fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def expert(self, index: int) -> PackedWeight:
        """Return one expert's weight [out, in], a view."""
        own: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        return replace(self, **own)

    def clone(self) -> PackedWeight:
        """Return the same weight in memory of its own."""
        changes: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return replace(self, **changes)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., out, in] in `dtype`, computed in fp32, its columns in the checkpoint's order."""
        codes = unpack_codes(self.codes, self.bits)[..., : self.in_features]
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
        return of_groups.repeat_interleave(self.group_size, -1)[..., : self.in_features]


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    bits: int,
    values: Values = "integer",
    group_size: int,
    order: Tensor | None = None,
) -> PackedWeight:
    """Return the weight with `codes` [..., out, in] uint8, one a byte, and the rest as PackedWeight describes it."""
    return PackedWeight(
        pack_codes(codes, bits, values), scales, zeros, factors, bits, values, group_size, codes.shape[-1], order
    )


def pack_codes(codes: Tensor, bits: int, values: Values = "integer") -> Tensor:
    """Return codes [..., in] uint8, one a byte, as PackedWeight holds them."""
    spare = -codes.shape[-1] % BLOCK
    if spare:
        codes = torch.nn.functional.pad(codes, (0, spare), value=1 << (bits - 1) if values == "integer" else 0)
    if bits == 8:
        return codes.contiguous()
    lower, upper = codes.unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return (lower | upper << 4).flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes, one a byte, given what `pack_codes` returned."""
    if bits == 8:
        return packed
    halves = packed.unflatten(-1, (-1, BLOCK // 2))
    return torch.stack((halves & 15, halves >> 4), -2).flatten(-3)


def e8m0_to_float(scales: Tensor) -> Tensor:
    """Return 2 ** (scales - 127) in fp32; 255 is NaN (OCP Microscaling Formats, 5.4.1)."""
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return powers.masked_fill_(scales == 255, torch.nan)
