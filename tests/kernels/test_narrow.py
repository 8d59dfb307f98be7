"""What cuBLAS is given where it multiplies by blocks, which on a machine without a GPU a stand-in for it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import narrow
from headrace.kernels.fp8 import NarrowWeight, Rounding, quantize_reference

E4M3 = torch.float8_e4m3fn


def weight_of(outputs: int, inputs: int, rows: int = 128) -> NarrowWeight:
    values = torch.randn(outputs, inputs).to(E4M3)
    return NarrowWeight(values, torch.rand(-(-outputs // rows), inputs // 128) + 0.5, rows, 128)


def test_it_gets_whole_multiples_of_tokens_and_their_scales_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(144, 512), quantize_reference(torch.randn(259, 512), Rounding(E4M3, 128))
    seen: list[Any] = []

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        seen.extend((a.shape, scale_a.stride(), scale_b.stride()))
        wide = a.float() * scale_a.repeat_interleave(128, 1)
        of_outputs = scale_b.t().repeat_interleave(128, 0)[: b.shape[1]].repeat_interleave(128, 1)
        return (wide @ (b.t().float() * of_outputs).t()).to(out_dtype)

    monkeypatch.setattr(narrow.torch, "_scaled_mm", multiply)
    monkeypatch.setattr(narrow, "_library_has_blocks", lambda: True)
    bias = torch.randn(144).bfloat16()
    found = narrow.narrow_linear(x, weight, bias, torch.bfloat16)
    assert seen == [(272, 512), (1, 272), (1, 4)]
    expected = narrow.narrow_linear_reference(x, weight, None, torch.float32) + bias.float()
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2**-6 * float(expected.abs().max()))


def test_it_takes_whole_blocks_of_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "_library_has_blocks", lambda: True)
    assert narrow.library_takes(weight_of(2112, 512))
    refused = weight_of(2112, 256), weight_of(2120, 512), weight_of(2112, 512, rows=64)
    assert not any(narrow.library_takes(one) for one in refused)
