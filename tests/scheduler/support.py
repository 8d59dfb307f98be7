"""What the scheduler's tests share: short ways to say "a scheduler", "a request", "one step", and a fake device.

The fake device keeps what a real one keeps (token rows, block tables, KV slots, states), but the KV of a position, and
the state behind it, is a digest of all tokens up to it. So it can tell whether a step reads what it should: a wrong
prefix hit, a block given away too early or a stale block table shows up as a wrong digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cache_groups import CacheLayout, same_layout
from headrace.request import EngineCoreOutput, EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import Logprobs, NewRow, RunnerOutput, SchedulerOutput

FILLER = 7
"""The token that `results` samples unless told otherwise."""


def make_scheduler(**changes: Any) -> Scheduler:
    """Roomy unless said: 4 rows, 64 tokens a step, 16 blocks of 4 tokens."""
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "layout": same_layout(changes.pop("block_size", 4)),
        "num_pages": changes.pop("num_blocks", 16),
    }
    return Scheduler(SchedulerConfig(**settings | changes))


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_tokens: int = 8,
    *,
    stop_token_ids: list[int] | None = None,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    seed: int = 0,
    client: str = "",
    parent: str = "",
    **params: Any,
) -> EngineCoreRequest:
    """`prompt`: token ids, or how many of 100, 101, 102, ... `stop_token_ids`: the model's (eos) and the user's."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=stop_token_ids or [],
        priority=priority,
        arrival_time=arrival_time,
        cache_salt=cache_salt,
        client=client,
        parent=parent,
    )


def results(step: SchedulerOutput, token: int = FILLER) -> RunnerOutput:
    """The result of a step in which every sample gave `token`."""
    return RunnerOutput(step.step, [token] * sum(step.samples))


def run_step(scheduler: Scheduler, token: int = FILLER) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Schedule one step, which must be possible, and close it."""
    step = scheduler.schedule()
    assert step is not None
    return step, scheduler.update(step, results(step, token))


def run_to_end(scheduler: Scheduler, token: int = FILLER) -> list[EngineCoreOutput]:
    outputs = []
    while scheduler.has_work():
        outputs += run_step(scheduler, token)[1]
    return outputs


def batch(scheduler: Scheduler, step: SchedulerOutput) -> dict[str, int]:
    """Request id -> tokens in this step, in batch order."""
    owners = {request.row: request.request_id for request in scheduler.requests.values()}
    return {owners[row]: count for row, count in zip(step.rows, step.num_scheduled_tokens, strict=True)}


@dataclass
class Script:
    """What one request is, and every token a faithful device would give it."""

    request: EngineCoreRequest
    outcome: int
    """Scripts of equal outcome sample equal tokens at equal positions."""
    max_model_len: int
    complete_after: int = 0
    """How many output tokens its grammar describes; 0: it has no grammar."""
    broken_after: int = 0
    """With how many output tokens its grammar fails; 0: it does not."""

    def __post_init__(self) -> None:
        prompt = self.request.prompt_token_ids
        length = min(len(prompt) + self.request.max_tokens, self.max_model_len)
        self.tokens = prompt + [self.sampled(position) for position in range(len(prompt), length)]
        digest = hash(self.request.cache_salt)
        self.digests = [digest := hash((digest, token)) for token in self.tokens]

    def sampled(self, position: int) -> int:
        return hash((self.outcome, position)) % 17

    def expected_output(self) -> tuple[list[int], str]:
        """Tokens and finish reason, had it run alone."""
        output = self.tokens[len(self.request.prompt_token_ids) :]
        for count, token in enumerate(output, start=1):
            if token in self.request.stop_token_ids:
                if self.complete_after or count >= self.request.params.min_tokens:
                    return output[:count], "stop"
            elif count == self.broken_after:
                return output[: count - 1], "error"
            if count == self.complete_after:
                return output[:count], "stop"
        return output, "length"


class FakeMatcher:
    """Is complete, or fails, after as many tokens as its script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.taken: list[int] = []
        self.finished = False
        self.error = ""

    def advance(self, token_ids: Sequence[int]) -> int:
        for place, token in enumerate(token_ids):
            if self.finished or self.error:
                return place
            self.taken.append(token)
            if len(self.taken) == self.script.broken_after:
                self.error = "out of words"
                return place
            self.finished = len(self.taken) == self.script.complete_after
        return len(token_ids)


