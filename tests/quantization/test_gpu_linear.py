"""Choosing among our products for few tokens and the library, on stand-ins for a GPU's clock and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY, TritonError
from headrace.kernels.gemm_config import BUCKETS, CANDIDATES
from headrace.quantization import gpu_linear

SIZE, DTYPE, CPU = (2, 64, 32), torch.bfloat16, torch.device("cpu")


def test_what_does_not_run_on_this_gpu_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory of a block is 99 KiB on some GPUs; most candidates want more."""
    ran: list[Any] = []

    def small(x: Tensor, weight: Tensor, config: Any, **_: Any) -> Tensor:
        if config.block_m > 1:
            raise TritonError("out of resource: shared memory")
        ran.append(config)
        return x @ weight.T

    def seconds(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
        before = len(ran)
        run(weights[0])
        return 1.0 if len(ran) == before else 0.5  # the library, or one of ours

    monkeypatch.setattr(gpu_linear, "ROTATED_BYTES", 1 << 12)
    monkeypatch.setattr(gpu_linear, "skinny_linear", small)
    monkeypatch.setattr(gpu_linear, "_seconds", seconds)
    plan = gpu_linear._measure(SIZE, DTYPE, DTYPE, CPU)
    for bucket, chosen in zip(BUCKETS, plan, strict=True):
        runs = [config for config in CANDIDATES[DEVICE_FAMILY, 2, bucket] if config.block_m == 1]
        assert chosen == (runs[0] if runs else None)
    assert any(chosen is None for chosen in plan)
