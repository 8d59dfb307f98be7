"""Products by weights that stay packed, on a layout whose checkpoint holds the packed form itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.coded import CodedWeight
from headrace.kernels.gemm import skinny_linear_reference
from headrace.kernels.gemm_config import GemmConfig
from headrace.kernels.norm import half_norm_reference, rms_norm_reference
from headrace.kernels.tiled import TiledWeight, tile
from headrace.quantization import gpu_linear
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import FusedOps, GemmTable, LinearSpec, Part, Slot, Weights
from tests.kernels.coded_weights import KINDS, random_coded

CPU = torch.device("cpu")


class Given:
    """Stands for a layout that has loaded `weight`."""

    def __init__(self, weight: CodedWeight) -> None:
        self.weight = weight

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        raise NotImplementedError

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        raise NotImplementedError

    def why_widened(self, spec: LinearSpec, weights: Weights) -> str:
        return ""

    def coded(self, spec: LinearSpec, weights: Weights) -> CodedWeight:
        assert "raw" in weights, "a layout packs what was loaded, not what it packed before"
        return self.weight

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        plain = {"weight": self.coded(spec, weights).dequantize(spec.dtype)}
        return {**plain, "bias": weights["bias"]} if "bias" in weights else plain


def spec_of(weight: CodedWeight, **changes: Any) -> LinearSpec:
    return LinearSpec(*weight.codes.shape[::-1], (), torch.float32, **changes)


def loaded(weight: CodedWeight) -> dict[str, Tensor]:
    return {"raw": torch.zeros(1), "bias": torch.randn(len(weight.codes))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_multiplies_what_it_widened(kind: str) -> None:
    weight = random_coded(24, 128, **KINDS[kind])
    product, spec, weights = PackedProduct(Given(weight)), spec_of(weight), loaded(weight)
    product.prepare([spec], CPU)
    x = torch.randn(5, 128)
    expected = F.linear(x, weight.dequantize(torch.float32), weights["bias"])
    torch.testing.assert_close(product.finalize(spec, weights, FusedOps())(x, None), expected)
    assert product.experts(spec, {"raw": torch.zeros(1)})[0].shape == (24, 128)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels run as their references, up to 16 tokens by ours; returns what is called."""
    called: list[str] = []

    def skinny(*arguments: Any, **options: Any) -> Any:
        called.append("ours")
        return skinny_linear_reference(*arguments, **options)

    def planned(weight: TiledWeight, dtype: torch.dtype, library: Any) -> GemmTable:
        plan = (GemmConfig(1, 1, 1, 1), GemmConfig(16, 1, 1, 1), None, None, None)
        return gpu_linear.table_of(plan)

    monkeypatch.setattr(gpu_linear, "skinny_linear", skinny)
    monkeypatch.setattr(gpu_linear, "plan_tiled", planned)
    return called


@pytest.mark.parametrize("kind", ["int4 zeros", "int4 ordered", "nvfp4", "int8 per output"])
def test_a_gpu_holds_the_tiled_form_alone(kind: str, on_gpu: list[str]) -> None:
    weight = random_coded(24, 128, **KINDS[kind])
    product, spec, weights = PackedProduct(Given(weight)), spec_of(weight), loaded(weight)
    bias = weights["bias"]
    product.prepare([spec], CPU)
    product.widens = False
    compute = product.finalize(spec, weights, FusedOps())
    assert set(weights) == {*tile(weight, spec.dtype).tensors(), "bias"}
    for tokens, ours in ((1, ["ours"]), (5, ["ours"]), (17, [])):
        x = torch.randn(tokens, 128)
        expected = F.linear(x, weight.dequantize(torch.float32), bias)
        torch.testing.assert_close(compute(x, None), expected, rtol=1e-4, atol=1e-4)
        assert on_gpu == ours
        on_gpu.clear()
    plain = product.widened(replace(spec, dtype=torch.float64), weights)
    assert torch.equal(plain["weight"], weight.dequantize(torch.float64))
    assert plain["bias"] is bias


@pytest.mark.usefixtures("on_gpu")
def test_a_half_norm_is_finished_in_the_weights_order() -> None:
    weight = random_coded(24, 128, **KINDS["int4 ordered"])
    product, spec = PackedProduct(Given(weight)), spec_of(weight)
    product.prepare([spec], CPU)
    product.widens = False
    norm, x = torch.rand(128), torch.randn(3, 128)
    fused = FusedOps(norm_weight=norm, norm_eps=1e-5, rms_norm=rms_norm_reference)
    compute = product.finalize(spec, {"raw": torch.zeros(1)}, fused)
    expected = F.linear(rms_norm_reference(x, norm, 1e-5), weight.dequantize(torch.float32))
    torch.testing.assert_close(compute(x, None), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compute(half_norm_reference(x, norm), None), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("parts", [1, 3])
def test_inputs_that_are_smoothed_first(parts: int) -> None:
    """By AWQ's numbers, the same for all parts of a fused linear; behind a norm, also one that is half done."""
    weight, smoothing = random_coded(24, 128, **KINDS["nvfp4"]), torch.rand(1, 128) + 0.5
    product, spec = PackedProduct(Given(weight)), spec_of(weight)
    product.prepare([spec], CPU)
    product.widens = False
    norm, weights = torch.rand(128), {**loaded(weight), "smoothing": smoothing.expand(parts, -1).clone()}
    fused = FusedOps(norm_weight=norm, norm_eps=1e-5, rms_norm=rms_norm_reference)
    compute, bias = product.finalize(spec, weights, fused), weights["bias"]
    plain = weight.dequantize(torch.float32) * smoothing
    assert torch.equal(product.widened(spec, weights)["weight"], plain)
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 128)
        expected = F.linear(rms_norm_reference(x, norm, 1e-5), plain, bias)
        for given in (x, half_norm_reference(x, norm)) if tokens < 20 else (x,):
            torch.testing.assert_close(compute(given, None), expected, rtol=1e-4, atol=1e-4)


def test_numbers_of_one_keep_no_memory() -> None:
    weight = random_coded(24, 128, **KINDS["nvfp4"])
    product, spec = PackedProduct(Given(weight)), spec_of(weight)
    product.prepare([spec], CPU)
    product.widens = False
    weights = {**loaded(weight), "smoothing": torch.ones(1, 128)}
    product.experts(spec, weights)
    assert "smoothing" not in weights
