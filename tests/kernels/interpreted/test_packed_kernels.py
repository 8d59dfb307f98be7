"""Linears over few tokens by packed weights, and what is fused with them, against products of the widened weights."""

import pytest
import torch

from headrace.kernels.gemm import skinny_linear, skinny_linear_reference
from headrace.kernels.gemm_config import GemmConfig
from tests.kernels.packed_weights import KINDS, random_packed

CONFIGS = [GemmConfig(1, 4, 128, 4), GemmConfig(16, 16, 32, 4), GemmConfig(16, 16, 64, 4, swap=True)]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}
BY_BYTES = 8e-5
"""where one token's numbers become integers of 16 bits"""


def made(kind, *shape):
    """A random weight without an order, in which activations come already."""
    return random_packed(*shape, **{**KINDS[kind], "order": False})


def error(out, expected):
    return float((out.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("config", CONFIGS, ids=["one token", "tokens left", "weight left"])
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind, config):
    """Numbers of inputs that blocks, groups of codes and groups of scales do not divide; outputs likewise."""
    for dtype, (n, k) in zip(TOLERANCE, ((18, 128), (5, 272), (20, 200)), strict=True):
        if KINDS[kind]["group_size"] == 0 or k % 16 == 0:
            weight, bias = made(kind, n, k), torch.randn(n).to(dtype)
            x = torch.randn(1 if config.block_m == 1 else 5, k).to(dtype)
            expected = skinny_linear_reference(x, weight, bias, dtype=torch.float32)
            by_bytes = config.block_m == 1 and weight.values == "integer"
            bound = max(TOLERANCE[dtype], BY_BYTES) if by_bytes else TOLERANCE[dtype]
            assert error(skinny_linear(x, weight, bias, config), expected) <= bound


@pytest.mark.parametrize("config", CONFIGS, ids=["one token", "tokens left", "weight left"])
@pytest.mark.parametrize("kind", ["int4 zeros", "nvfp4"])
def test_fused(kind, config):
    """The norm before and after, the gate and the residual are those of unpacked weights."""
    tokens, hidden, inner = 1 if config.block_m == 1 else 3, 32, 64
    down, up = made(kind, hidden, inner), made(kind, 2 * inner, hidden)
    x, residual = torch.randn(tokens, inner).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    norm, plain = torch.rand(hidden).bfloat16() + 0.5, residual.clone()
    half = skinny_linear(x, down, None, config, residual=residual, next_norm=norm)
    expected = skinny_linear_reference(x, down, None, residual=plain)
    assert half.x is residual
    assert error(half.x, expected) <= 8e-3
    gated = skinny_linear(half, up, None, config, gated=True, eps=1e-5)
    wanted = skinny_linear_reference(half, up, None, gated=True, eps=1e-5, dtype=torch.float32)
    assert error(gated, wanted) <= 1e-2


@pytest.mark.parametrize("kind", ["int4 zeros", "int8 groups"])
@pytest.mark.parametrize("outlier", [30.0, 1000.0, 3e4])
def test_an_outlier_is_most_of_the_sum_that_it_coarsens(kind, outlier):
    """Numbers that share a factor with it are rounded by less than 16 bits would round it."""
    weight, x = made(kind, 16, 256), torch.randn(1, 256)
    x[0, 37] = outlier
    expected = skinny_linear_reference(x, weight, None)
    difference = skinny_linear(x, weight, None, CONFIGS[0]) - expected
    rounded = 2**-9 * outlier * weight.dequantize(torch.float32)[:, 37]
    assert difference.norm() <= max(rounded.norm() / 2, BY_BYTES * expected.norm())
