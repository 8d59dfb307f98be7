"""Linears over few tokens against torch, in every way that the tables name and some that they do not."""

import pytest
import torch
from arena import error

from headrace.kernels.adapters import Adapted, StepSlots
from headrace.kernels.cases import Inputs, made_up_adapters
from headrace.kernels.fp8 import NarrowWeight, Rounding, quantize_reference
from headrace.kernels.gemm import BAND, skinny_linear, skinny_linear_reference
from headrace.kernels.gemm_config import BUCKETS, CANDIDATES, GemmConfig
from headrace.kernels.norm import HalfNormed, half_norm_reference, rms_norm_reference
from tests.sampled import sampled

CONFIGS = [
    GemmConfig(1, 4, 32, 4),
    GemmConfig(16, 16, 32, 4, 3),
    GemmConfig(16, 64, 16, 4, 3, swap=True),
    GemmConfig(32, 32, 64, 4, 2),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
pytestmark = pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 24, 64), (7, 67, 96), (33, 5, 80), (0, 8, 32)])
def test_equals_torch(config, tokens, outputs, inputs, dtype):
    if config.block_m == 1 and tokens > 1:
        pytest.skip("made for one token")
    wide = torch.randn(tokens, inputs + 16).to(dtype)
    x, weight, bias = wide[:, :inputs], torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    for given in (None, bias):
        out = skinny_linear(x, weight, given, config)
        assert out.dtype == dtype
        assert error(out, skinny_linear_reference(x, weight, given)) <= TOLERANCE[dtype]


KINDS = {
    "fp8": Rounding(torch.float8_e4m3fn),
    "fp8 blocks": Rounding(torch.float8_e4m3fn, group=32),
    "int8": Rounding(torch.int8),
    "int8 uneven": Rounding(torch.int8, zeros=True),
}
"""weights of 8 bits by how activations are rounded beside them"""


