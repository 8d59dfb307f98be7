"""Products by weights that stay packed, on a layout whose checkpoint holds the packed form itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.packed import PackedWeight
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import FusedOps, LinearSpec, Part, Slot, Weights
from tests.kernels.packed_weights import KINDS, random_packed

CPU = torch.device("cpu")


class Given:
    """Stands for a layout that has loaded `weight`."""

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        raise NotImplementedError

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        raise NotImplementedError

    def packed(self, spec: LinearSpec, weights: Weights) -> PackedWeight:
        assert "raw" in weights, "a layout packs what was loaded, not what it packed before"
        return self.weight

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        plain = {"weight": self.packed(spec, weights).dequantize(spec.dtype)}
        return {**plain, "bias": weights["bias"]} if "bias" in weights else plain


def spec_of(weight: PackedWeight, **changes: Any) -> LinearSpec:
    return LinearSpec(weight.in_features, weight.out_features, (), torch.float32, **changes)


def loaded(weight: PackedWeight) -> dict[str, Tensor]:
    return {"raw": torch.zeros(1), "bias": torch.randn(weight.out_features)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_multiplies_what_it_widened(kind: str) -> None:
    weight = random_packed(24, 128, **KINDS[kind])
    product, spec, weights = PackedProduct(Given(weight)), spec_of(weight), loaded(weight)
    product.prepare([spec], CPU)
    x = torch.randn(5, 128)
    expected = F.linear(x, weight.dequantize(torch.float32), weights["bias"])
    torch.testing.assert_close(product.finalize(spec, weights, FusedOps())(x, None), expected)
    assert product.experts(spec, {"raw": torch.zeros(1)})[0].shape == (24, 128)


def test_a_gpu_holds_the_packed_form_alone() -> None:
    weight = random_packed(24, 128, zeros=True)
    product, spec, weights = PackedProduct(Given(weight)), spec_of(weight), loaded(weight)
    bias = weights["bias"]
    product.prepare([spec], CPU)
    product.widens = False
    compute = product.finalize(spec, weights, FusedOps())
    assert set(weights) == {"codes", "scales", "zeros", "bias"}
    x = torch.randn(5, 128)
    torch.testing.assert_close(compute(x, None), F.linear(x, weight.dequantize(torch.float32), bias))
    plain = product.widened(replace(spec, dtype=torch.float64), weights)
    assert torch.equal(plain["weight"], weight.dequantize(torch.float64))
    assert plain["bias"] is bias
