"""GPTQ does what its paper says, and no worse than rounding each weight by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.convert.gptq import DAMPING, factor_of, round_by_gptq
from headrace.convert.rounding import INT4, MXFP4, Grid, Rounded, round_to_nearest, spread


def correlated(inputs: int, tokens: int = 400) -> Tensor:
    """Inputs of few causes each, of unlike sizes."""
    generator = torch.Generator().manual_seed(5)
    causes = torch.randn(tokens, max(2, inputs // 4), generator=generator)
    mixed = causes @ torch.randn(causes.shape[1], inputs, generator=generator)
    return (mixed + 0.3 * torch.randn(tokens, inputs, generator=generator)) * torch.logspace(-1, 1, inputs)


def weight_of(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(6))


def values(rounded: Rounded, rows: int, columns: int, grid: Grid) -> Tensor:
    outputs, inputs = rounded.codes.shape
    return grid.values(rounded.codes) * spread(rounded.scales, rows, columns, range(outputs), inputs)


def one_by_one(weight: Tensor, squares: Tensor, steps: Tensor, order: list[int]) -> Tensor:
    """Round as the paper's equations say, in float64: the inverse of what is left is computed anew at each column."""
    left = weight.double().clone()
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(squares.double()[rest][:, rest])
        step = steps[:, column].double()
        rounded = (left[:, column] / step).round().clamp(-8, 7) * step
        error = (left[:, column] - rounded) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
        left[:, column] = rounded
    return left


@pytest.mark.parametrize("act_order", [False, True])
def test_it_rounds_as_the_equations_say(act_order: bool) -> None:
    weight, x = weight_of(6, 24), correlated(24)
    squares = x.T @ x
    factor = factor_of(squares, act_order)
    assert factor is not None
    found = round_by_gptq(weight, factor, 1, 8, INT4)
    damped = squares + DAMPING[0] * squares.diagonal().mean() * torch.eye(24)
    steps = spread(found.scales, 1, 8, range(6), 24)
    assert factor.order.tolist() == (
        squares.diagonal().argsort(descending=True).tolist() if act_order else [*range(24)]
    )
    torch.testing.assert_close(
        values(found, 1, 8, INT4).double(), one_by_one(weight, damped, steps, factor.order.tolist())
    )
    assert torch.equal(found.scales, round_to_nearest(weight, 1, 8, INT4).scales)


@pytest.mark.parametrize(("grid", "columns"), [(INT4, 64), (MXFP4, 32)])
def test_outputs_change_less_than_by_rounding_to_nearest(grid: Grid, columns: int) -> None:
    """Over more columns than one block, and a last one that is smaller."""
    weight, x = weight_of(16, 320), correlated(320)
    factor = factor_of(x.T @ x)
    assert factor is not None
    ours = values(round_by_gptq(weight, factor, 1, columns, grid), 1, columns, grid)
    nearest = values(round_to_nearest(weight, 1, columns, grid), 1, columns, grid)
    assert (x @ (ours - weight).T).norm() < 0.5 * (x @ (nearest - weight).T).norm()


def test_inputs_without_correlation_leave_nothing_to_make_up_for() -> None:
    weight = weight_of(8, 64)
    factor = factor_of(torch.diag(torch.linspace(1, 2, 64)))
    assert factor is not None
    found, nearest = round_by_gptq(weight, factor, 1, 32, INT4), round_to_nearest(weight, 1, 32, INT4)
    assert torch.equal(found.codes, nearest.codes)
    torch.testing.assert_close(found.lost, nearest.lost)
    torch.testing.assert_close(found.total, nearest.total)


def test_inputs_that_are_always_zero_are_rounded_by_themselves() -> None:
    weight, x = weight_of(8, 64), correlated(64)
    x[:, 10:20] = 0
    factor = factor_of(x.T @ x)
    assert factor is not None
    found = round_by_gptq(weight, factor, 1, 64, INT4)
    assert torch.equal(found.codes[:, 10:20], round_to_nearest(weight, 1, 64, INT4).codes[:, 10:20])


def test_what_no_damping_makes_positive_definite_is_told() -> None:
    indefinite = torch.eye(8)
    indefinite[0, 1] = indefinite[1, 0] = 5.0
    assert factor_of(indefinite) is None
    assert factor_of(torch.full((8, 8), torch.nan)) is None
    singular = torch.ones(8, 8)
    assert factor_of(singular) is not None
