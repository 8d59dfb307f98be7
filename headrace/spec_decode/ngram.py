"""Proposes that a sequence goes on as it did the last time that it ended like this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.spec_decode.drafter import Tables, rows_of


@dataclass
class NgramDrafter:
    """Looks the last tokens of each row up in the row itself (kernels/ngram.py)."""

    num_drafts: int
    least: int
    """fewest tokens that must be alike"""
    most: int
    """tokens that are compared"""
    propose_ngram: Callable[[Tensor, Tensor, Tensor, int, int, int, int], None]
    num_layers = most_lag = 0
    taps = False

    def hidden_states(self, num_tokens: int, device: torch.device) -> None:
        """Return None: the tokens are enough."""

    def fill(self, input_ids: Tensor, metadata: AttentionMetadata, tables: Tables) -> None:
        """Do nothing: the tokens are in the row."""

    def catch_up(self, tables: Tables, rows: np.ndarray, lags: np.ndarray, hidden: Tensor | None) -> None:
        """Do nothing: the tokens are in the row."""

    def propose(self, tables: Tables, batch: Batch, sampled: Tensor | None) -> None:
        rows, most_known = rows_of(batch, sampled), tables.max_model_len
        self.propose_ngram(
            tables.token_table, tables.num_known, rows, most_known, self.num_drafts, self.least, self.most
        )