def narrow(kind, outputs, inputs):
    """A random weight whose activations are rounded as KINDS says."""
    to = KINDS[kind]
    held = quantize_reference(torch.randn(outputs, inputs), Rounding(to.dtype))
    if to.group:
        scales = torch.rand(-(-outputs // 8), -(-inputs // to.group)) + 0.1
        return NarrowWeight(held.values, scales, rows=8, group=to.group)
    sums = held.values.sum(1, dtype=torch.int32).float() if to.zeros else None
    return NarrowWeight(held.values, held.scales[:, 0].contiguous(), sums=sums)


def given_to(config, x, kind):
    """What a launch takes: a token alone as it is, more of them rounded."""
    return x if config.block_m == 1 else quantize_reference(x, KINDS[kind])


@sampled(("kind", "config"), KINDS, CONFIGS)
def test_weights_of_8_bits(config, kind):
    """Of sizes that nothing divides; with a gate, with a sum, and half a norm on either side."""
    for tokens, outputs, inputs in ((1, 37, 100), (7, 67, 96), (33, 6, 200)):
        if config.block_m == 1 and tokens > 1:
            continue
        weight, bias = narrow(kind, outputs, inputs), torch.randn(outputs).half()
        x = given_to(config, torch.randn(tokens, inputs).half(), kind)
        for given in (None, bias):
            out = skinny_linear(x, weight, given, config, torch.float32)
            assert error(out, skinny_linear_reference(x, weight, given, dtype=torch.float32)) <= 1e-6
    tokens = 1 if config.block_m == 1 else 9
    weight, norm, residual = narrow(kind, 48, 64), torch.randn(48).half(), torch.randn(tokens, 48).half()
    x = given_to(config, torch.randn(tokens, 64).half(), kind)
    gated = skinny_linear(x, weight, None, config, torch.float32, gated=True)
    assert error(gated, skinny_linear_reference(x, weight, None, dtype=torch.float32, gated=True)) <= 1e-6
    expected = skinny_linear_reference(x, weight, None, residual=residual.float())
    half = skinny_linear(x, weight, None, config, torch.float16, residual=residual, next_norm=norm)
    assert error(half.x, expected) <= TOLERANCE[torch.float16]
    if config.block_m == 1:  # what is rounded is normed by who rounds it
        weight = narrow(kind, 21, 48)
        out = skinny_linear(half, weight, None, config, torch.float32, eps=1e-3)
        normed = rms_norm_reference(half.x.float(), norm.float(), 1e-3)
        assert error(out, normed @ weight.dequantize().T) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("kind", ["fp8 blocks", "int8 uneven"])
def test_many_tokens_are_computed_in_bands(kind):
    config, tokens, outputs, inputs = GemmConfig(16, 32, 64, 4, 2), BUCKETS[-1] + 30, 70, 96
    weight, x = narrow(kind, outputs, inputs), quantize_reference(torch.randn(tokens, inputs), KINDS[kind])
    assert -(-tokens // config.block_m) > BAND
    out = skinny_linear(x, weight, None, config, torch.float32)
    assert error(out, skinny_linear_reference(x, weight, None, dtype=torch.float32)) <= 1e-6


@sampled(("dtype", "config"), TOLERANCE, CONFIGS)
def test_gate_and_residual_in_the_same_pass(config, dtype):
    for tokens, half, inputs in ((1, 24, 64), (5, 37, 80)):
        if config.block_m == 1 and tokens > 1:
            continue
        x, weight, bias = (torch.randn(*size).to(dtype) for size in ((tokens, inputs), (2 * half, inputs), (2 * half,)))
        out = skinny_linear(x, weight, bias, config, gated=True)
        assert error(out, skinny_linear_reference(x.float(), weight, bias, gated=True)) <= TOLERANCE[dtype]
        residual = torch.randn(tokens, 2 * half).to(dtype)
        expected = skinny_linear_reference(x.float(), weight, bias) + residual.float()
        summed = skinny_linear(x, weight, bias, config, residual=residual)
        assert summed.data_ptr() == residual.data_ptr()
        assert error(summed, expected) <= TOLERANCE[dtype]


@sampled(("dtype", "config"), TOLERANCE, CONFIGS)
def test_a_norm_between_two_linears_is_made_by_both(config, dtype):
    eps = 1e-3
    for tokens, inputs, outputs in ((1, 64, 24), (9, 80, 75)):
        if config.block_m == 1 and tokens > 1:
            continue
        x, residual = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, outputs).to(dtype)
        weight, norm = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
        expected = skinny_linear_reference(x.float(), weight, None) + residual.float()
        half = skinny_linear(x, weight, None, config, residual=residual, next_norm=norm)
        assert half.x.data_ptr() == residual.data_ptr()
        assert error(half.x, expected) <= TOLERANCE[dtype]
        exact = half_norm_reference(half.x, norm)
        assert error(half.scaled, exact.scaled) <= TOLERANCE[dtype]
        assert error(half.squares.sum(1, keepdim=True), exact.squares) <= 1e-5
        after = torch.randn(38, outputs).to(dtype)
        normed = rms_norm_reference(half.x.float(), norm.float(), eps)
        for gated in (False, True):
            out = skinny_linear(half, after, None, config, gated=gated, eps=eps)
            wanted = skinny_linear_reference(normed, after, None, gated=gated)
            assert out.dtype == dtype
            assert error(out, wanted) <= 2 * TOLERANCE[dtype]
    empty = HalfNormed(*(torch.empty(0, 32, dtype=dtype) for _ in range(2)), torch.empty(0, 3))
    assert skinny_linear(empty, torch.randn(8, 32).to(dtype), None, CONFIGS[1], eps=eps).shape == (0, 8)


def test_a_configuration_fits_its_bucket():
    for (_, kind, bucket), configs in CANDIDATES.items():
        packed = str(kind).endswith(" bits")  # whose codes may cost more to take apart than a token's products
        others = {1: 16 if packed else 1, 128: 64}
        assert all(config.block_m in (bucket, others.get(bucket)) for config in configs)


@sampled(("dtype", "config", "gated"), TOLERANCE, CONFIGS[1:], (False, True))
def test_adapters_are_added_to_the_product(config, dtype, gated):
    """Of a fused linear, by slots that leave some out, to inputs that are half normed too, before gate or residual."""
    make, sizes = Inputs(dtype, torch.device("cpu")), (20, 20) if gated else (17, 8, 15)
    for rank in (16, 48):
        tokens, inputs = 21, 64
        weights = made_up_adapters(make, sizes, inputs, rank, slots=11)
        slots = StepSlots.of(make.integers(-1, 11, tokens, dtype=torch.int32), 11)
        x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(40, inputs).to(dtype)
        half = half_norm_reference(x, torch.randn(inputs).to(dtype))
        for given in (x, half):
            residual = None if gated else torch.randn(tokens, 40).to(dtype)
            around = {"gated": gated, "eps": 1e-3, "adapters": Adapted(slots, weights)}
            before = None if residual is None else residual.float()
            expected = skinny_linear_reference(given, weight, None, dtype=torch.float32, residual=before, **around)
            out = skinny_linear(given, weight, None, config, residual=residual, **around)
            assert error(out, expected) <= TOLERANCE[dtype]
            assert not weights.arrived.any()
            bare = skinny_linear_reference(given, weight, None, gated=gated, eps=1e-3)
            assert error(out, bare) > 0.1
