"""The library's fp8 product, which torch has for CPUs too, against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.fp8 import fp8_linear, fp8_linear_reference, quantize_per_token_reference

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", [1, 32])
def test_fp8_linear(dtype: torch.dtype, num_tokens: int, with_bias: bool, scales: int) -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    x = quantize_per_token_reference(torch.randn(num_tokens, 48, generator=generator).to(dtype), E4M3)
    weight = quantize_per_token_reference(torch.randn(32, 48, generator=generator), E4M3)
    bias = torch.randn(32, generator=generator).to(dtype) if with_bias else None
    arguments = (*x, weight.values, weight.scales[:scales, 0].contiguous(), bias, dtype)
    out, expected = fp8_linear(*arguments), fp8_linear_reference(*arguments)
    assert (out.shape, out.dtype) == ((num_tokens, 32), dtype)
    torch.testing.assert_close(out, expected)
