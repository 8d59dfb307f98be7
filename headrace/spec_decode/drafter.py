"""Defines what the runner needs of whatever guesses tokens, and what it hands to it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.sampling.state import SamplingState


@dataclass(frozen=True)
class Tables:
    """Holds the runner's tables of rows that a drafter reads and writes, at addresses that stay."""

    token_table: Tensor
    """[max_rows + 1, max_model_len + num_drafts + 1] int32; drafts go behind the known tokens of a row. The last row
    belongs to no request"""
    num_known: Tensor
    """[max_rows + 1] int32"""
    sampling: SamplingState
    """the sampling parameters of each row"""
    block_tables: tuple[Tensor, ...]
    """of each cache group, [max_rows + 1, max_blocks] int32"""
    block_sizes: tuple[int, ...]
    """tokens of a block of each group"""
    caches: list[Tensor | None]
    """of the drafter's own layers"""
    max_model_len: int
    hidden: Tensor | None = None
    """[tokens of the largest step, numbers], what `hidden_states` returned: the model's hidden states of the last step.
    Graphs' own memory would be gone when the next one is replayed"""


class Drafter(Protocol):
    """Guesses the tokens that follow the known ones of a row. Wrong guesses cost time and nothing else."""

    num_drafts: int
    """Guesses for each row."""

    most_lag: int
    """Tokens of a row that it may leave out, at most, and still catch up with."""

    @property
    def num_layers(self) -> int:
        """Layers of its own, which have caches behind those of the model's layers."""
        ...

    @property
    def taps(self) -> bool:
        """True if the model itself writes what some of its layers read to tables.hidden; else that gets the hidden
        states after the last norm."""
        ...

    def hidden_states(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return memory for what it reads of the model's hidden states of so many tokens; None: it reads none."""
        ...

    def fill(self, input_ids: Tensor, metadata: AttentionMetadata, tables: Tables) -> None:
        """Take in the tokens of a step that has more than decodes, before the model does. It may be captured in a
        graph with the model."""
        ...

    def propose(self, tables: Tables, batch: Batch, sampled: Tensor | None) -> Tensor | None:
        """Write guesses to the `num_drafts` places of tables.token_table behind the tables.num_known tokens of each
        row that sampled: of the requests of `batch` with the numbers `sampled` [S] int64; None: of all. The last row
        of the tables may occur several times. Return the last guesses # [S], if it has layers and any row sampled.

        It is called after steps that sample and ask for guesses. If it reads hidden states, a copy of it that makes no
        guesses takes in the others, but those that it catches up with. With layers it is captured in a graph for steps
        of decodes. It must not run out of memory: the step would be computed again, though its tokens are known
        already."""
        ...

    def catch_up(self, tables: Tables, rows: np.ndarray, lags: np.ndarray, hidden: Tensor | None) -> None:
        """Take in what steps computed behind which nothing was guessed, if it has layers: of each row in `rows` the
        `lags` tokens before the last known one. `hidden`: the model's hidden states of these, row by row, if it reads
        any. It is called before a step."""
        ...


D = TypeVar("D", bound=Drafter)


def shortened(drafter: D, num_drafts: int) -> D:
    """Return a drafter that makes fewer guesses, and shares all else with `drafter`."""
    other = copy.copy(drafter)
    other.num_drafts = num_drafts
    return other


def rows_of(batch: Batch, sampled: Tensor | None) -> Tensor:
    """Return the rows that sampled # [S] int32."""
    return batch.rows if sampled is None else batch.rows.index_select(0, sampled)
