"""Computes log-probabilities over the model's raw distribution, before penalties and temperature, with the most likely
alternatives and the token's rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.logsumexp import logsumexp_reference

CHUNK_ELEMENTS = 1 << 24
"""Logits handled at once, which bounds the scratch memory (28 bytes an element at the peak)."""


class LogprobTensors(NamedTuple):
    """Holds n tokens' log-probabilities, each with k alternatives."""

    token_ids: Tensor
    """[n, 1 + k] int64: the token itself, then the k most likely ones, best first (of equals the lowest id first)"""
    logprobs: Tensor
    """[n, 1 + k] float32"""
    ranks: Tensor
    """[n] int64: 1 + how many tokens are more likely than the token itself"""

    @staticmethod
    def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
        """Join parts with the same k."""
        return LogprobTensors(*(torch.cat(column) for column in zip(*parts, strict=True)))


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, k: int, logsumexp: Callable[[Tensor], Tensor] = logsumexp_reference
) -> LogprobTensors:
    """Return the log-probabilities of token_ids [n] int64 under logits [n, vocab_size], and of `k` alternatives each.

    `logsumexp` is the kernel table's; k is cut to the size of the vocabulary. Rows are handled in chunks of bounded
    memory, and each row's result depends on that row alone.
    """
    k = min(k, logits.shape[1])
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    starts = range(0, max(1, logits.shape[0]), step)
    parts = [_gather(logits[i : i + step], token_ids[i : i + step], k, logsumexp) for i in starts]
    return parts[0] if len(parts) == 1 else LogprobTensors.concatenate(parts)


def _gather(logits: Tensor, token_ids: Tensor, k: int, logsumexp: Callable[[Tensor], Tensor]) -> LogprobTensors:
    total = logsumexp(logits)[:, None]
    logits = logits.float()
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=1) + 1
    if k:
        best = _best(logits, k)
        token_ids = torch.cat([token_ids[:, None], best], dim=1)
        chosen = logits.gather(1, token_ids)
    else:
        token_ids = token_ids[:, None]
    return LogprobTensors(token_ids, chosen - total, ranks)


def _best(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest of logits [n, vocab_size] float32, best first, of equals the lowest id first.

    Logits in bf16 are often equal and `topk` alone may pick any of them, so value and id are compared as one int64.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns -0 into +0, which equals it
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that order as the floats do
    key = (ordered.long() << 32) + torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    return vocab_size - 1 - (key.topk(k, dim=1).values & 0xFFFFFFFF)