class FakeDevice:
    """Runs steps at once, in the order given. `scripts[seed]` is the request whose NewRow carries that seed.

    Drafts are guessed as `drafts` says: `right` and `wrong` always are, `random` ones about half of the time.
    """

    def __init__(self, layout: CacheLayout, scripts: list[Script], drafts: str = "right", slots: int = 1) -> None:
        """`slots`: states that a request keeps."""
        self.layout, self.slots = layout, slots
        self.scripts = scripts
        self.drafts = drafts
        self.owner: dict[int, Script] = {}
        self.tokens: dict[int, list[int]] = {}
        self.num_guesses: dict[int, int] = {}
        """row -> how many drafts are behind its newest token"""
        self.block_tables: dict[int, list[dict[int, int]]] = {}
        """row -> of each group: place -> block"""
        self.kv: dict[tuple[int, int, int], int] = {}
        """(group, block, place or slot in it) -> digest of the position, or of the last one that a state has seen"""
        self.writer: dict[int, int] = {}
        """page -> the group whose numbers are in it"""

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        for row in step.freed_rows:
            self.owner.pop(row, None)  # told again after a failed step
        for new in step.new_rows:
            assert new.row not in self.owner, "a row with two owners"
            script = self.owner[new.row] = self.scripts[new.seed]
            asked, output = script.request, new.output_token_ids
            stops = [] if script.complete_after else asked.stop_token_ids  # else its grammar says where it ends
            assert new == NewRow(new.row, asked.prompt_token_ids, asked.params, stops, [], asked.seed, output)
            self.tokens[new.row] = asked.prompt_token_ids + output
            assert self.tokens[new.row] == script.tokens[: len(self.tokens[new.row])]
            self.num_guesses[new.row] = 0
            self.block_tables[new.row] = [{} for _ in self.layout.groups]
        self._clear(step.cleared_pages)
        for copy in step.state_copies:
            assert self.layout.groups[copy.group].is_state
            for slot in range(self.slots):
                if (held := self.kv.get((copy.group, copy.source, slot))) is not None:
                    self._put(copy.group, copy.target, slot, held)
        for update in step.block_updates:
            table, told = self.block_tables[update.row][update.group], dict(enumerate(update.block_ids, update.start))
            assert told
            assert not told.items() & table.items(), "told twice"
            table.update(told)
        assert len(set(step.rows)) == len(step.rows)
        batch = []
        for row, bound, count, samples, drafts in zip(
            step.rows, step.num_computed_tokens, step.num_scheduled_tokens, step.samples,
            step.num_drafts or [0] * len(step.rows), strict=True,
        ):  # fmt: skip
            computed = min(bound, len(self.tokens[row]) - 1)  # the host knows a bound
            assert computed == bound or samples, "a prompt whose length the host does not know"
            batch.append((row, computed, count, samples, drafts))
        assert not any(step.num_drafts) or max(step.num_drafts) <= max(self.num_guesses[row] for row in step.rows)
        for row, computed, count, _, drafts in batch:
            self._write(row, computed, count - drafts, drafts)
        for row, computed, count, _, drafts in batch:
            self._check_reads(row, computed, computed + count - drafts)
        return self._sample(step, batch)

    def _guessed(self, row: int, position: int) -> int:
        return self.guess(self.owner[row], position)

    def guess(self, script: Script, position: int) -> int:
        """The draft for a position: the token that will be sampled there, or another."""
        is_right = {"right": True, "wrong": False, "random": hash((position, script.outcome)) % 2 == 0}[self.drafts]
        return script.sampled(position) + (not is_right)

    def _clear(self, pages: list[int]) -> None:
        for page in pages:
            self.writer.pop(page, None)
            for group, _ in enumerate(self.layout.groups):
                blocks = self.layout.blocks(group, page)
                for slot in [slot for slot in self.kv if slot[0] == group and slot[1] in blocks]:
                    del self.kv[slot]

    def _put(self, group: int, block: int, place: int, digest: int) -> None:
        page = block // self.layout.groups[group].blocks_per_page
        assert self.writer.setdefault(page, group) == group, "another group's numbers are in the page"
        self.kv[group, block, place] = digest

    def _write(self, row: int, computed: int, count: int, drafts: int) -> None:
        script, tokens = self.owner[row], self.tokens[row]
        assert count >= 1
        assert computed + count <= len(tokens), "a step computes tokens that nobody knows yet"
        assert tokens[: computed + count] == script.tokens[: computed + count]
        assert not drafts or computed + count == len(tokens)
        digests, right = script.digests[: computed + count], True
        for position in range(len(tokens), len(tokens) + drafts):
            right = right and position < len(script.tokens) and self._guessed(row, position) == script.tokens[position]
            digests.append(script.digests[position] if right else -1)
        for index, (group, table) in enumerate(zip(self.layout.groups, self.block_tables[row], strict=True)):
            if group.is_state:
                if computed:
                    before = index, table[0], (computed - 1) % self.slots
                    assert self.kv.get(before) == script.digests[computed - 1], "not its state"
                end = computed + count + drafts
                for position in range(computed if count + drafts <= self.slots else end - 1, end):
                    self._put(index, table[0], position % self.slots, digests[position])
                continue
            for position in range(computed, computed + count + drafts):
                block = table[position // group.block_size]
                self._put(index, block, position % group.block_size, digests[position])

    def _check_reads(self, row: int, start: int, end: int) -> None:
        """Every key that a query of a step from `start` on sees."""
        digests = self.owner[row].digests
        for index, (group, table) in enumerate(zip(self.layout.groups, self.block_tables[row], strict=True)):
            if group.is_state:
                continue
            first = 0
            if group.window is not None:
                first = start // group.window * group.window if group.kind == "chunk" else start - group.window + 1
            for position in range(max(0, first), end):
                slot = index, table[position // group.block_size], position % group.block_size
                assert self.kv.get(slot) == digests[position], f"row {row} reads KV that is not its own at {position}"

    def _sample(self, step: SchedulerOutput, batch: list[tuple[int, int, int, bool, int]]) -> RunnerOutput:
        sampled: list[int] = []
        logprobs: list[Logprobs | None] = []
        num_sampled: list[int] = []
        proposed: dict[int, list[int]] = {}
        prompt_logprobs: dict[int, list[Logprobs]] = {}
        for row, computed, count, samples, drafts in batch:
            script, tokens, end = self.owner[row], self.tokens[row], computed + count - drafts
            params, prompt = script.request.params, script.request.prompt_token_ids
            if params.prompt_logprobs is not None and computed < len(prompt) - 1:
                entries = prompt[computed + 1 : end + 1]
                prompt_logprobs[row] = [Logprobs([token], [-1.0], 1) for token in entries]
            assert samples == (end == len(tokens)), "sampling before the last known token, or not at it"
            new = []
            for position in range(end, end + drafts + 1) if samples else ():
                new.append(script.sampled(position))
                if new[-1] != self._guessed(row, position):
                    break
            tokens += new
            sampled += new
            if samples:
                self.num_guesses[row] = step.num_guesses
            if samples and script.complete_after and step.num_guesses:
                proposed[row] = [self._guessed(row, len(tokens) + place) for place in range(step.num_guesses)]
            num_sampled.append(len(new))
            logprobs += [Logprobs([token], [-2.0], 1) if params.logprobs is not None else None for token in new]
        return RunnerOutput(
            step.step, sampled, logprobs if any(logprobs) else [], prompt_logprobs,
            num_sampled=num_sampled if step.num_drafts else [], drafts=proposed,
        )  # fmt: skip
