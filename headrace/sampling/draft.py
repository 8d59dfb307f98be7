"""Counter-based Gumbel sampling and filters in plain torch. Knows nothing of requests."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def _mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit hash on int64 tensors holding unsigned 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def gumbel_argmax(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """argmax(logits / temperature + Gumbel noise); temperature 0: argmax(logits). # [n, V] fp32 -> [n] int64"""
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    stream = _mix32(low ^ 0x9E3779B9)
    stream = _mix32((stream + high) & _MASK32)
    stream = _mix32((stream + position) & _MASK32)
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = _mix32((_mix32((stream[:, None] + ids) & _MASK32) ^ stream[:, None]) & _MASK32)
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    noise = -torch.log(-torch.log(uniform))
    greedy = (temperature == 0)[:, None]
    scale = torch.where(greedy, 1.0, temperature[:, None])
    return torch.where(greedy, logits, logits / scale + noise).max(dim=1).indices


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """min_p, then top_k, then top_p: what falls out becomes -inf. # [n, V] fp32"""
    floor = logits.amax(dim=1, keepdim=True) + min_p[:, None].log()
    logits = logits.masked_fill(logits < floor, float("-inf"))
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k[:, None], float("-inf"))
    probs = ordered.softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    drop = (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(drop, float("-inf")))
