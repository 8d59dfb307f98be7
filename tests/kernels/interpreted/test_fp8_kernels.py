"""Quantization a token, alone and inside norm and activation, against the references: the same bits."""

import inspect

import pytest
import torch
from triton.runtime import interpreter

from headrace.kernels.fp8 import quantize_per_token, quantize_per_token_reference
from headrace.kernels.table import REFERENCE_KERNELS as REFERENCE
from headrace.kernels.table import TRITON_KERNELS as TRITON

SHAPES = [(3, 48), (1, 129), (0, 16), (4, 1)]
each_input = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
HAS_FNUZ = "get_fp8e4b8_ty()" in inspect.getsource(interpreter)  # not in 3.6
KNOWN = [torch.float8_e4m3fn] + [torch.float8_e4m3fnuz] * HAS_FNUZ
each_fp8 = pytest.mark.parametrize("fp8", KNOWN, ids=str)
each_shape = pytest.mark.parametrize(("rows", "width"), SHAPES)


@pytest.fixture(autouse=True)
def _fresh_inputs_and_poisoned_outputs():
    torch.seed()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    yield
    torch.use_deterministic_algorithms(False)


def assert_same(out, reference):
    assert out.values.dtype == reference.values.dtype
    assert torch.equal(out.values.view(torch.uint8), reference.values.view(torch.uint8))
    assert torch.equal(out.scales, reference.scales)


def assert_close(out, reference, dtype):
    """Where sums or exponentials may differ in their last bit, a few numbers may round to the neighbour."""
    assert (out.values.dtype, out.shape) == (reference.values.dtype, reference.shape)
    torch.testing.assert_close(out.scales, reference.scales, rtol={torch.float32: 1e-5}.get(dtype, 1e-2), atol=0)
    if not out.values.numel():
        return
    a, b = out.dequantize(torch.float64), reference.dequantize(torch.float64)
    assert (a - b).norm() <= (1e-2 if dtype == torch.float32 else 2.5e-2) * b.norm()


@each_input
@each_fp8
@each_shape
def test_quantize_per_token(dtype, fp8, rows, width):
    x = (torch.randn(rows, width) * torch.rand(rows, 1) * 30).to(dtype)
    assert_same(TRITON.quantize_per_token(x, fp8), REFERENCE.quantize_per_token(x, fp8))
    wide = (torch.randn(5, 3 * width) * 3).to(dtype)[:rows]
    view = wide[:, width : 2 * width]
    assert_same(TRITON.quantize_per_token(view, fp8), REFERENCE.quantize_per_token(view, fp8))


@each_fp8
def test_rows_of_zeros_of_tiny_and_of_impossible_numbers(fp8):
    x = torch.randn(6, 40)
    x[0] = 0
    x[1] *= 1e-30
    x[2, 7] = float("nan")
    x[3, 7] = float("inf")
    x[4] = 3e38
    out, reference = quantize_per_token(x, fp8), quantize_per_token_reference(x, fp8)
    for found in (out, reference):
        back = found.dequantize(torch.float32)
        assert (back[:2] == 0).all()
        assert back[2, 7].isnan()
        assert back[3].isnan().any()
        torch.testing.assert_close(back[4:], x[4:], rtol=0.07, atol=0.01)


@each_input
@each_fp8
@each_shape
def test_norm_quantizes(dtype, fp8, rows, width):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    out = TRITON.rms_norm_quantized(x, weight, 1e-5, fp8)
    assert_same(out, REFERENCE.quantize_per_token(TRITON.rms_norm(x, weight, 1e-5), fp8))
    assert_close(out, REFERENCE.rms_norm_quantized(x, weight, 1e-5, fp8), dtype)
    delta, ours, theirs = torch.randn(rows, width).to(dtype), x.clone(), x.clone()
    out = TRITON.rms_norm_quantized(ours, weight, 1e-5, fp8, delta)
    assert torch.equal(ours, theirs.add_(delta))
    assert_same(out, TRITON.rms_norm_quantized(theirs, weight, 1e-5, fp8))


@each_input
@each_fp8
@pytest.mark.parametrize(("rows", "width"), [*SHAPES, (2, 1100)])
def test_activation_quantizes(dtype, fp8, rows, width):
    x = torch.randn(rows, 2 * width).to(dtype) * 4
    out = TRITON.silu_and_mul_quantized(x, fp8)
    assert_same(out, REFERENCE.quantize_per_token(TRITON.silu_and_mul(x), fp8))
    assert_close(out, REFERENCE.silu_and_mul_quantized(x, fp8), dtype)
