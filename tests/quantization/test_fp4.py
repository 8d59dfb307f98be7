"""MXFP4 of every spelling, bit for bit as transformers widens it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.errors import CheckpointError, ConfigError
from headrace.kernels.coded import E2M1
from headrace.quantization.formats import FORMATS
from headrace.quantization.packed import floats
from headrace.quantization.scheme import LinearSpec, Part, Weights
from headrace.quantization.spellings import FLOATS_4

CPU = torch.device("cpu")
EVERY = slice(0, 37), slice(0, 160)


def spec_of(rows: slice, columns: slice, dtype: torch.dtype = torch.float32) -> LinearSpec:
    outputs, inputs = rows.stop - rows.start, columns.stop - columns.start
    return LinearSpec(inputs, outputs, (Part("one", (37, 160), rows, columns, 0),), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [names for kind, names in FLOATS_4 if kind == "mxfp4"])
def test_random_bytes_are_widened_as_transformers_does(names: str, dtype: torch.dtype) -> None:
    """Every scale but 255, which is NaN and refused as it is loaded; and a rank's slice of both dimensions."""
    blocks = torch.randint(0, 256, (37, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (37, 5), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T
    layout = floats(FORMATS["mxfp4"], "mxfp4", names).layout
    for rows, columns in (EVERY, (slice(8, 30), slice(32, 128))):
        spec = spec_of(rows, columns, dtype)
        weights = layout.create_weights(spec, CPU)
        spelling = FLOATS_4["mxfp4", names]
        given = {spelling.codes: blocks if spelling.by_group else blocks.flatten(1), spelling.scales: scales}
        for _, name, slot in layout.slots(spec, weights):
            if name in spelling.unused:
                assert slot.optional
                continue
            assert slot.shape == given[name].shape
            slot.put(given[name][slot.source])
        found = layout.dequantize(spec, weights)["weight"]
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), expected[rows, columns].contiguous().view(torch.uint8))


@pytest.mark.parametrize("columns", [slice(0, 80), slice(16, 48)])
def test_a_rank_holds_whole_groups(columns: slice) -> None:
    with pytest.raises(ConfigError, match=r"groups of 32 inputs do not divide .* accepted: a tensor_parallel_size"):
        floats(FORMATS["mxfp4"], "mxfp4", "quark").layout.create_weights(spec_of(EVERY[0], columns), CPU)


def smoothed_parts(smoothing: list[Tensor], experts: tuple[int, ...] = ()) -> tuple[Any, LinearSpec, Weights, Weights]:
    """A linear of two parts in NVFP4 with ModelOpt's names, of random bytes, whose parts have these `pre_quant_scale`;
    and the tensors of the first part, by their names in the checkpoint."""
    every = slice(0, 64)
    parts = tuple(Part(name, (24, 64), slice(0, 24), every, 24 * i) for i, name in enumerate(("gate", "up")))
    spec, layout = LinearSpec(64, 48, parts, torch.float32), floats(FORMATS["nvfp4"], "nvfp4", "modelopt-awq").layout
    weights, given = layout.create_weights(spec, CPU, experts), {}
    for expert in range(experts[0] if experts else 1):
        own = {name: tensor[expert] if experts else tensor for name, tensor in weights.items()}
        for part, name, slot in layout.slots(spec, own):
            if name == "input_scale":
                continue
            tensor = {
                "weight": torch.randint(0, 256, (24, 32), dtype=torch.uint8),
                "weight_scale": (torch.rand(24, 4) + 0.1).to(torch.float8_e4m3fn),
                "weight_scale_2": torch.rand(1),
                "pre_quant_scale": smoothing[parts.index(part)],
            }[name]
            assert tensor.shape == slot.shape
            slot.put(tensor[slot.source])
            given |= {name: tensor} if part == parts[0] else {}
    return layout, spec, weights, given


def test_awqs_numbers_multiply_the_inputs() -> None:
    one = torch.rand(64) + 0.5
    layout, spec, weights, given = smoothed_parts([one, one])
    pairs = given["weight"]
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).long()
    plain = torch.tensor(E2M1)[codes] * given["weight_scale"].float().repeat_interleave(16, 1) * given["weight_scale_2"]
    wide = layout.dequantize(spec, weights)["weight"]
    torch.testing.assert_close(wide[:24], plain * one)
    assert not layout.why_widened(spec, weights)
    torch.testing.assert_close(layout.coded(spec, weights).dequantize(torch.float32) * one, wide)


@pytest.mark.parametrize("experts", [(), (3,)])
def test_parts_and_experts_with_numbers_of_their_own_are_widened(experts: tuple[int, ...]) -> None:
    layout, spec, weights, _ = smoothed_parts([torch.rand(64) + 0.5, torch.rand(64) + 0.5], experts)
    assert "in each part, or in each expert" in layout.why_widened(spec, weights)
    assert layout.dequantize(spec, weights)["weight"].shape == (*experts, 48, 64)
    layout, spec, weights, _ = smoothed_parts([torch.ones(64)] * 2, experts)
    assert not layout.why_widened(spec, weights)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_awqs_numbers_are_positive(bad: float) -> None:
    with pytest.raises(CheckpointError, match=r"pre_quant_scale .* accepted: positive numbers"):
        smoothed_parts([torch.ones(64), torch.tensor([bad, *[1.0] * 63])])
