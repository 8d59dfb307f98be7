"""Rounds a weight to the nearest numbers of a format, block by block.

A scale is rounded to the type in which it is stored before anything is divided by it, so that what a reader multiplies
is what was rounded to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.errors import CheckpointError
from headrace.kernels.coded import E2M1, e8m0_to_float

AT_ONCE = 1 << 19
"""weights that are widened to float32 at a time"""
HALF_WAYS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""between neighbouring magnitudes of e2m1"""
FP8_MAX = 448.0
"""the largest number of e4m3"""


@dataclass(frozen=True)
class Grid:
    """Describes the numbers that a format has: how scales follow from blocks' largest weights, and what is stored."""

    scales: Callable[[Tensor, torch.dtype], Tensor]
    """(largest magnitude of each block in fp32, the weight's type) -> the scales as they are stored, never zero"""
    codes: Callable[[Tensor], Tensor]
    """weights in fp32, divided by their scales -> what is stored of each"""
    values: Callable[[Tensor], Tensor]
    """what is stored -> its value in fp32, to be multiplied by the scale"""
    code_dtype: torch.dtype


@dataclass(frozen=True)
class Rounded:
    """Holds what became of a weight [out, in]."""

    codes: Tensor
    """[out, in]"""
    scales: Tensor
    """[blocks of outputs, blocks of inputs]"""
    lost: Tensor
    """[] fp64: the sum of the squares of all weights' changes"""
    total: Tensor
    """[] fp64: the sum of their squares before"""


def round_to_nearest(weight: Tensor, rows: int, columns: int, grid: Grid) -> Rounded:
    """Round weight [out, in], of which blocks of `rows` outputs and `columns` inputs share a scale; the last may be
    smaller. Raises CheckpointError for NaN and Inf."""
    scales = block_scales(weight, rows, columns, grid)
    codes = torch.empty(weight.shape, dtype=grid.code_dtype, device=weight.device)
    lost, total = (torch.zeros((), dtype=torch.float64, device=weight.device) for _ in range(2))
    outputs, inputs = weight.shape
    step = max(1, AT_ONCE // inputs)
    for start in range(0, outputs, step):
        part = weight[start : start + step].float()
        own = spread(scales, rows, columns, range(start, start + len(part)), inputs)
        held = grid.codes(part / own)
        codes[start : start + step] = held
        lost += (grid.values(held) * own - part).square().sum(dtype=torch.float64)
        total += part.square().sum(dtype=torch.float64)
    return Rounded(codes, scales, lost, total)


def block_scales(weight: Tensor, rows: int, columns: int, grid: Grid) -> Tensor:
    """Return the scales of a weight's blocks as they are stored. Raises CheckpointError for NaN and Inf."""
    largest = _largest(weight, rows, columns)
    if not bool(largest.isfinite().all()):
        raise CheckpointError("holds NaN or Inf, which no format can be rounded to")
    return grid.scales(largest, weight.dtype)


def spread(scales: Tensor, rows: int, columns: int, outputs: range, inputs: int) -> Tensor:
    """Return what each weight of some outputs is divided by # [len(outputs), inputs] fp32."""
    factors = e8m0_to_float(scales) if scales.dtype == torch.uint8 else scales.float()
    row_blocks = torch.arange(outputs.start, outputs.stop, device=scales.device) // rows
    return factors[row_blocks].repeat_interleave(columns, 1)[:, :inputs]


def _largest(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each block in fp32 # [blocks of outputs, blocks of inputs]."""
    outputs, inputs = weight.shape
    of_rows = torch.empty(outputs, -(-inputs // columns), device=weight.device)
    step = max(1, AT_ONCE // inputs)
    for start in range(0, outputs, step):
        part = F.pad(weight[start : start + step].abs(), (0, -inputs % columns))
        of_rows[start : start + step] = part.unflatten(1, (-1, columns)).amax(-1)
    return F.pad(of_rows, (0, 0, 0, -outputs % rows)).unflatten(0, (-1, rows)).amax(1)


def _in_type(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales in `dtype`; those that are zero in it are 1, since all their weights round to zero."""
    stored = scales.to(dtype)
    return stored.masked_fill(stored == 0, 1.0)


def integers(bits: int) -> Grid:
    """Return the integers of `bits` bits around zero. A block's largest weight is half a step beyond the largest
    integer, as in compressed-tensors, which makes all steps finer."""
    highest = (1 << bits - 1) - 1
    return Grid(
        lambda largest, dtype: _in_type(largest / (highest + 0.5), dtype),
        lambda x: x.round_().clamp_(-highest - 1, highest).to(torch.int8),
        Tensor.float,
        torch.int8,
    )


def _e8m0(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return powers of two as their exponents + 127. A block's largest weight is below 7 times its scale, so that it is
    rounded to 6 or below, and above 3.5 times (OCP Microscaling Formats, 6.3, always scales it above 4)."""
    _, exponent = torch.frexp(largest * (8.0 / 7.0))  # largest * 8 / 7 is in [2 ** (exponent - 1), 2 ** exponent)
    scales = (exponent - 1 - 2 + 127).clamp(0, 254).to(torch.uint8)
    return scales.masked_fill(largest == 0, 127)


def _e2m1_codes(x: Tensor) -> Tensor:
    """Return the codes of the nearest numbers of e2m1; half-way to the one whose last bit is 0."""
    edges = torch.tensor(HALF_WAYS)
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros(()))  # upwards to an even code
    codes = torch.bucketize(x.abs(), edges.to(x.device), out_int32=True).to(torch.uint8)
    return codes | (x < 0).to(torch.uint8) << 3


def _e2m1_values(codes: Tensor) -> Tensor:
    return torch.tensor(E2M1, device=codes.device)[codes.int()]


FP8 = Grid(
    lambda largest, dtype: _in_type(largest / FP8_MAX, dtype),
    lambda x: x.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn),
    Tensor.float,
    torch.float8_e4m3fn,
)
INT8 = integers(8)
INT4 = integers(4)
MXFP4 = Grid(_e8m0, _e2m1_codes, _e2m1_values, torch.uint8)
