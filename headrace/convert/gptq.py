"""Rounds a weight column by column, each column's error being made up for by those that are not rounded yet (GPTQ,
arXiv 2210.17323).

With inputs x, what a column's error does to the outputs follows from H = x.T @ x. The scales are those of rounding to
the nearest number, so that groups of columns stay neighbours in whatever order they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.convert.rounding import Grid, Rounded, block_scales, spread

BLOCK = 128
"""columns after which the errors so far reach all that follow"""
DAMPING = (0.01, 0.1, 1.0)
"""shares of the mean of H's diagonal that are added to it, each where H is not positive definite with the one before"""


@dataclass(frozen=True)
class Factor:
    """Holds what H says of rounding."""

    order: Tensor
    """[in] int64: the columns in the order in which they are rounded"""
    upper: Tensor
    """[in, in] fp32: the upper Cholesky factor of H's inverse, in that order"""


def factor_of(squares: Tensor, act_order: bool = True) -> Factor | None:
    """Return the factor of H [in, in] fp32; None where no damping makes it positive definite. `act_order`: columns with
    the largest inputs are rounded first, while most others can still make up for their errors."""
    diagonal = squares.diagonal()
    order = torch.arange(len(squares), device=squares.device)
    if act_order:
        order = diagonal.argsort(descending=True, stable=True)
    for share in DAMPING:
        damped = squares[order][:, order]
        own = damped.diagonal()
        own.masked_fill_(own == 0, float(own.mean()) or 1.0)  # inputs that are always zero, whose errors do nothing
        own += share * own.mean()
        lower, failed = torch.linalg.cholesky_ex(damped)
        if int(failed) == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if int(failed) == 0 and bool(upper.isfinite().all()):
                return Factor(order, upper)
    return None


def round_by_gptq(weight: Tensor, factor: Factor, rows: int, columns: int, grid: Grid) -> Rounded:
    """Round weight [out, in], of which blocks of `rows` outputs and `columns` inputs share a scale. Raises
    CheckpointError for NaN and Inf."""
    scales = block_scales(weight, rows, columns, grid)
    outputs, inputs = weight.shape
    steps = spread(scales, rows, columns, range(outputs), inputs)[:, factor.order]
    exact = weight.float()[:, factor.order]
    left = exact.clone()
    codes = torch.empty(weight.shape, dtype=grid.code_dtype, device=weight.device)
    places = factor.order.tolist()
    for start in range(0, inputs, BLOCK):
        block = slice(start, start + BLOCK)
        own, upper, step = left[:, block], factor.upper[block, block], steps[:, block]
        errors = torch.empty_like(own)
        for column in range(own.shape[1]):
            held = grid.codes(own[:, column] / step[:, column])
            codes[:, places[start + column]] = held
            errors[:, column] = (own[:, column] - grid.values(held) * step[:, column]) / upper[column, column]
            own[:, column:] -= errors[:, column, None] * upper[column, column:]  # which makes this one what it became
        left[:, block.stop :] -= errors @ factor.upper[block, block.stop :]
    lost, total = (one.square().sum(dtype=torch.float64) for one in (left - exact, exact))
    return Rounded(codes, scales, lost, total)
