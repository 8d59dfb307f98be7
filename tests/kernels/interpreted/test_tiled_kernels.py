"""Linears over few tokens by tiled weights, what is fused with them, and what widens them, against their references."""

import itertools

import pytest
import torch

from headrace.kernels.adapters import Adapted, StepSlots, shrink_adapters_reference
from headrace.kernels.cases import Inputs, made_up_adapters
from headrace.kernels.gemm import skinny_linear, skinny_linear_reference
from headrace.kernels.gemm_config import GemmConfig
from headrace.kernels.norm import half_norm_reference
from headrace.kernels.tiled import tile
from headrace.kernels.tiled_widen import widen_tiled, widen_tiled_reference
from tests.kernels.coded_weights import KINDS, OF_EXPERTS, random_coded

WHOLE = GemmConfig(16, 64, 256, 4, 2, True)
SHARED = GemmConfig(16, 128, 128, 4, 2, True, split=3)
ALONE = GemmConfig(1, 32, 128, 2, 1)
ONE_TOKEN = [
    (torch.bfloat16, GemmConfig(1, 16, 128, 2, 2), (20, 336)),
    (torch.float16, GemmConfig(1, 64, 128, 4, 1), (70, 160)),
]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def made(kind, dtype, *shape, gated=False):
    """A random weight without an order, in which activations come already."""
    return tile(random_coded(*shape, **{**KINDS[kind], "order": False}), dtype, gated)


def error(out, expected):
    return float((out.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind):
    """Numbers of tokens, inputs and outputs that tiles and blocks do not divide."""
    for dtype, config, (n, k) in ((torch.bfloat16, SHARED, (70, 416)), (torch.float16, WHOLE, (40, 160))):
        weight, bias = made(kind, dtype, n, k), torch.randn(n).to(dtype)
        x = torch.randn(18, k).to(dtype)
        expected = skinny_linear_reference(x, weight, bias, dtype=torch.float32)
        assert error(skinny_linear(x, weight, bias, config), expected) <= TOLERANCE[dtype]
        assert not weight.arrived.any()


@pytest.mark.parametrize(
    ("kind", "case"), list(zip(OF_EXPERTS, itertools.cycle(ONE_TOKEN), strict=False)), ids=OF_EXPERTS
)
def test_linear_over_one_token(kind, case):
    """Numbers of inputs and outputs that blocks, warps and programs do not divide."""
    dtype, config, (n, k) = case
    weight = tile(random_coded(n, k, **OF_EXPERTS[kind]), dtype)
    bias, x = torch.randn(n).to(dtype), torch.randn(1, k).to(dtype)
    expected = skinny_linear_reference(x, weight, bias, dtype=torch.float32)
    assert error(skinny_linear(x, weight, bias, config, dtype=torch.float32), expected) <= 1e-4


@pytest.mark.parametrize("config", [WHOLE, SHARED, ALONE], ids=["whole", "shared", "one token"])
@pytest.mark.parametrize("kind", ["int4 zeros", "nvfp4"])
def test_fused(kind, config):
    """The norm before and after, the gate and the residual are those of plain weights."""
    tokens, hidden, inner = 1 if config is ALONE else 3, 96, 160
    down = made(kind, torch.bfloat16, hidden, inner)
    up = made(kind, torch.bfloat16, 2 * inner, hidden, gated=True)
    x, residual = torch.randn(tokens, inner).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    norm, plain = torch.rand(hidden).bfloat16() + 0.5, residual.clone()
    half = skinny_linear(x, down, None, config, residual=residual, next_norm=norm)
    assert half.x is residual
    assert error(half.x, skinny_linear_reference(x, down, None, residual=plain)) <= 8e-3
    gated = skinny_linear(half, up, None, config, gated=True, eps=1e-5)
    wanted = skinny_linear_reference(half, up, None, gated=True, eps=1e-5, dtype=torch.float32)
    assert error(gated, wanted) <= 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_widened(kind):
    for dtype, (n, k), gated in ((torch.bfloat16, (70, 160), True), (torch.float32, (40, 288), False)):
        weight = made(kind, dtype, n, k, gated=gated)
        expected = widen_tiled_reference(weight, dtype)
        torch.testing.assert_close(
            widen_tiled(weight, dtype), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0.0
        )


@pytest.mark.parametrize("config", [WHOLE, SHARED], ids=["whole", "shared"])
def test_adapters_are_added_to_the_product(config):
    """By each program that has a share of the inputs, once; before the factor of a norm, and before the gate."""
    make, inner, hidden = Inputs(torch.bfloat16, torch.device("cpu")), 80, 160
    weight = made("int4 zeros", torch.bfloat16, 2 * inner, hidden, gated=True)
    weights = made_up_adapters(make, (inner, inner), hidden, 16, slots=5)
    slots, x = StepSlots.of(make.integers(-1, 5, 9, dtype=torch.int32), 5), torch.randn(9, hidden).bfloat16()
    half = half_norm_reference(x, torch.rand(hidden).bfloat16() + 0.5)
    s = shrink_adapters_reference(half.scaled, slots, weights)
    around = {"gated": True, "eps": 1e-5, "adapters": Adapted(slots, weights, s)}
    wanted = skinny_linear_reference(half, weight, None, dtype=torch.float32, **around)
    assert error(skinny_linear(half, weight, None, config, **around), wanted) <= 1e-2
    bare = skinny_linear_reference(half, weight, None, dtype=torch.float32, gated=True, eps=1e-5)
    assert error(bare, wanted) > 0.1
