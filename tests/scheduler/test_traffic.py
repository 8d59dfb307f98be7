"""Thousands of random traffic histories against a fake device that knows what every read must find.

Each history draws limits (tiny pools, odd block sizes, both policies, chunking and caching on and off, one to three
steps in flight, up to four drafts a decode, always as many or not, all of them right, wrong or either), what layers
keep (everything, windows, chunks, states, several of these over shared pages), who sends what (one by one, several
together, by several clients) and a list of operations: add, schedule, take a result, abort, fail. A third of the
requests has a grammar, which is complete or fails after some tokens. After every operation the books must balance; at
the end every request has exactly the tokens its script dictates.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cache_groups import CacheGroup, CacheKind, CacheLayout, same_layout
from headrace.errors import RequestError
from headrace.request import EngineCoreOutput, FinishReason, Request, RequestStatus
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.draft_length import DraftLength
from headrace.scheduler.kv_cache_manager import Prefix
from headrace.scheduler.scheduler import Scheduler
from headrace.step import RunnerOutput, SchedulerOutput

from .support import FakeDevice, FakeMatcher, Script, make_request

MOST_STEPS = 3000
"""No history here needs as many: one that does is not getting anywhere."""


@dataclass
class Received:
    token_ids: list[int]
    logprobs: list[int]
    prompt_logprobs: list[int]
    finish_reason: FinishReason | None = None
    cut_short: bool = False
    cached: int = 0
    """Tokens of the prefix that the first admission found"""


class Traffic:
    def __init__(
        self, config: SchedulerConfig, scripts: list[Script], depth: int, drafts: str = "right", seed: int = 0
    ) -> None:
        """`seed`: of the costs by which the number of drafts changes; 0: it does not."""
        self.config = config
        self.depth = depth
        length, costs = None, random.Random(seed)
        if seed:
            lengths = sorted({0, -(-config.num_drafts // 2), config.num_drafts})
            length = DraftLength(lengths, lambda *_: 0.1 + costs.random())
        self.scheduler = Scheduler(config, length)
        self.find_cached, self.scheduler.kv_cache.find_cached = self.scheduler.kv_cache.find_cached, self.found
        self.device = FakeDevice(config.layout, scripts, drafts, 1 + config.num_drafts)
        self.upcoming = deque(scripts)
        self.script_of: dict[str, Script] = {}
        self.received: dict[str, Received] = {}
        self.in_flight: deque[tuple[SchedulerOutput, RunnerOutput]] = deque()
        self.admitted: list[str] = []
        self.num_steps = 0
        self.members: dict[int, list[str]] = {}
        """step -> ids of its requests"""

    # ---- operations

    def add(self) -> None:
        if not self.upcoming:
            return
        script = self.upcoming.popleft()
        request = script.request
        self.script_of[request.request_id] = script
        config = self.config
        most = min(len(script.tokens) - 1 + config.num_drafts + config.draft_places, config.max_model_len)
        needed = config.layout.pages_for(most, config.max_num_batched_tokens + config.draft_places)
        if needed > self.config.num_pages:
            with pytest.raises(RequestError, match=f"needs {needed} pages of KV cache"):
                self.scheduler.add_request(request)
            return
        self.scheduler.add_request(request, FakeMatcher(script) if script.complete_after else None)
        self.received[request.request_id] = Received([], [], [])

    def schedule(self) -> bool:
        """Returns whether a step could be made."""
        if len(self.in_flight) >= self.depth:
            self.take_result()
        due = [request for request in self.scheduler.running.items if self.is_due(request)]
        step = self.plan()
        if step is None:
            # With nothing in flight there is no excuse: something can always run.
            assert self.in_flight or not self.scheduler.has_work()
            return False
        assert self.num_steps < MOST_STEPS, "no progress"
        self.check_step(step, due)
        if step.masked:
            while self.in_flight:  # its masks depend on their results
                self.take_result()
            self.check_masks(step)
        self.in_flight.append((step, self.device.execute(step)))
        for request in self.scheduler.running.items:
            owned = zip(self.device.block_tables[request.row], request.block_ids, request.first_blocks, strict=True)
            for table, block_ids, first in owned:
                assert [table[place] for place in range(first, len(block_ids))] == block_ids[first:]
        return True

    def plan(self) -> SchedulerOutput | None:
        """The next step, by number and with whom it should have; idle turns take no number."""
        before = {request.request_id for request in self.scheduler.running.items}
        step = self.scheduler.schedule()
        if step is None:
            return None
        assert step.step == self.num_steps
        self.num_steps += 1
        owners = {request.row: request for request in self.scheduler.requests.values()}
        self.members[step.step] = [owners[row].request_id for row in step.rows]
        for new in step.new_rows:
            request = owners[new.row]
            if not request.num_preemptions:
                self.admitted.append(request.request_id)
                at = step.num_computed_tokens[step.rows.index(new.row)]
                self.received[request.request_id].cached = at
        if self.config.policy == "priority" or self.is_one_by_one:  # else clients take turns
            self.check_order(step, before, {owners[new.row].request_id for new in step.new_rows})
        return step

    def found(self, request: Request) -> Prefix:
        """A prefix is the longest of which every group has what the next query reads."""
        prefix, layout = self.find_cached(request), self.config.layout
        hashes, pools = request.block_hashes, self.scheduler.kv_cache.pages.pools
        most = (request.num_tokens - 1) // layout.block_size
        if not self.config.enable_prefix_caching or request.core_request.params.prompt_logprobs is not None:
            most = 0

        def needed(group: CacheGroup, length: int) -> range:
            if group.is_state:
                return range(length - 1, length)
            at, window = length * layout.block_size, group.window or math.inf
            first = at - at % window if group.kind == "chunk" else at - window + 1
            return range(max(0, first // layout.block_size) if group.window else 0, length)

        def holds(length: int) -> bool:
            groups = zip(layout.groups, pools, strict=True)
            return all(
                pool.find(hashes[place]) is not None for group, pool in groups for place in needed(group, length)
            )

        assert prefix.num_blocks == next((length for length in range(most, 0, -1) if holds(length)), 0)
        return prefix

    def check_order(self, step: SchedulerOutput, before: set[str], new: set[str]) -> None:
        """The last in order give their blocks back, which goes to nobody in the same step; the first are admitted; and
        a prompt is cut where the step is full. `before`: who ran before it; `new`: who has a row since."""
        running, requests = self.scheduler.running.items, self.scheduler.requests.values()
        waiting = [request for request in requests if request.status is not RequestStatus.RUNNING]
        preempted = [request for request in waiting if request.request_id in before]
        assert not preempted or not new or all(request.request_id in new for request in running), "nobody was left"
        for request in preempted:
            assert all(self.place_of(request) > self.place_of(other) for other in running)
        for request in running:
            if request.request_id in new - before:
                assert all(self.place_of(request) < self.place_of(other) for other in waiting)
        config = self.config
        if not (preempted or config.mixed_step_tokens or config.num_drafts or self.scheduler.kv_cache.states):
            assert all(step.samples) or step.num_tokens == config.max_num_batched_tokens

    def place_of(self, request: Request) -> tuple[int, float]:
        return request.core_request.priority * (self.config.policy == "priority"), request.core_request.arrival_time

    @staticmethod
    def is_due(request: Request) -> bool:
        """A decode with a token to compute and room for the next."""
        total = request.num_tokens + request.num_inflight
        return total - request.num_computed_tokens == 1 and total < request.max_total_tokens

    def check_step(self, step: SchedulerOutput, due: list[Request]) -> None:
        assert step.rows
        assert step.num_tokens <= self.config.max_num_batched_tokens
        known = [count - drafts for count, drafts in zip(step.num_scheduled_tokens, step.num_drafts, strict=False)]
        known = known or step.num_scheduled_tokens
        assert known == sorted(known, key=lambda count: count > 1)
        assert set(step.num_drafts) <= {0, max(step.num_drafts, default=0)}
        assert max(step.num_drafts, default=0) <= self.config.num_drafts
        assert {update.row for update in step.block_updates} <= set(step.rows)
        matched = {request.row for request in self.scheduler.running.items if request.matcher is not None}
        sampling = {row for row, samples in zip(step.rows, step.samples, strict=True) if samples}
        assert step.masked == bool(matched & sampling)
        for request in due:
            assert request.row in step.rows or request.status is RequestStatus.PREEMPTED
        by_row = {request.row: request for request in self.scheduler.running.items}
        for row, computed, count in zip(step.rows, step.num_computed_tokens, step.num_scheduled_tokens, strict=True):
            places = min(computed + count + self.config.draft_places, self.config.max_model_len)
            assert by_row[row].num_blocks * self.config.layout.block_size >= places, "guesses have no place"
        owned = [request.row for request in self.scheduler.requests.values() if request.row >= 0]
        assert len(owned) == len(set(owned))
        if not self.config.enable_chunked_prefill:
            assert all(step.samples)

    def check_masks(self, step: SchedulerOutput) -> None:
        """A step is masked if it samples for a request with a grammar, whose matcher has seen all of the output, and
        whose drafts are known."""
        drafts = dict(zip(step.rows, step.num_drafts or [0] * len(step.rows), strict=True))
        for request, row, known in self.scheduler.masked_requests(step):
            script = self.script_of[request.request_id]
            assert isinstance(request.matcher, FakeMatcher)
            assert request.matcher.taken == request.token_ids[request.num_prompt_tokens :]
            places = range(request.num_tokens, request.num_tokens + drafts[row])
            assert list(known) == [self.device.guess(script, place) for place in places]

    def take_result(self) -> None:
        if self.in_flight:
            for output in self.scheduler.update(*self.in_flight.popleft()):
                self.receive(output)

    def receive(self, output: EngineCoreOutput) -> None:
        seen = self.received[output.request_id]
        assert seen.finish_reason is None
        assert not seen.cut_short
        assert output.new_token_ids or output.new_prompt_logprobs or output.finish_reason is FinishReason.ERROR
        seen.token_ids += output.new_token_ids
        seen.logprobs += [entry.token_ids[0] for entry in output.new_logprobs]
        seen.prompt_logprobs += [entry.token_ids[0] for entry in output.new_prompt_logprobs]
        seen.finish_reason = output.finish_reason
        if output.error == "out of words":
            assert self.script_of[output.request_id].expected_output()[1] == "error"
        is_first = len(seen.token_ids) == len(output.new_token_ids) > 0
        assert output.num_cached_tokens == (seen.cached if is_first else 0), "told once, with the first token"

    def abort(self, choice: int) -> None:
        if not self.received:
            return
        request_id = sorted(self.received)[choice % len(self.received)]
        request = self.scheduler.requests.get(request_id)
        if choice % 2 or request is None:
            self.scheduler.abort(request_id)
        else:
            kept = choice % (request.num_output_tokens + 1)
            self.scheduler.abort(request_id, num_output_tokens_kept=kept)
            known = (request.num_prompt_tokens + kept) // self.config.layout.block_size
            for pool in self.scheduler.kv_cache.pages.pools:
                for digest in request.block_hashes[known:]:
                    block = pool.find(digest)
                    assert block is None or pool.ref_count(block) > 0
        self.received[request_id].cut_short = True

    def fail(self, choice: int) -> None:
        """Lose the oldest result, or have the device refuse a step before it does anything of it."""
        if choice % 2:
            step = self.in_flight.popleft()[0] if self.in_flight else None
        else:
            step = self.plan()
        if step is not None:
            lost = [name for name in self.members[step.step] if name in self.scheduler.requests]
            outputs = self.scheduler.fail(step, "out of luck")
            assert [(output.request_id, output.error) for output in outputs] == [(name, "out of luck") for name in lost]
            for output in outputs:
                self.receive(output)

    @property
    def is_one_by_one(self) -> bool:
        """Everything comes from one client, a request at a time."""
        return all(not script.request.parent and not script.request.client for script in self.script_of.values())

    # ---- what must always hold

    def check(self) -> None:
        scheduler = self.scheduler
        self.check_pools()
        running = scheduler.running.items
        assert len(running) <= self.config.max_num_seqs
        partials = [r.core_request for r in running if r.num_tokens + r.num_inflight - r.num_computed_tokens > 1]
        if not scheduler.kv_cache.states:  # else a step computes whole blocks, and leaves their ends to the next
            assert len(partials) <= (1 if self.is_one_by_one else len({(one.client, one.parent) for one in partials}))
        waiting = [r for r in scheduler.requests.values() if r.status is not RequestStatus.RUNNING]
        assert len(scheduler.waiting) == len(waiting)
        assert scheduler.waiting.num_prompt_tokens == sum(request.num_prompt_tokens for request in waiting)
        assert (scheduler.waiting.first in waiting) if waiting else scheduler.waiting.first is None
        assert all((r.row >= 0) == (r.status is RequestStatus.RUNNING) for r in scheduler.requests.values())
        stats = scheduler.stats()
        assert stats.num_running == len(running)

    def check_pools(self) -> None:
        """Free, held and cached blocks of each group are all there are, and held by those who say so."""
        cache, requests = self.scheduler.kv_cache, self.scheduler.requests.values()
        cache.pages.check_invariant()
        for index, (group, pool) in enumerate(zip(cache.layout.groups, cache.pages.pools, strict=True)):
            holders = Counter(one.block for request in requests for one in request.snapshots if one.group == index)
            for request in requests:
                if request.block_ids:
                    held = request.block_ids[index][request.first_blocks[index] :]
                    holders.update(held)
                    most = group.most_blocks(request.num_blocks * group.block_size, self.config.max_num_batched_tokens)
                    lag = -(-self.depth * self.config.max_num_batched_tokens // group.block_size)
                    assert len(held) <= most + lag
            assert pool.num_held == len(holders)
            assert all(pool.ref_count(block) == count for block, count in holders.items())
            if not self.config.enable_prefix_caching:
                assert pool.num_cached == 0

    def check_end(self) -> None:
        assert not self.scheduler.has_work()
        assert self.scheduler.schedule() is None
        assert all(pool.num_held == 0 for pool in self.scheduler.kv_cache.pages.pools)
        assert not self.scheduler.waiting._all.members, "somebody is remembered who has nothing any more"
        assert self.scheduler._num_matched == 0
        for request_id, seen in self.received.items():
            script = self.script_of[request_id]
            tokens, reason = script.expected_output()
            prompt = script.request.prompt_token_ids
            if seen.cut_short or seen.finish_reason is FinishReason.ERROR:
                assert seen.token_ids == tokens[: len(seen.token_ids)]  # drafts before a grammar's failure go with it
                continue
            assert (seen.token_ids, seen.finish_reason) == (tokens, reason)
            params = script.request.params
            assert seen.logprobs == (tokens if params.logprobs is not None else [])
            assert seen.prompt_logprobs == (prompt[1:] if params.prompt_logprobs is not None else [])
        if self.config.policy == "fcfs" and self.is_one_by_one:
            assert self.admitted == sorted(self.admitted), "a later request overtook an earlier one"

    def run(self, operations: list[int], unlucky: int) -> None:
        """Do the operations, then serve what is left; every `unlucky`-th turn a step fails (0: none)."""
        for operation in operations:
            kind, choice = operation % 16, operation // 16
            if kind < 6:
                self.schedule()
            elif kind < 9:
                self.take_result()
            elif kind < 13:
                self.add()
            elif kind < 14:
                self.abort(choice)
            else:
                self.fail(choice)
            self.check()
        while self.upcoming:
            self.add()
        turn = 0
        while self.scheduler.has_work() or self.in_flight:
            turn += 1
            if unlucky and turn % unlucky == 0:
                self.fail(turn // unlucky)
            elif not self.schedule():
                self.take_result()
            self.check()
        self.check_end()


KINDS: tuple[tuple[CacheKind, ...], ...] = (
    ("window",), ("chunk",), ("full", "window"), ("window", "full", "state"), ("chunk", "full"), ("latent", "state"),
    ("state", "window", "chunk"),
)  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, block_size: int) -> CacheLayout:
    """Half of them of layers that are all alike and keep everything. Unlike groups have pages of few blocks."""
    if draw(st.booleans()):
        return same_layout(block_size)
    kinds = draw(st.sampled_from(KINDS))
    counts = [draw(st.integers(1, 4)) if len(kinds) > 1 else 1 for _ in kinds]
    page = math.lcm(*counts)
    groups = []
    for index, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        window = draw(st.integers(1, 20)) if kind in ("window", "chunk") else None
        groups.append(CacheGroup((index,), kind, window, block_size, page // count, count, page // count))
    return CacheLayout(tuple(groups), page)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Half of them tight: prompts run in many chunks and the pool is short of blocks all the time."""
    tight = draw(st.booleans())
    max_model_len = draw(st.integers(12 if tight else 2, 48))
    chunked = tight or draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 5))
    num_drafts = draw(st.sampled_from([0, 0, 1, 2, 3, 4]))
    fewest_tokens = max_num_seqs * (1 + num_drafts)
    if not chunked:
        fewest_tokens = max(fewest_tokens, max_model_len)
    block_size = draw(st.sampled_from([1, 2, 3] if tight else [1, 2, 3, 4, 5, 16, 32, 64]))
    max_num_batched_tokens = fewest_tokens + draw(st.integers(0, 3 if tight else 12))
    layout = draw(layouts(block_size))
    draft_places = draw(st.sampled_from([0, num_drafts]))
    for_one = layout.pages_for(max_model_len, max_num_batched_tokens + draft_places)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        layout=layout,
        num_pages=max(1, for_one + draw(st.integers(-2, 4))),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=chunked,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        mixed_step_tokens=draw(st.none() | st.integers(1, 8)),
        look_ahead=draw(st.booleans()),
        num_drafts=num_drafts,
        draft_places=draft_places,
    )


