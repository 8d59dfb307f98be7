"""Computes the activation of MLPs: silu(gate) * up, or another function than silu, also without a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.fp8 import (
    LARGEST,
    Quantized,
    Rounding,
    empty_quantized,
    quantize_reference,
    quantize_row,
    row_arguments,
    warps_of_row,
)
from headrace.kernels.gemm_epilogue import ACTIVATIONS, activated


@triton.jit
def _xielu(x, curves_ptr):
    """Return xIELU of fp32 x, given what `gate_and_mul` says of its curves."""
    above = tl.load(curves_ptr)
    below = tl.load(curves_ptr + 1)
    slope = tl.load(curves_ptr + 2)
    d = tl.minimum(x, tl.load(curves_ptr + 3))
    # of small numbers exp(d) - 1 - d would keep few bits
    series = d * d * 0.5 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6 * (1 + d / 7)))))
    curve = tl.where(d > -0.5, series, tl.exp(d) - 1 - d) + d - x
    return slope * x + tl.where(x > 0, above * x * x, below * curve)


@triton.jit
def _gate_and_mul_kernel(
    out_ptr, scales_ptr, zeros_ptr, given_ptr, bound_ptr, x_ptr, x_stride, curves_ptr, width,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Activate; grid (num_tokens, blocks of columns). With `scales`, `out` is quantized and a block is a whole row."""
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if curves_ptr is None:
        out = activated(gate, KIND).to(dtype)
    else:
        out = _xielu(gate, curves_ptr).to(dtype)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) * up).to(dtype)
    if scales_ptr is None:
        tl.store(out_ptr + row * width + columns, out, mask=inside)
    else:
        quantize_row(
            out_ptr, scales_ptr, zeros_ptr, given_ptr, bound_ptr, out.to(tl.float32), row, columns, inside, width,
            LARGEST, GROUP,
        )  # fmt: skip


def gate_and_mul(x: Tensor, activation: str = "silu", gated: bool = True, curves: Tensor | None = None) -> Tensor:
    """Return activation(gate) * up for x [num_tokens, 2 * n] = gate | up: [num_tokens, n] contiguous, in x's dtype; not
    `gated`, activation(x). `activation` is one of GATES, or xielu with `curves`.

    xIELU (arXiv 2411.13010) is slope * x + above * x ** 2 for x above 0, else slope * x + below * (exp(d) - 1 - x) with
    d = min(x, bend); `curves` # [4] float32: above, below, slope, bend.
    """
    num_tokens, width = x.shape[0], x.shape[1] // (1 + gated)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(1024, next_power_of_2(width))
        grid = (num_tokens, -(-width // block))
        _gate_and_mul_kernel[grid](
            out, None, None, None, None, x, x.stride(0), curves, width, KIND=ACTIVATIONS.get(activation, 0),
            GATED=gated, BLOCK=block, LARGEST=0.0, GROUP=0, num_warps=4, **overlap(),
        )  # fmt: skip
    return out


def gate_and_mul_quantized(
    x: Tensor, to: Rounding, activation: str = "silu", gated: bool = True, curves: Tensor | None = None
) -> Quantized:
    """Return what `gate_and_mul` does, rounded as `to` says."""
    num_tokens, width = x.shape[0], x.shape[1] // (1 + gated)
    out = empty_quantized(num_tokens, width, to, x.device)
    if num_tokens:
        block = next_power_of_2(width)
        _gate_and_mul_kernel[(num_tokens, 1)](
            *row_arguments(out, to), x, x.stride(0), curves, width, KIND=ACTIVATIONS.get(activation, 0), GATED=gated,
            BLOCK=block, LARGEST=LARGEST[to.dtype], GROUP=to.group, num_warps=warps_of_row(block), **overlap(),
        )  # fmt: skip
    return out


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}
"""activation -> what it does to the gate"""


def xielu_reference(x: Tensor, curves: Tensor) -> Tensor:
    above, below, slope, bend = curves
    wide = x.float()
    curve = torch.where(wide > 0, above * wide * wide, below * (torch.expm1(torch.minimum(wide, bend)) - wide))
    return (slope * wide + curve).to(x.dtype)


def gate_and_mul_reference(
    x: Tensor, activation: str = "silu", gated: bool = True, curves: Tensor | None = None
) -> Tensor:
    act = GATES[activation] if curves is None else partial(xielu_reference, curves=curves)
    if not gated:
        return act(x)
    gate, up = x.chunk(2, dim=-1)
    return act(gate).mul_(up)


def gate_and_mul_quantized_reference(
    x: Tensor, to: Rounding, activation: str = "silu", gated: bool = True, curves: Tensor | None = None
) -> Quantized:
    return quantize_reference(gate_and_mul_reference(x, activation, gated, curves), to)
