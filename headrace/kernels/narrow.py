"""Computes linear layers of 8 bits over many tokens that no library serves everywhere: int8, fp8 with a scale for a
block of the weight, and fp8 of odd sizes. On Hopper, cuBLAS multiplies by blocks of 128 x 128, from 12.9 on."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.fp8 import NarrowWeight, Quantized
from headrace.kernels.gemm import skinny_linear
from headrace.kernels.gemm_config import MANY_TOKENS

LIBRARY_BLOCK = 128
"""outputs, and inputs, of cuBLAS's blocks"""
LIBRARY_TOKENS = 256
"""Fewer tokens than these are multiplied by a kernel of ours."""
LIBRARY_MULTIPLE = 16
"""cuBLAS is given so many tokens, or a multiple."""


def narrow_linear(x: Quantized, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [T, K] @ weight [N, K].T + bias [N] # [T, N] in `dtype`, with sums in fp32 or int32.

    x and weight have numbers of the same type, and as many columns share a scale in both.
    """
    if x.shape[0] >= LIBRARY_TOKENS and dtype == torch.bfloat16 and not x.shift and library_takes(weight):
        product = by_library(x, weight, dtype)
        return product if bias is None else product.add_(bias)
    kind = "int8" if weight.values.dtype == torch.int8 else "fp8 blocks" if weight.rows else "fp8"
    out: Tensor = skinny_linear(x, weight, bias, MANY_TOKENS[DEVICE_FAMILY, kind], dtype)
    return out


def library_takes(weight: NarrowWeight) -> bool:
    """Tell whether cuBLAS multiplies by the weight: whole blocks of inputs, whose scales are read four at a time."""
    outputs, inputs = weight.shape
    blocks = (weight.rows, weight.group) == (LIBRARY_BLOCK, LIBRARY_BLOCK) and weight.scales.is_contiguous()
    return blocks and outputs % 16 == 0 and inputs % (4 * LIBRARY_BLOCK) == 0 and _library_has_blocks()


@cache
def _library_has_blocks() -> bool:
    if DEVICE_FAMILY != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    return tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)


def by_library(x: Quantized, weight: NarrowWeight, dtype: torch.dtype) -> Tensor:
    """Return the product by cuBLAS, which wants the scales of tokens side by side."""
    (tokens, inputs), groups = x.shape, x.scales.shape[1]
    rows = -(-tokens // LIBRARY_MULTIPLE) * LIBRARY_MULTIPLE
    values, scales = x.values, x.scales.new_empty((groups, rows))  # what is behind the tokens reaches no result
    scales[:, :tokens].copy_(x.scales.t())
    if rows != tokens:
        values = x.values.new_empty((rows, inputs))
        values[:tokens].copy_(x.values)
    return torch._scaled_mm(
        values, weight.values.t(), scale_a=scales.t(), scale_b=weight.scales.t(), out_dtype=dtype
    )[:tokens]  # fmt: skip


def narrow_linear_reference(x: Quantized, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = F.linear(x.dequantize(torch.float32), weight.dequantize())
    return (out if bias is None else out + bias.float()).to(dtype)
