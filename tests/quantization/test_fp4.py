"""MXFP4 of every spelling, bit for bit as transformers widens it."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.errors import ConfigError
from headrace.quantization.formats import FORMATS
from headrace.quantization.fp4 import AT_ONCE, MX_SPELLINGS, mxfp4, repack_pairs
from headrace.quantization.scheme import LinearSpec, Part

CPU = torch.device("cpu")
EVERY = slice(0, 37), slice(0, 160)


def spec_of(rows: slice, columns: slice, dtype: torch.dtype = torch.float32) -> LinearSpec:
    outputs, inputs = rows.stop - rows.start, columns.stop - columns.start
    return LinearSpec(inputs, outputs, (Part("one", (37, 160), rows, columns, 0),), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", MX_SPELLINGS)
def test_random_bytes_are_widened_as_transformers_does(names: str, dtype: torch.dtype) -> None:
    """Every scale but 255, which is NaN and refused as it is loaded; and a rank's slice of both dimensions."""
    blocks = torch.randint(0, 256, (37, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (37, 5), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T
    layout = mxfp4(FORMATS["mxfp4"], names).layout
    for rows, columns in (EVERY, (slice(8, 30), slice(32, 128))):
        spec = spec_of(rows, columns, dtype)
        weights = layout.create_weights(spec, CPU)
        spelling = MX_SPELLINGS[names]
        given = {spelling.codes: blocks if spelling.in_groups else blocks.flatten(1), spelling.scales: scales}
        for _, name, slot in layout.slots(spec, weights):
            if name == spelling.unused:
                assert slot.optional
                continue
            assert slot.shape == given[name].shape
            slot.put(given[name][slot.source])
        found = layout.dequantize(spec, weights)["weight"]
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), expected[rows, columns].contiguous().view(torch.uint8))


def test_codes_are_repacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = torch.randint(0, 256, (3, 7, 32), dtype=torch.uint8)
    whole = repack_pairs(pairs)
    monkeypatch.setattr("headrace.quantization.fp4.AT_ONCE", 100)
    assert torch.equal(repack_pairs(pairs), whole)
    assert AT_ONCE > 100


@pytest.mark.parametrize("columns", [slice(0, 80), slice(16, 48)])
def test_a_rank_holds_whole_groups(columns: slice) -> None:
    with pytest.raises(ConfigError, match=r"one has .* in groups of 32; accepted: a multiple of 32"):
        mxfp4(FORMATS["mxfp4"], "quark").layout.create_weights(spec_of(EVERY[0], columns), CPU)
