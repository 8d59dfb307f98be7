"""Decides, step by step, how many of whose tokens run and which KV blocks they own.

There are no phases. A request is a gap: tokens known, on the host or in flight on the device, minus tokens computed.
A step hands out a budget of tokens so that gaps close: decodes (gap 1) first, then prompts under way, then
admissions, by turns (`fair_queue.py`). Beside decodes, which wait for whatever shares their step, prompts get a smaller
budget. A decode may hold drafts behind its last token; until its result is there all of them count as accepted. Steps
may be scheduled ahead of the results of earlier ones; the device runs them in order, so a row or a block freed here may
be reused by the very next step. Knows only integers: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.cache_groups import CacheLayout
from headrace.errors import ConfigError, RequestError
from headrace.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Request,
    RequestStatus,
    SchedulerStats,
)
from headrace.scheduler.fair_queue import FairQueue
from headrace.scheduler.forecast import LengthForecast
from headrace.scheduler.kv_cache_manager import KVCacheManager
from headrace.scheduler.ordered_queue import OrderedQueue
from headrace.scheduler.room import Room
from headrace.step import (
    LOGITS_NOT_FINITE,
    NO_TOKEN_ALLOWED,
    BlockUpdate,
    Logprobs,
    NewRow,
    RunnerOutput,
    SchedulerOutput,
)

POLICIES = ("fcfs", "priority")
BACKLOG_STEPS = 6
"""Beside decodes a step takes one part in so many of the prompt tokens that wait,"""
RAISED = 2
"""where that is at least so many times `mixed_step_tokens`."""
MOST_A_TURN = 8
"""Choices of one request to the server that a turn is good for, where there are rows for many such requests"""
UNUSABLE = {
    NO_TOKEN_ALLOWED: "no token may be sampled: allowed_token_ids, bad_words and min_tokens forbid them all",
    LOGITS_NOT_FINITE: "the model gave no usable logits: NaN or Inf",
}


@dataclass(frozen=True)
class SchedulerConfig:
    """Raises ConfigError for limits under which some request could never run."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    layout: CacheLayout
    num_pages: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    mixed_step_tokens: int | None = None
    """Tokens of a step in which requests decode, while few prompt tokens wait; None: max_num_batched_tokens"""
    look_ahead: bool = True
    """Admit what can run to its end beside the others; False: what fits now, and preempt later, as vLLM does"""
    num_drafts: int = 0
    """Guessed tokens that each decode computes behind its last known one"""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mixed_step_tokens is not None and self.mixed_step_tokens < 1:
            raise ConfigError(f"mixed_step_tokens must be at least 1, got {self.mixed_step_tokens}")
        if self.policy not in POLICIES:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}; got {self.policy!r}")
        if self.num_drafts < 0:
            raise ConfigError(f"num_drafts must not be negative, got {self.num_drafts}")
        if self.num_drafts and any(group.is_state for group in self.layout.groups):
            raise ConfigError(f"num_drafts must be 0, got {self.num_drafts}: a state cannot take rejected drafts back")
        if self.max_num_seqs * (1 + self.num_drafts) > self.max_num_batched_tokens:
            tokens = f"a token and {self.num_drafts} drafts" if self.num_drafts else "a token"
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request gets {tokens} in every step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}) when chunked prefill is off: a prompt then runs in one step"
            )


@dataclass(slots=True)
class _Plan:
    """A step under construction: nothing but blocks has been given yet."""

    decodes: list[Request] = field(default_factory=list)
    """the last known token of each, which samples, and its drafts; in the order of the running ones"""
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    preempted: bool = False


