"""Lets a drafter guess behind each step, as many tokens as the step says, from graphs where the step ran from one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.graph_sizes import GraphSettings
from headrace.runner.cuda_graph import DRAFTING, Drafting, GraphDevice, Shape, StepGraphs
from headrace.runner.pending import Notes
from headrace.sampling.transfer import to_device
from headrace.spec_decode.drafter import Drafter, Tables, shortened
from headrace.speculation import KEPT_TOKENS
from headrace.step import SchedulerOutput

MANY = 64
"""Requests at once among which guessing seldom pays, so that what heads would read for later guesses is not worth it"""


class Guesses:
    """Holds a drafter for each number of guesses that steps ask for, its graphs, and how far it lags behind each row:
    steps that ask for none leave out the tokens that it would have computed. If it reads the model's hidden states,
    those of what is left out are kept."""

    def __init__(self, drafter: Drafter, tables: Tables, write_lengths: Callable[[], None]) -> None:
        """`write_lengths`: what brings tables.num_known up to date."""
        self._write_lengths = write_lengths
        self._drafters = {drafter.num_drafts: drafter}
        self._longest, self._tables = drafter, tables
        self._lags = np.zeros(len(tables.token_table), dtype=np.int64)
        hidden = tables.hidden
        self._kept = None if hidden is None else hidden.new_empty(KEPT_TOKENS, hidden.shape[1])
        self._rows_kept: list[np.ndarray] = []
        """of each step that is left out, the rows whose hidden states `_kept` holds, in its order"""
        self._num_kept = 0
        self._graphs: dict[int, StepGraphs] = {}
        self._captures: tuple[GraphSettings, GraphDevice, Notes] | None = None

    def renew_graphs(self, settings: GraphSettings | None, device: GraphDevice | None, notes: Notes) -> None:
        """Free all graphs; they are captured again as they are used."""
        self._graphs.clear()
        self._captures = None
        if settings is not None and device is not None and settings.decode == "full" and self._longest.num_layers:
            self._captures = settings, device, notes

    def catch_up(self, step: SchedulerOutput) -> None:
        """Let the drafter take in what it has left out, before `step` changes rows and blocks: a draft model where the
        step asks for guesses. One that reads hidden states does it unless this step is left out too and frees no row:
        so there is room for them, and blocks that others find in the prefix cache are whole. Behind MANY rows it takes
        in the newest alone, where the step asks for guesses: the others stay holes in its cache."""
        lags, reads = self._lags, self._kept is not None
        lags[-1] = 0  # that row is no request's
        if not reads:
            lags[step.freed_rows] = 0
        due = step.num_guesses > 0 or (reads and (bool(step.freed_rows) or not self._may_leave_out(step)))
        if not due:
            return
        rows = np.flatnonzero(lags)
        if len(rows) and (step.num_guesses or len(rows) < MANY):
            self._write_lengths()
            self._longest.catch_up(self._tables, rows, lags[rows], self._hidden())
        lags[rows] = 0
        self._rows_kept.clear()
        self._num_kept = 0

    def _hidden(self) -> Tensor | None:
        """Return the hidden states that are kept, row by row; None: the drafter reads none."""
        if self._kept is None:
            return None
        places = np.concatenate(self._rows_kept).argsort(kind="stable")[: self._lags.sum()]  # the last row's go last
        return self._kept.index_select(0, to_device(places, self._kept.device))

    def _may_leave_out(self, step: SchedulerOutput) -> bool:
        """Tell whether a step may be left out of what reads hidden states: one of decodes without drafts."""
        count = len(step.rows)
        if step.num_guesses or step.num_drafts or step.num_tokens != count or not all(step.samples):
            return False
        return self._num_kept + count <= KEPT_TOKENS and int(self._lags.max()) < self._longest.most_lag

    def make(self, step: SchedulerOutput, batch: Batch, shape: Shape | None) -> None:
        """Guess `step.num_guesses` tokens behind each row that sampled in a step, which ran from the graph of `shape`,
        if any. What follows decodes that verify other numbers of guesses is not captured: it comes up once a trial."""
        count, device = step.num_guesses if batch.num_samples else 0, batch.rows.device
        if not count and (self._kept is None or self._may_leave_out(step)):
            self._leave_out(np.array(step.rows)[np.array(step.samples)])
        elif count and self._captures is not None and shape is not None and shape.decodes_with(count):
            self._graphs_of(count).run(shape._replace(kind=DRAFTING), batch)
        else:
            sampled = None if batch.decode_only else to_device(np.flatnonzero(step.samples), device)
            self._drafter_of(count).propose(self._tables, batch, sampled)

    def _leave_out(self, rows: np.ndarray) -> None:
        if not self._longest.num_layers:
            return
        self._lags[rows] += 1
        if self._kept is not None and self._tables.hidden is not None:
            begin, self._num_kept = self._num_kept, self._num_kept + len(rows)
            self._kept[begin : self._num_kept].copy_(self._tables.hidden[: len(rows)])
            self._rows_kept.append(rows)

    def _drafter_of(self, count: int) -> Drafter:
        if count not in self._drafters:
            self._drafters[count] = shortened(self._longest, count)
        return self._drafters[count]

    def _graphs_of(self, count: int) -> StepGraphs:
        if count not in self._graphs:
            assert self._captures is not None
            settings, device, notes = self._captures
            drafting = Drafting(self._drafter_of(count), self._tables)
            self._graphs[count] = StepGraphs(settings, drafting, device, notes)
        return self._graphs[count]
