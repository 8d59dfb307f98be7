"""Computes log(sum(exp(logits))) of each row, with the same bits for a row however many rows there are.

(torch's own splits the sum in another way for other numbers of rows.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import tl, triton

BLOCK = 4096


@triton.jit
def _logsumexp_kernel(out_ptr, logits_ptr, logits_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    address = logits_ptr + row * logits_stride + lane
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        value = tl.load(address + start, mask=start + lane < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, value.to(tl.float32))
    top = tl.max(highest, axis=0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)  # infinity minus infinity is no number
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        value = tl.load(address + start, mask=start + lane < vocab_size, other=float("-inf"))
        total += tl.exp(value.to(tl.float32) - shift)
    tl.store(out_ptr + row, tl.log(tl.sum(total, axis=0)) + shift)


def logsumexp(logits: Tensor) -> Tensor:
    """Return logsumexp [n] float32 of logits [n, vocab_size], of any float type with a contiguous last dimension."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _logsumexp_kernel[(rows,)](out, logits, logits.stride(0), vocab_size, BLOCK=BLOCK, num_warps=8)
    return out


def logsumexp_reference(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(dim=1)
