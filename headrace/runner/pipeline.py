"""Joins the stages of a pipeline: hidden states go from each to the next, sampled tokens from the last to the first.

All stages are given the same steps in the same order, so each knows what the others send. Tokens go back without the
host: the first stage writes them into its rows before a step that reads them. A row may pass to another request while a
token of the one before is on its way; that token is then received and thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.runner.input_batch import Batch
from headrace.sampling.transfer import to_device
from headrace.stages import WHOLE, Stage
from headrace.step import SchedulerOutput


@dataclass(frozen=True)
class _Awaited:
    """Names the places of tokens that a step samples on the last stage, and that the first has not received."""

    rows: np.ndarray
    """[n] int64; the scratch row where a row has passed to another request"""
    positions: np.ndarray
    """[n] int64"""


class Pipeline:
    """Holds one rank's connections to the stages before and behind it. With one stage there is nothing to pass on."""

    def __init__(self, stage: Stage = WHOLE, mesh: Mesh | None = None, hidden_size: int = 0) -> None:
        mesh = mesh or Mesh()
        self.stage = stage
        self.hidden_size = hidden_size
        self.group = mesh.pp
        self._back = mesh.back
        self._hidden = _Outgoing(mesh.pp)
        self._tokens = _Outgoing(mesh.back)
        self._awaited: deque[_Awaited] = deque()
        """on the first stage, oldest first"""

    @property
    def is_split(self) -> bool:
        """True if there are other stages."""
        return self.group.size > 1

    def buffer(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return memory for the hidden states of the stage before # [num_tokens, hidden_size], zeros; None on the first
        stage."""
        return None if self.stage.is_first else torch.zeros(num_tokens, self.hidden_size, dtype=dtype, device=device)

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden` [num_tokens, hidden_size] with what the stage before computed."""
        return self.group.receive(hidden, self.group.rank - 1)

    def send(self, hidden: Tensor) -> None:
        """Begin to pass `hidden` [num_tokens, hidden_size] on to the next stage. It may be overwritten afterwards."""
        self._hidden.send(hidden.clone(), self.group.rank + 1)

    def through(self, compute: Callable[[Any], Tensor], inputs: Tensor, num_tokens: int, like: Tensor) -> Tensor:
        """Return compute(inputs), on later stages of what the stage before returns; `like` has dtype and device of
        hidden states."""
        if not self.stage.is_first:
            inputs = self.receive(like.new_empty(num_tokens, self.hidden_size))
        hidden = compute(inputs)
        if not self.stage.is_last:
            self.send(hidden)
        return hidden

    def settle(self, step: SchedulerOutput, token_table: Tensor) -> None:
        """Receive the tokens that `step` reads into `token_table` [max_rows + 1, length]; call it before the step
        changes rows. Those of the step as many steps ago as there are stages are there by now, and are received too."""
        if not self._awaited:
            return
        scratch = token_table.shape[0] - 1
        passed = [*step.freed_rows, *(new.row for new in step.new_rows)]
        if passed:
            for awaited in self._awaited:
                awaited.rows[np.isin(awaited.rows, passed)] = scratch
        needed = len(self._awaited) - self.group.size + 1
        read = [row for row in step.rows if row != scratch]
        for number, awaited in enumerate(self._awaited):
            if number >= needed and np.isin(awaited.rows, read).any():
                needed = number + 1
        for _ in range(needed):
            self._take(self._awaited.popleft(), token_table)

    def expect(self, step: SchedulerOutput) -> None:
        """Remember that the last stage will send the tokens which `step` samples."""
        chosen = np.array(step.samples, dtype=bool)
        if chosen.any():
            rows, computed, counts = (
                np.array(values, dtype=np.int64)[chosen]
                for values in (step.rows, step.num_computed_tokens, step.num_scheduled_tokens)
            )
            self._awaited.append(_Awaited(rows, computed + counts))

    def give_back(self, batch: Batch, token_table: Tensor) -> None:
        """Send the tokens of a step that has just sampled to the first stage."""
        if batch.num_samples:
            self._tokens.send(token_table[batch.sample_rows, batch.sample_positions], 0)

    def _take(self, awaited: _Awaited, token_table: Tensor) -> None:
        device = token_table.device
        tokens = self._back.receive(token_table.new_empty(len(awaited.rows)), self._back.size - 1)
        token_table[to_device(awaited.rows, device), to_device(awaited.positions, device)] = tokens


class _Outgoing:
    """Sends tensors that nobody waits for, and keeps those that have not left yet."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._leaving: deque[Callable[[], Any]] = deque()
        self._most = 2 * group.size
        """steps that may be between two stages, with one to spare for each"""

    def send(self, tensor: Tensor, to: int) -> None:
        if len(self._leaving) > self._most:
            self._leaving.popleft()()
        self._leaving.append(self._group.send(tensor, to))