class _Accepted(NamedTuple):
    """What a request got of a step with drafts."""

    token_ids: list[int]
    logprobs: list[Logprobs]

    def complete(self, output: EngineCoreOutput, request: Request) -> None:
        """All of it, in place of the last token."""
        output.new_token_ids, output.new_logprobs = self.token_ids, self.logprobs
        if request.num_output_tokens == len(self.token_ids):
            output.num_cached_tokens = request.num_cached_tokens


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv_cache = KVCacheManager(
            config.layout, config.num_pages, config.enable_prefix_caching, config.max_num_batched_tokens
        )
        self.requests: dict[str, Request] = {}
        """the unfinished ones, each waiting or running"""
        self.waiting = FairQueue(max(1, min(MOST_A_TURN, config.max_num_seqs // 8)))
        """the preempted ones among them"""
        self.running: OrderedQueue[Request] = OrderedQueue()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []
        """freed since the last step; told with the next one"""
        self._steps: dict[int, list[Request]] = {}
        """step number -> its requests, until its result comes back; rows may belong to others by then"""
        self._next_step = 0
        self._lengths = LengthForecast()
        self._held_back: Request | None = None
        """the first of the waiting, for which there was no room when it was last looked for"""
        self._alone: Request | None = None
        """one that found no room although no other ran: nobody runs beside it any more. Blocks of several may have lain
        in its pages, and kept it from packing its own."""
        self.steps_held = 0
        """so many steps from now it is looked for again, if nobody ends before: who runs comes nearer to its end, and
        what one computes others may find in the prefix cache"""
        self._num_received = 0
        self._num_received_tokens = 0
        self._num_preemptions = 0
        self._cache_queries = 0
        self._cache_hits = 0

    # ---- requests come and go

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue a request. Raises RequestError if it could never run, or if its id is in use."""
        config = self.config
        request = Request(core_request)
        self._num_received += 1
        self._num_received_tokens += request.num_prompt_tokens
        if core_request.request_id in self.requests:
            raise RequestError(f"request_id {core_request.request_id!r} is in use by an unfinished request")
        if not 0 < request.num_prompt_tokens < config.max_model_len:
            raise RequestError(
                f"the prompt must have between 1 and {config.max_model_len - 1} tokens (max_model_len is "
                f"{config.max_model_len}), got {request.num_prompt_tokens}",
                "prompt",
            )
        if core_request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {core_request.max_tokens}", "max_tokens")
        request.max_total_tokens = min(request.num_prompt_tokens + core_request.max_tokens, config.max_model_len)
        # The last token is sampled but never computed, so it needs no place in the cache; drafts behind it do.
        most = min(request.max_total_tokens - 1 + config.num_drafts, config.max_model_len)
        needed = config.layout.pages_for(most, config.max_num_batched_tokens)
        if needed > config.num_pages:
            raise RequestError(
                f"a prompt of {request.num_prompt_tokens} tokens with max_tokens {core_request.max_tokens} needs "
                f"{needed} KV cache blocks, but there are only {config.num_pages}",
                "max_tokens",
            )
        self.requests[request.request_id] = request
        if config.policy == "priority":  # whoever is to run first is said, so that there are no turns to take
            request.order = request.sort_key
            self.waiting.add(request, "", request.request_id)
        else:
            request.order = (0, self.waiting.tick(), request.request_id)
            self.waiting.add(request, core_request.client, core_request.parent or request.request_id)

    def abort(self, request_id: str, num_output_tokens_kept: int | None = None) -> None:
        """End a request without output, whatever its status; an unknown id is one that ended by itself meanwhile.

        `num_output_tokens_kept`: where a stop string found late cut the output. What was computed beyond it leaves the
        prefix cache too.
        """
        request = self.requests.get(request_id)
        if request is None:
            return
        self._finish(request, FinishReason.ABORT)
        if num_output_tokens_kept is not None:
            self._lengths.learn(num_output_tokens_kept)
            self.kv_cache.forget_after(request, request.num_prompt_tokens + num_output_tokens_kept)

    def fail(self, step: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """A step brought no result: its requests end with an error, all others live on. May be called before results
        of earlier steps are in. The device may not have heard of the rows that the step freed: it is told again."""
        untold = set(self._free_rows).difference(self._freed_rows)
        self._freed_rows += [row for row in step.freed_rows if row in untold]
        outputs = []
        for request in self._steps.pop(step.step):
            if request.finish_reason is None:
                outputs.append(self._fail_request(request, message))
        self.kv_cache.pages.not_cleared(step.cleared_pages)  # those that are free again
        return outputs

    def _fail_request(self, request: Request, message: str) -> EngineCoreOutput:
        """What it computed may be the fault: nobody else shall find it in the prefix cache."""
        self._finish(request, FinishReason.ERROR)
        self.kv_cache.forget_after(request, 0)
        return EngineCoreOutput(
            request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error=message
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.waiting.release(request)
            self._free_row(request)
        else:
            self.waiting.remove(request)
        self.kv_cache.free(request)
        self._held_back = None
        if request is self._alone:
            self._alone = None
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.learn(request.num_output_tokens)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _free_row(self, request: Request) -> None:
        self._free_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = -1

    # ---- deciding a step

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can run before a result comes back or a request is added."""
        plan = _Plan()
        self._make_way(plan)
        partials = self._plan_decodes(plan)
        newcomer = None if plan.preempted else self._newcomer_beside(partials)
        decode_tokens = len(plan.decodes) * (1 + self.config.num_drafts)
        budget = self._prompt_budget(decode_tokens, partials, len(partials) + (newcomer is not None))
        budget = self._plan_partials(plan, partials, newcomer, budget)
        if not plan.preempted:  # else what was taken from one would go to the next, and be taken again
            self._plan_admissions(plan, budget, partials)
        if not plan.decodes and not plan.chunks:
            if plan.preempted and self._alone is not None and not self.running.items:
                return self.schedule()  # the last that ran has made way for itself, and starts anew in pages of its own
            return None
        return self._commit(plan)

    def _make_way(self, plan: _Plan) -> None:
        """Where the first of the waiting lacks a row, or lacked blocks in the last step, and somebody runs much more
        than it would: preempt one request of that one, the youngest."""
        newcomer = self.waiting.first
        if newcomer is None or newcomer.num_inflight or (self._free_rows and newcomer is not self._held_back):
            return
        victim = self.waiting.making_way(newcomer, self.running.items)
        if victim is not None:
            self._preempt(victim, plan)

    def _plan_decodes(self, plan: _Plan) -> list[Request]:
        """Give each running request with a gap of 1 its token and its drafts. Returns those whose prompts are under
        way: mostly one, since only the end of the budget cuts a prompt, and one more for each that shares steps with
        it. Their rows are among max_num_seqs, so that the budget leaves at least a token for each."""
        decodes, block_size, num_drafts = plan.decodes, self.kv_cache.block_size, self.config.num_drafts
        preempted, partials = False, []
        for request in self.running.items[:]:
            if preempted and request.status is not RequestStatus.RUNNING:
                continue
            computed = request.num_computed_tokens
            total = len(request.token_ids) + request.num_inflight
            if total - computed != 1:
                partials.append(request)
                continue
            if total >= request.max_total_tokens:  # ends, if all that is in flight comes back
                continue
            if computed + num_drafts < request.num_blocks * block_size:
                decodes.append(request)
                continue
            if self._ensure_blocks(request, self._end_of_decode(computed), plan):
                decodes.append(request)
            preempted = plan.preempted
        return [request for request in partials if request.status is RequestStatus.RUNNING]

    def _end_of_decode(self, computed: int) -> int:
        """Tokens computed once a decode is: its drafts go with it unless they would pass max_model_len, where tables
        and positions end."""
        end = computed + 1 + self.config.num_drafts
        return end if end <= self.config.max_model_len else computed + 1

    def _newcomer_beside(self, partials: list[Request]) -> Request | None:
        """The first of the waiting, if it can start now and prompts are under way that leave it part of the step."""
        newcomer = self.waiting.first
        if not partials or newcomer is None or newcomer.num_inflight or not self._free_rows:
            return None
        if newcomer is self._held_back or not self._is_let_in(newcomer, partials):
            return None
        return newcomer

    def _is_let_in(self, newcomer: Request, partials: list[Request]) -> bool:
        return all(self.waiting.shares_steps(request, newcomer) for request in partials)

    def _plan_partials(self, plan: _Plan, partials: list[Request], newcomer: Request | None, budget: int) -> int:
        """Equal parts of the budget for prompts under way and the newcomer, and what the shortest leave for the others;
        returns what is left for admissions. The prompts that have come to their ends leave `partials`."""
        kept = 0 if newcomer is None else min(max(1, budget // (len(partials) + 1)), newcomer.num_tokens)
        budget -= kept
        unfinished = []
        partials.sort(key=lambda request: request.num_tokens - request.num_computed_tokens)
        for index, request in enumerate(partials):
            if request.status is not RequestStatus.RUNNING:  # preempted for one before it
                continue
            gap = request.num_tokens - request.num_computed_tokens
            count = self._cut(request, request.num_computed_tokens, min(gap, -(-budget // (len(partials) - index))))
            if self._ensure_blocks(request, request.num_computed_tokens + count, plan):
                plan.chunks.append((request, count))
                budget -= count
                if count < gap:
                    unfinished.append(request)
        partials[:] = unfinished
        return budget + kept

    def _prompt_budget(self, decode_tokens: int, partials: list[Request], at_least: int) -> int:
        """Prompt tokens of a step beside `decode_tokens`, of which `at_least` so many prompts want one each.

        A decode waits for its whole step, so the step is kept to `mixed_step_tokens`, of which prompts get half or
        more. A backlog raises that, else many prompts at once would wait longer in all than the decodes do; but not by
        a little: a step just over that size has no graph, and takes the host as long as one of twice the size. Without
        decodes there is nobody to spare, and without chunks a prompt could wait for its turn forever.
        """
        config = self.config
        most = config.max_num_batched_tokens - decode_tokens
        if not decode_tokens or config.mixed_step_tokens is None or not config.enable_chunked_prefill:
            return most
        backlog = self.waiting.num_prompt_tokens
        for partial in partials:
            backlog += partial.num_tokens - partial.num_computed_tokens
        limit = backlog // BACKLOG_STEPS
        if limit < RAISED * config.mixed_step_tokens:
            limit = config.mixed_step_tokens
        return min(most, max(limit - decode_tokens, -(-limit // 2), at_least))

    def _ensure_blocks(self, request: Request, num_tokens: int, plan: _Plan) -> bool:
        """Make room for `num_tokens` tokens of a running request, preempting the last in order of whoever runs most.
        False if that preempted the request itself. It ends, since one request alone always fits."""
        start = request.num_blocks
        while (fresh := self.kv_cache.grow(request, num_tokens)) is None:
            victim = self.waiting.most_dispensable(self.running.items)
            self._preempt(victim, plan)
            plan.preempted = True
            if victim is request:
                self._alone = self._alone if self.running.items else request
                return False
        for group, blocks in enumerate(fresh):
            if blocks:
                plan.block_updates.append(BlockUpdate(request.row, start, blocks, group))
        return True

    def _preempt(self, victim: Request, plan: _Plan) -> None:
        """Take a running request's row and blocks back, and its part in this step. It keeps its tokens."""
        if victim in plan.decodes:
            plan.decodes.remove(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not victim]
        plan.block_updates = [update for update in plan.block_updates if update.row != victim.row]
        self.running.remove(victim)
        self.kv_cache.free(victim)
        self._free_row(victim)
        self._held_back = None
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.put_back(victim)

    def _plan_admissions(self, plan: _Plan, budget: int, partials: list[Request]) -> None:
        """Admit by turns while rows, budget and blocks last, those that the running ones will still want included.
        Nobody overtakes the first that does not fit, so that it cannot starve; nor a prompt under way that does not
        share its steps."""
        config, kv_cache = self.config, self.kv_cache
        room: Room | None = None
        self.steps_held -= 1
        while budget > 0 and self._free_rows:
            request = self.waiting.first
            if request is None or request.num_inflight:  # its tokens must be known to be looked up and hashed
                return
            if partials and not self._is_let_in(request, partials):
                return
            if request is self._held_back and self.steps_held > 0:
                return
            if self._alone is not None and self.running.items and self._alone in (request, self.running.items[0]):
                return
            prefix = kv_cache.nothing_cached() if request is self._alone else kv_cache.find_cached(request)
            computed = prefix.num_blocks * kv_cache.block_size
            gap = request.num_tokens - computed
            count = min(gap, budget)
            if count < gap and not config.enable_chunked_prefill:
                return
            count = self._cut(request, computed, count)
            if config.look_ahead and self.running.items:  # one alone always has room, which rounding must not deny
                room = room or Room(kv_cache, self._lengths, self.running.items, request)
                if not room.has_place_for(request, prefix):
                    self._held_back, self.steps_held = request, kv_cache.block_size
                    return
            if not kv_cache.admit(request, prefix, computed + count):
                if not self.running.items and request is not self._alone:  # it fits without the snapshot that it reads
                    self._alone = request
                    continue
                self._held_back, self.steps_held = request, 0
                return
            self.waiting.take(request)
            plan.new_rows.append(self._take_row(request))
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = computed
                if config.enable_prefix_caching and request.core_request.params.prompt_logprobs is None:
                    self._cache_queries += request.num_prompt_tokens
                    self._cache_hits += computed
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed
            request.admitted_step = self._next_step
            self.running.add(request)
            for group, (block_ids, first) in enumerate(zip(request.block_ids, request.first_blocks, strict=True)):
                if block_ids[first:]:
                    plan.block_updates.append(BlockUpdate(request.row, first, block_ids[first:], group))
            plan.chunks.append((request, count))
            budget -= count

    def _cut(self, request: Request, start: int, count: int) -> int:
        """Of `count` tokens of a prompt those that this step computes, where states want steps to end with blocks."""
        return self.kv_cache.cut(request, start, count) if self.config.enable_chunked_prefill else count

    def _take_row(self, request: Request) -> NewRow:
        request.row = self._free_rows.pop()
        if request.status is RequestStatus.WAITING:
            request.own_tokens()
        core = request.core_request
        return NewRow(
            request.row,
            core.prompt_token_ids,
            core.params,
            core.stop_token_ids,
            core.bad_words_token_ids,
            core.seed,
            request.token_ids[request.num_prompt_tokens :],
        )

    def _commit(self, plan: _Plan) -> SchedulerOutput:
        """Count what was planned as computed and in flight, and write it down as a step."""
        if self.kv_cache.states:
            self.kv_cache.take_snapshots([*plan.decodes, *(request for request, _ in plan.chunks)])
        requests = plan.decodes
        rows = [request.row for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        counts, num_drafts = [1] * len(requests), []
        samples = [True] * len(requests)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_inflight += 1
        if self.config.num_drafts:
            counts = [self._end_of_decode(done) - done for done in computed]
            num_drafts = [count - 1 for count in counts]
            for request, drafts in zip(requests, num_drafts, strict=True):
                request.num_computed_tokens += drafts
                request.num_inflight += drafts
            num_drafts = num_drafts + [0] * len(plan.chunks) if any(num_drafts) else []
        for request, count in sorted(plan.chunks, key=lambda chunk: chunk[1] > 1):
            requests.append(request)
            rows.append(request.row)
            computed.append(request.num_computed_tokens)
            counts.append(count)
            request.num_computed_tokens += count
            reaches_end = request.num_computed_tokens == request.num_tokens
            samples.append(reaches_end)
            request.num_inflight += reaches_end
        number = self._next_step
        self._next_step += 1
        self._steps[number] = requests
        cleared, copies = self.kv_cache.take_orders()
        return SchedulerOutput(
            number, plan.new_rows, self.take_freed_rows(), plan.block_updates, rows, computed, counts, samples, cleared,
            copies, num_drafts,
        )  # fmt: skip

    # ---- taking a result

    def update(self, step: SchedulerOutput, result: RunnerOutput) -> list[EngineCoreOutput]:
        """Close the books of a step. Results come back in the order of their steps."""
        token_ids, prompt_logprobs = result.token_ids, result.prompt_logprobs
        block_size, states = self.kv_cache.block_size, self.kv_cache.states
        extras: Sequence[Logprobs | _Accepted | None] = result.logprobs
        if step.num_drafts:
            extras = accepted = self._accept(step, result)
            token_ids = [new.token_ids[-1] for new in accepted]
        outputs = []
        next_sample = 0
        for request, row, computed, count, samples in zip(
            self._steps.pop(step.step),
            step.rows,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.samples,
            strict=True,
        ):
            sample = next_sample
            next_sample += samples
            if request.finish_reason is not None:  # ended while this step was under way: what it sampled is dropped
                continue
            token = token_ids[sample] if samples else 0
            if token < 0:
                outputs.append(self._fail_request(request, UNUSABLE[token]))
                continue
            end = computed + count
            if count > 1 or end % block_size == 0 or (states and request.snapshots):
                self._register(step.step, request, end)
            if samples:
                tokens = request.token_ids
                tokens.append(token)
                request.num_inflight -= 1
                num_tokens = len(tokens)
                output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[token])
                outputs.append(output)
                if num_tokens == request.num_prompt_tokens + 1:
                    output.num_cached_tokens = request.num_cached_tokens
                if extras and (extra := extras[sample]) is not None:
                    if isinstance(extra, Logprobs):
                        output.new_logprobs = [extra]
                    else:
                        extra.complete(output, request)
                if row in prompt_logprobs:
                    output.new_prompt_logprobs = self._unsent(request, computed, prompt_logprobs[row])
                if token in request.stop_set or num_tokens >= request.max_total_tokens:
                    self._end(request, token, output)
            elif row in prompt_logprobs and (unsent := self._unsent(request, computed, prompt_logprobs[row])):
                outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        new_prompt_logprobs=unsent,
                    )
                )
        return outputs

    def _accept(self, step: SchedulerOutput, result: RunnerOutput) -> list[_Accepted]:
        """Take back what a step with drafts counted as known and computed and what was rejected, and append all that a
        request got but the last token. One entry for each that sampled."""
        accepted = []
        first = 0
        for request, drafts, count in zip(self._steps[step.step], step.num_drafts, result.num_sampled, strict=True):
            if not count:
                continue
            request.num_inflight -= drafts
            request.num_computed_tokens -= 1 + drafts - count  # nobody looks at that of a preempted one
            new = [0] if request.finish_reason else self._up_to_end(request, result.token_ids[first : first + count])
            logprobs = [entry for entry in result.logprobs[first : first + len(new)] if entry is not None]
            accepted.append(_Accepted(new, logprobs))
            request.token_ids += new[:-1]
            first += count
        return accepted

    @staticmethod
    def _up_to_end(request: Request, new: list[int]) -> list[int]:
        """Of tokens that came at once those up to the first that ends the request."""
        new = new[: request.max_total_tokens - request.num_tokens]
        unripe = request.core_request.params.min_tokens - request.num_output_tokens - 1
        ends = (place + 1 for place, token in enumerate(new) if token in request.stop_set and place >= unripe)
        return new[: next(ends, len(new))]

    def _register(self, step: int, request: Request, num_tokens: int) -> None:
        """A step from before the request's last preemption wrote to blocks that are no longer its own."""
        if step >= request.admitted_step and request.status is RequestStatus.RUNNING:
            self.kv_cache.register(request, min(num_tokens, request.num_tokens))

    def _unsent(self, request: Request, computed: int, entries: list[Logprobs]) -> list[Logprobs]:
        """The entries, of which the first scores prompt token `computed + 1`, that no earlier step has brought:
        recomputing after a preemption brings them again."""
        unsent = entries[request.num_prompt_logprobs_sent - computed :]
        request.num_prompt_logprobs_sent += len(unsent)
        return unsent

    def _end(self, request: Request, token: int, output: EngineCoreOutput) -> None:
        """End the request if its newest token is a stop (and min_tokens is reached) or fills its length."""
        params = request.core_request.params
        if token in request.stop_set and request.num_output_tokens >= params.min_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token if token in params.stop_token_ids else None
        elif request.num_tokens >= request.max_total_tokens:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)

    def take_freed_rows(self) -> list[int]:
        """What the next step would tell, for one that is not planned here."""
        freed_rows, self._freed_rows = self._freed_rows, []
        return freed_rows

    # ---- looking in

    def has_work(self) -> bool:
        """Whether any request is unfinished. Rows still to be freed are no work: they are told with the next step."""
        return bool(self.requests)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_waiting_tokens=self.waiting.num_prompt_tokens,
            num_received=self._num_received,
            num_received_tokens=self._num_received_tokens,
            num_blocks=self.config.num_pages,
            num_free_blocks=self.kv_cache.num_available_pages,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
        )
