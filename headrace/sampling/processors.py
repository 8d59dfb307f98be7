"""Applies penalties to batched logits, in place, and in chunks of rows, so that the scratch memory is bounded. A row
that did not ask for them keeps its logits bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23
"""Elements of scratch memory used at once (at most 32 bytes each)"""


def apply_penalties_(
    logits: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    tokens: Tensor,
    rows: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
) -> None:
    """Apply repetition penalties to tokens of prompt and output, then frequency and presence penalties to output
    tokens.

    logits [n, vocab_size] float32; repetition, frequency, presence [n] float32; tokens [max_rows, width] int32: known
    tokens of each row, wide enough for every num_tokens; rows, num_tokens, num_prompt_tokens [n] integers.
    """
    num_reqs, vocab_size = logits.shape
    width = tokens.shape[1]
    positions = torch.arange(width, device=logits.device)
    step = max(1, CHUNK_ELEMENTS // max(vocab_size, width))
    for start in range(0, num_reqs, step):
        part = slice(start, start + step)
        ids = tokens.index_select(0, rows[part])
        # Entries past num_tokens are left over from earlier owners of the row.
        known = (positions < num_tokens[part, None]) & (ids < vocab_size)
        sampled = known & (positions >= num_prompt_tokens[part, None])
        index = ids.long().clamp_(0, vocab_size - 1)
        zeros = torch.zeros(index.shape[0], vocab_size, dtype=torch.int32, device=logits.device)
        seen = zeros.scatter_add(1, index, known.int()) > 0
        counts = zeros.scatter_add_(1, index, sampled.int())
        values = logits[part]
        factor = repetition[part, None]
        repeated = torch.where(values > 0, values / factor, values * factor)
        torch.where(seen, repeated, values, out=values)
        values -= frequency[part, None] * counts
        values -= presence[part, None] * (counts > 0)
