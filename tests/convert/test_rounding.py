"""Weights are rounded to the nearest numbers of a format, with the scales that are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.convert.rounding import AT_ONCE, FP8, INT4, INT8, MXFP4, Grid, round_to_nearest
from headrace.errors import CheckpointError
from headrace.kernels.coded import E2M1, e8m0_to_float
from headrace.quantization.spellings import pack_words, unpack_words

ALL_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
VALUES = {
    "fp8": (FP8, ALL_FP8[ALL_FP8.isfinite()]),
    "int8": (INT8, torch.arange(-128, 128).float()),
    "int4": (INT4, torch.arange(-8, 8).float()),
    "mxfp4": (MXFP4, torch.tensor(E2M1)),
}


def random(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))
    return (weight * torch.logspace(-3, 1, outputs)[:, None]).to(dtype)


def wide(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    scales = e8m0_to_float(scales) if scales.dtype == torch.uint8 else scales.float()
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(("rows", "columns"), [(30, 96), (1, 96), (1, 32), (16, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_other_number_of_the_format_is_nearer(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    grid, numbers = VALUES[name]
    weight = random(30, 96, dtype)
    rounded = round_to_nearest(weight, rows, columns, grid)
    assert rounded.scales.shape == (-(-30 // rows), -(-96 // columns))
    assert rounded.scales.dtype == (torch.uint8 if name == "mxfp4" else dtype)
    x = weight.float() / wide(rounded.scales, rows, columns, weight.shape)
    nearest = (x[..., None] - numbers).abs().amin(-1)
    assert torch.equal((grid.values(rounded.codes) - x).abs(), nearest)
    back = grid.values(rounded.codes) * wide(rounded.scales, rows, columns, weight.shape)
    assert float(rounded.lost) == pytest.approx(float((back - weight.float()).double().square().sum()), rel=1e-5)
    assert float(rounded.total) == pytest.approx(float(weight.double().square().sum()), rel=1e-5)
    steps = {"fp8": 0.07, "int8": 0.02, "int4": 0.35, "mxfp4": 0.35}[name]
    assert (back - weight.float()).norm() < steps * weight.float().norm(), "scales fit"


def test_half_way_goes_to_the_even_code() -> None:
    weight = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.0]])
    rounded = round_to_nearest(weight, 1, 12, MXFP4)
    assert rounded.scales.tolist() == [[127]]
    assert rounded.codes.tolist() == [[7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14, 0]]


@pytest.mark.parametrize(("largest", "exponent"), [(6.0, 0), (6.99, 0), (7.0, 1), (4.0, 0), (3.5, 0), (3.49, -1)])
def test_the_scale_of_mxfp4_lets_the_largest_be_near_6(largest: float, exponent: int) -> None:
    assert round_to_nearest(torch.tensor([[largest]]), 1, 1, MXFP4).scales.tolist() == [[127 + exponent]]


@pytest.mark.parametrize("grid", [FP8, INT8, INT4, MXFP4])
def test_zeros_stay_zeros(grid: Grid) -> None:
    rounded = round_to_nearest(torch.zeros(4, 32, dtype=torch.float16), 1, 32, grid)
    assert not grid.values(rounded.codes).any()
    assert rounded.scales.float().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_refused(bad: float) -> None:
    weight = random(4, 32)
    weight[2, 3] = bad
    with pytest.raises(CheckpointError, match="NaN or Inf"):
        round_to_nearest(weight, 4, 32, INT8)


def test_large_weights_are_rounded_in_parts_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(50, 64)
    whole = round_to_nearest(weight, 16, 32, FP8)
    assert weight.numel() < AT_ONCE
    monkeypatch.setattr("headrace.convert.rounding.AT_ONCE", 7 * 64)
    parts = round_to_nearest(weight, 16, 32, FP8)
    assert torch.equal(whole.codes.view(torch.uint8), parts.codes.view(torch.uint8))
    assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize(("bits", "word"), [(4, torch.int32), (4, torch.uint8), (8, torch.int32), (2, torch.int32)])
def test_words_are_taken_apart_as_they_were_put_together(bits: int, word: torch.dtype) -> None:
    codes = torch.randint(0, 1 << bits, (5, 22), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    found = unpack_words(pack_words(codes, bits, word), bits)
    assert torch.equal(found[:, :22], codes)
    assert not found[:, 22:].any()
