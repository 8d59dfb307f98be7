"""Lets a head guess from the model's hidden states, and then from its own (EAGLE, arXiv 2401.15077)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.table import KernelTable
from headrace.spec_decode.drafter import Tables, rows_of
from headrace.spec_decode.passes import Passes, most_lag, within


class HeadDrafter:
    """Lets a head guess, whose input at position p is the hidden state of p and the token at p + 1.

    Its first pass runs over all tokens of a step, behind sampling, for only then the token behind the last one is
    there. So it fills its cache for prompts too, and replaces what it had computed from hidden states of its own.
    """

    num_layers = 1

    def __init__(
        self,
        head: Any,
        specs: tuple[AttentionSpec | None, ...],
        num_drafts: int,
        dtype: torch.dtype,
        kernels: KernelTable,
    ) -> None:
        """`head`: models/heads.py's, whose layer has the attention `specs`."""
        self.head, self.num_drafts, self.dtype = head, num_drafts, dtype
        self.passes = Passes.of(kernels, specs, ahead=1)
        self.most_lag = most_lag(specs, num_drafts)

    @property
    def taps(self) -> bool:
        """True if it reads what layers of the model read, not the last hidden states."""
        return bool(self.head.taps)

    def hidden_states(self, num_tokens: int, device: torch.device) -> Tensor:
        return torch.zeros(num_tokens, self.head.reads, dtype=self.dtype, device=device)

    def fill(self, input_ids: Tensor, metadata: AttentionMetadata, tables: Tables) -> None:
        """Do nothing: it computes prompts behind the model."""

    def catch_up(self, tables: Tables, rows: np.ndarray, lags: np.ndarray, hidden: Tensor | None) -> None:
        """Fill the cache alone: what it holds of a token depends on no other token's, since a head has one layer."""
        assert hidden is not None
        inputs = self.passes.over_missing(tables, rows, lags, lags, tables.max_model_len)
        self.head.fill(*inputs, tables.caches, hidden)

    def propose(self, tables: Tables, batch: Batch, sampled: Tensor | None) -> Tensor | None:
        assert tables.hidden is not None
        input_ids, positions, metadata = self.passes.over_step(tables, batch)
        of_model = tables.hidden[: batch.num_tokens]
        if not self.num_drafts:
            self.head.fill(input_ids, positions, metadata, tables.caches, of_model)
            return None
        normed, hidden = self.head(input_ids, positions, metadata, tables.caches, of_model)
        rows, longest = rows_of(batch, sampled), batch.max_seq_len + 1
        known = tables.num_known.index_select(0, rows)
        last = _last_known(batch, sampled, known)
        normed, hidden = normed.index_select(0, last), hidden.index_select(0, last)
        guess = self.passes.draw(tables, rows, known, self.head.compute_logits(normed))
        for place in range(1, self.num_drafts):
            # a token that has no successor yet is no input, so that one less is computed than is known
            these, lengths = within(tables, rows, known + place - 1, 1, tables.max_model_len)
            input_ids, positions, metadata = self.passes.over_last(tables, these, lengths, 1, longest + self.num_drafts)
            normed, hidden = self.head(input_ids, positions, metadata, tables.caches, hidden, False)
            guess = self.passes.draw(tables, these, lengths + 1, self.head.compute_logits(normed))
        return guess


def _last_known(batch: Batch, sampled: Tensor | None, known: Tensor) -> Tensor:
    """Return where among the step's tokens is the last one, of each request that sampled, that is known and has a known
    one behind it # [S]. Tokens behind it are wrong drafts; padding has one somewhere in its row."""
    starts, ends, computed = batch.query_start_loc[:-1], batch.query_start_loc[1:], batch.num_computed
    if sampled is not None:
        starts, ends, computed = (one.index_select(0, sampled) for one in (starts, ends, computed))
    last: Tensor = torch.minimum(torch.maximum(starts + known - 2 - computed, starts), ends - 1)
    return last
