"""The gated activation of Llama-like MLPs."""

# mypy: disable-error-code="no-untyped-def"
# Triton functions are typed by what they are launched with.
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs


@triton.jit
def _silu_and_mul_kernel(out_ptr, x_ptr, x_stride, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (activated * up).to(dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [num_tokens, 2 * n] = gate | up; returns [num_tokens, n] contiguous, in x's dtype."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(1024, next_power_of_2(width))
        grid = (num_tokens, -(-width // block))
        _silu_and_mul_kernel[grid](out, x, x.stride(0), width, BLOCK=block, num_warps=4, **overlap())
    return out


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
