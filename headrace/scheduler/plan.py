"""Collects what one step will run while that is decided, and turns it into a SchedulerOutput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.request import Request, RequestStatus
from headrace.scheduler.config import SchedulerConfig
from headrace.step import AdapterLoad, BlockUpdate, NewRow, SchedulerOutput, StateCopy


class MaskedRequest(NamedTuple):
    """Names a request that a step samples for under a grammar."""

    request: Request
    row: int
    drafts: Sequence[int]
    """Those that the step computes. Each has a mask of its own behind it."""


@dataclass(slots=True)
class StepPlan:
    """Holds a step under construction. Requests hold their new blocks already; their counts change with `commit`."""

    decodes: list[Request] = field(default_factory=list)
    """Requests that compute their last known token (and drafts behind it) and sample, in running order."""
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that compute a part of their prompt, or what a preemption took, and how many tokens of it."""
    new_rows: list[NewRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    preempted: bool = False
    """True once a request was preempted because blocks were short."""
    num_drafts: int = 0
    """Drafts that each decode computes, so that all have as many. One that has none, since its prompt ends with this
    token, computes what is left in its row, as it does where guesses are wrong."""

    def going_on(self) -> list[Request]:
        """Return the requests for which the step samples."""
        ending = (one for one, count in self.chunks if one.num_computed_tokens + count == one.num_tokens)
        return [*self.decodes, *ending]

    def requests(self) -> list[Request]:
        """Return all requests of the step in its order: decodes, then other single tokens, then longer chunks."""
        self.chunks.sort(key=lambda chunk: chunk[1] > 1)
        return [*self.decodes, *(request for request, _ in self.chunks)]

    def add_row(self, request: Request) -> None:
        """Fill the row that a request has just got."""
        if request.status is RequestStatus.WAITING:
            request.own_tokens()
        core = request.core_request
        output = request.token_ids[request.num_prompt_tokens :]
        stops = core.stop_token_ids if request.matcher is None else []
        self.new_rows.append(
            NewRow(
                request.row, core.prompt_token_ids, core.params, stops, core.bad_words_token_ids, core.seed, output,
                core.pools == "tokens", request.adapter_slot,
            )
        )  # fmt: skip

    def drop(self, victim: Request) -> None:
        """Take a request that is preempted out of the step."""
        if victim in self.decodes:
            self.decodes.remove(victim)
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not victim]
        self.block_updates = [update for update in self.block_updates if update.row != victim.row]

    def commit(
        self, number: int, config: SchedulerConfig, freed_rows: list[int], cleared: list[int], copies: list[StateCopy],
        grammars: bool, num_guesses: int, loads: list[AdapterLoad],
    ) -> SchedulerOutput:  # fmt: skip
        """Count the planned tokens as computed and in flight, and return the plan as step `number`. `grammars`: some
        requests may have one. `num_guesses`: tokens to guess behind each that samples."""
        decodes, num_drafts = self.decodes, []
        rows = [request.row for request in decodes]
        computed = [request.num_computed_tokens for request in decodes]
        counts, samples = [1] * len(decodes), [True] * len(decodes)
        if self.num_drafts:
            counts = [config.end_of_decode(done, self.num_drafts) - done for done in computed]
            num_drafts = [count - 1 for count in counts]
            if grammars:
                num_drafts = [
                    drafts if request.knows_drafts(drafts) else 0
                    for request, drafts in zip(decodes, num_drafts, strict=True)
                ]
                counts = [1 + drafts for drafts in num_drafts]
            for request, drafts in zip(decodes, num_drafts, strict=True):
                request.num_computed_tokens += drafts
                request.num_inflight += drafts
            num_drafts = num_drafts + [0] * len(self.chunks) if any(num_drafts) else []
        for request in decodes:
            request.num_computed_tokens += 1
            request.num_inflight += 1
            request.sampled_step = number
        for request, count in self.chunks:
            rows.append(request.row)
            computed.append(request.num_computed_tokens)
            counts.append(count)
            request.num_computed_tokens += count
            reaches_end = request.num_computed_tokens == request.num_tokens
            samples.append(reaches_end)
            request.num_inflight += reaches_end
            if reaches_end:
                request.sampled_step = number
        requests = self.requests()
        if config.num_drafts:
            for request, sampled in zip(requests, samples, strict=True):
                request.num_guesses = num_guesses if sampled else 0
        masked = grammars and any(
            request.matcher is not None and sampled for request, sampled in zip(requests, samples, strict=True)
        )
        return SchedulerOutput(
            number, self.new_rows, freed_rows, self.block_updates, rows, computed, counts, samples, cleared, copies,
            num_drafts, masked, num_guesses, loads,
        )  # fmt: skip
