"""Choosing among our products for few tokens and the library, on stand-ins for a GPU's clock and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, TritonError
from headrace.kernels.fp8 import NarrowWeight, Quantized, Rounding
from headrace.kernels.gemm import skinny_linear_reference
from headrace.kernels.gemm_config import BUCKETS, CANDIDATES
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.quantization import gpu_linear

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
KINDS = {
    2: None,
    1: Rounding(torch.float8_e4m3fn),
    "int8": Rounding(torch.int8),
    "fp8/32": Rounding(torch.float8_e4m3fn, group=32),
}
"""what weights are of, and how activations are rounded beside them"""


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_run_on_this_gpu_is_not_chosen(kind: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory of a block is 99 KiB on some GPUs; most candidates want more."""
    ran: list[Any] = []

    def small(x: Any, weight: Any, bias: None, config: Any, dtype: torch.dtype) -> Tensor:
        if config.block_m > 1:
            assert isinstance(x, Quantized) == isinstance(weight, NarrowWeight) == (kind != 2)
            raise TritonError("out of resource: shared memory")
        ran.append(config)
        return skinny_linear_reference(x, weight, bias, config, dtype)

    def seconds(run: Callable[[Any], Tensor], weights: list[Any]) -> float:
        before = len(ran)
        assert run(weights[0]).isfinite().all()
        return 1.0 if len(ran) == before else 0.5  # the library, or one of ours

    monkeypatch.setattr(gpu_linear, "ROTATED_BYTES", 1 << 12)
    monkeypatch.setattr(gpu_linear, "skinny_linear", small)
    monkeypatch.setattr(gpu_linear, "graph_seconds", seconds)
    for name in ("quantize", "fp8_linear", "narrow_linear"):
        monkeypatch.setattr(gpu_linear, name, getattr(REFERENCE_KERNELS, name))
    plan = gpu_linear._measure((kind, 64, 48), DTYPE, KINDS[kind], CPU)
    for bucket, chosen in zip(BUCKETS, plan, strict=True):
        name = "fp8 blocks" if kind == "fp8/32" else kind
        runs = [config for config in CANDIDATES[DEVICE_FAMILY, name, bucket] if config.block_m == 1]
        assert chosen == (runs[0] if runs else None)
    assert any(chosen is None for chosen in plan)
