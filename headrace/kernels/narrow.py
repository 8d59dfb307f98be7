"""Computes linear layers of 8 bits over many tokens that no library serves: int8, fp8 with a scale for a block of the
weight, and fp8 of odd sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.fp8 import NarrowWeight, Quantized
from headrace.kernels.gemm import skinny_linear
from headrace.kernels.gemm_config import MANY_TOKENS


def narrow_linear(x: Quantized, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [T, K] @ weight [N, K].T + bias [N] # [T, N] in `dtype`, with sums in fp32 or int32.

    x and weight have numbers of the same type, and as many columns share a scale in both. A token's outputs do not
    depend on how many tokens there are.
    """
    kind = "int8" if weight.values.dtype == torch.int8 else "fp8 blocks" if weight.rows else "fp8"
    out: Tensor = skinny_linear(x, weight, bias, MANY_TOKENS[DEVICE_FAMILY, kind], dtype)
    return out


def narrow_linear_reference(x: Quantized, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = F.linear(x.dequantize(torch.float32), weight.dequantize())
    return (out if bias is None else out + bias.float()).to(dtype)