@st.composite
def script_lists(draw: st.DrawFn, max_model_len: int) -> list[Script]:
    """Requests with prompts of few families, so that prefixes are often shared; ids in order of arrival. Half of the
    lists come one by one from one client."""
    scripts = []
    clients, together = draw(
        st.sampled_from([(False, False), (False, False), (False, True), (True, False), (True, True)])
    )
    for index in range(draw(st.integers(1, 10))):
        family = draw(st.integers(0, 1))
        length = min(draw(st.integers(1, max_model_len - 1)), draw(st.integers(1, max_model_len - 1)))
        max_tokens = draw(st.integers(1, 24))
        options = draw(st.integers(0, 255))
        request = make_request(
            f"r{index}",
            [100 + family * (position // 6) for position in range(length)],
            max_tokens,
            stop_token_ids=[3, 4] if options & 1 else [],
            min_tokens=min(2, max_tokens) if options & 2 else 0,
            cache_salt="salt" if options & 12 == 12 else None,
            prompt_logprobs=0 if options & 48 == 48 else None,
            logprobs=0 if options & 64 else None,
            priority=draw(st.integers(0, 2)),
            arrival_time=float(index),
            seed=index,
            client="ab"[draw(st.integers(0, 1))] if clients else "",
            parent=draw(st.sampled_from(["", "p", "q"])) if together else "",
        )
        grammar = draw(st.sampled_from([(0, 0)] * 4 + [(1, 0), (5, 0), (30, 0), (30, 6)]))
        scripts.append(Script(request, family, max_model_len, *grammar))
    return scripts


def random_traffic(data: st.DataObject) -> None:
    config = data.draw(configs())
    scripts = data.draw(script_lists(config.max_model_len))
    depth = data.draw(st.integers(1, 3))
    operations = data.draw(st.lists(st.integers(0, 255), max_size=50))
    drafts = data.draw(st.sampled_from(["right", "wrong", "random"])) if config.num_drafts else "right"
    unlucky = data.draw(st.sampled_from([0, 0, 3, 7]))
    seed = data.draw(st.sampled_from([0, 1, 2])) if config.num_drafts else 0
    Traffic(config, scripts, depth, drafts, seed).run(operations, unlucky)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_traffic(data: st.DataObject) -> None:
    random_traffic(data)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_more_random_traffic(data: st.DataObject) -> None:
    random_traffic(data)
