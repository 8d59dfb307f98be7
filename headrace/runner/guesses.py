"""Lets a drafter guess behind each step, as many tokens as the step says, from graphs where the step ran from one."""

from __future__ import annotations

import numpy as np

from headrace.attention.batch import Batch
from headrace.graph_sizes import GraphSettings
from headrace.runner.cuda_graph import DRAFTING, Drafting, GraphDevice, Shape, StepGraphs
from headrace.runner.pending import Notes
from headrace.sampling.transfer import to_device
from headrace.spec_decode.drafter import Drafter, Tables, shortened
from headrace.step import SchedulerOutput


class Guesses:
    """Holds a drafter for each number of guesses that steps ask for, its graphs, and how far it lags behind each row:
    steps that ask for none leave out the tokens that it would have computed."""

    def __init__(self, drafter: Drafter, tables: Tables) -> None:
        self._drafters = {drafter.num_drafts: drafter}
        self._longest, self._tables = drafter, tables
        self._lags = np.zeros(len(tables.token_table), dtype=np.int64)
        self._graphs: dict[int, StepGraphs] = {}
        self._captures: tuple[GraphSettings, GraphDevice, Notes] | None = None

    def renew_graphs(self, settings: GraphSettings | None, device: GraphDevice | None, notes: Notes) -> None:
        """Free all graphs; they are captured again as they are used."""
        self._graphs.clear()
        self._captures = None
        if settings is not None and device is not None and settings.decode == "full" and self._longest.num_layers:
            self._captures = settings, device, notes

    def make(self, step: SchedulerOutput, batch: Batch, shape: Shape | None) -> None:
        """Guess `step.num_guesses` tokens behind each row that sampled in a step, which ran from the graph of `shape`,
        if any."""
        count, device = step.num_guesses, batch.rows.device
        for new in step.new_rows:
            self._lags[new.row] = 0
        reads = self._tables.hidden is not None  # those of each step, also where nothing is guessed
        if self._longest.num_layers and not reads:
            rows = np.array(step.rows)[np.array(step.samples)]
            if not count:
                self._lags[rows] += 1
            elif (lags := self._lags[rows]).any():
                self._longest.catch_up(self._tables, rows[lags > 0], lags[lags > 0])
                self._lags[rows] = 0
        if not reads and not (count and batch.num_samples):
            return
        if self._captures is not None and shape is not None and shape.decode:
            self._graphs_of(count).run(shape._replace(kind=DRAFTING), batch)
            return
        sampled = None if batch.decode_only else to_device(np.flatnonzero(step.samples), device)
        self._drafter_of(count).propose(self._tables, batch, sampled)

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
