"""Decides, step by step, how many tokens of which requests run, and gives them their KV blocks.

A request has a gap: the tokens it has (on the host, or sampled on the device by a step whose result is not back yet)
minus the tokens whose KV is computed. Each step hands out a budget of tokens to close gaps. Chunked prefill, prefix
cache hits, decodes and resuming after a preemption all follow from this one rule; no request is "in prefill".

The order within a step: first decodes (gap 1), then prompts that are partly computed, then requests from the waiting
queue, whose turns fair_queue.py decides. A decode waits for its whole step, so prompts beside decodes get less of it.

Steps may be scheduled before the results of earlier ones are back. The device runs them in order, so a row or a block
that one step frees may be used by the next. Imports no torch, does no I/O and reads no clock: only integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import RequestError
from headrace.pooling import Pooled
from headrace.request import (
    DraftCounts,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Matcher,
    Request,
    RequestStatus,
    SchedulerStats,
)
from headrace.scheduler.adapter_slots import AdapterSlots
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.draft_length import DraftLength
from headrace.scheduler.drafts import Accepted, accept_drafts, follow_grammar
from headrace.scheduler.fair_queue import FairQueue
from headrace.scheduler.forecast import LengthForecast
from headrace.scheduler.kv_cache_manager import KVCacheManager
from headrace.scheduler.look_ahead import LookAhead
from headrace.scheduler.ordered_queue import OrderedQueue
from headrace.scheduler.plan import MaskedRequest, StepPlan
from headrace.step import LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED, BlockUpdate, Logprobs, RunnerOutput, SchedulerOutput

MAX_QUANTUM = 8
"""Most choices of one HTTP request that are admitted in one turn; fewer where there are few rows."""
NO_TOKEN_REASONS = {
    NO_TOKEN_ALLOWED: "no token may be sampled: allowed_token_ids, bad_words, min_tokens and the grammar of "
    "structured_outputs forbid them all",
    LOGITS_NOT_FINITE: "the model gave no usable logits: NaN or Inf",
}


class Scheduler:
    """Decides steps and takes their results. Call `schedule` for the next step and `update` (or `fail`) with its
    result, in the order of the steps. Requests may be added and aborted at any time between these calls."""

    def __init__(self, config: SchedulerConfig, draft_length: DraftLength | None = None) -> None:
        """`draft_length` chooses how many tokens each step guesses; None: config.num_drafts, always."""
        self.config = config
        self.draft_length = draft_length
        self.kv_cache = KVCacheManager(
            config.layout, config.num_pages, config.enable_prefix_caching, config.step_places, config.places
        )
        self.requests: dict[str, Request] = {}
        """Unfinished requests by id; each is either waiting or running."""
        self.waiting: FairQueue[Request] = FairQueue(max(1, min(MAX_QUANTUM, config.max_num_seqs // 8)))
        """New and preempted requests."""
        self.running: OrderedQueue[Request] = OrderedQueue()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []
        """Rows freed since the last step; the next step tells the runner."""
        self.adapter_slots = AdapterSlots(config.max_loras)
        self._steps: dict[int, list[Request]] = {}
        """Step number -> its requests, until its result is back. Their rows may belong to others by then."""
        self._next_step = 0
        self._lengths = LengthForecast()
        self._blocked: Request | None = None
        """The first waiting request, if it did not fit into the cache when that was last checked."""
        self.steps_blocked = 0
        """Steps until `_blocked` is checked again, unless a request ends before: running requests come nearer to their
        ends meanwhile, and may add to the prefix cache what it needs."""
        self._exclusive: Request | None = None
        """A request that did not fit although no other was running. Blocks of several layer groups may have lain in
        its pages so that its own could not be packed. It runs without any other request beside it."""
        self._num_matched = 0
        """Unfinished requests with a grammar. While there is none, no step looks for any."""
        self._num_preemptions = 0
        self._drafts = DraftCounts()
        self._cache_queries = 0
        self._cache_hits = 0

    # ---- requests come and go

    def add_request(self, core_request: EngineCoreRequest, matcher: Matcher | None = None) -> None:
        """Accept a request, whose output `matcher` follows if it has a grammar. Raises RequestError if it could never
        run, or if its id is that of an unfinished one."""
        config = self.config
        request = Request(core_request)
        if core_request.request_id in self.requests:
            raise RequestError(f"request_id {core_request.request_id!r} is in use by an unfinished request")
        if core_request.adapter and not config.max_loras:
            raise RequestError("the request has an adapter, but the engine takes none: start it with --enable-lora")
        limit = config.max_model_len + bool(core_request.pools)  # nothing follows a prompt that is pooled
        if not 0 < request.num_prompt_tokens < limit:
            raise RequestError(
                f"the prompt must have between 1 and {limit - 1} tokens (max_model_len is "
                f"{config.max_model_len}), got {request.num_prompt_tokens}",
                "prompt",
            )
        if core_request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {core_request.max_tokens}", "max_tokens")
        request.max_total_tokens = min(request.num_prompt_tokens + core_request.max_tokens, limit)
        # The last token is sampled but never computed, so it needs no place in the cache; drafts behind it do.
        most = min(request.max_total_tokens - 1 + config.num_drafts + config.draft_places, config.max_model_len)
        needed = config.layout.pages_for(most, config.step_places)
        if needed > config.num_pages:
            raise RequestError(
                f"a prompt of {request.num_prompt_tokens} tokens with max_tokens {core_request.max_tokens} needs "
                f"{needed} pages of KV cache, but there are only {config.num_pages}",
                "max_tokens",
            )
        self.requests[request.request_id] = request
        request.matcher = matcher
        self._num_matched += matcher is not None
        if config.policy == "priority":  # requests say who runs first, so there is nothing to be fair about
            request.order = (core_request.priority, core_request.arrival_time, request.request_id)
            self.waiting.add(request, "", request.request_id)
        else:
            request.order = (0, self.waiting.tick(), request.request_id)
            self.waiting.add(request, core_request.client, core_request.parent or request.request_id)

    def abort(self, request_id: str, num_output_tokens_kept: int | None = None) -> None:
        """End a request without output, whatever its status. An id that is unknown belongs to one that ended meanwhile.
        `num_output_tokens_kept`: how many of its output tokens count, where the front end found a stop string. Blocks
        with later tokens leave the prefix cache."""
        request = self.requests.get(request_id)
        if request is None:
            return
        self._finish(request, FinishReason.ABORT)
        if num_output_tokens_kept is not None:
            self._lengths.learn(num_output_tokens_kept)
            self.kv_cache.forget_after(request, request.num_prompt_tokens + num_output_tokens_kept)

    def fail(self, step: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """End the requests of a step that brought no result with an error; all others go on. May be called before the
        results of earlier steps are back. The device may not have seen the rows that the step freed, so the next step
        lists them again."""
        unseen = set(self._free_rows).difference(self._freed_rows)
        self._freed_rows += [row for row in step.freed_rows if row in unseen]
        outputs = []
        for request in self._steps.pop(step.step):
            if request.finish_reason is None:
                outputs.append(self.fail_request(request, message))
        self.kv_cache.pages.clear_again(step.cleared_pages)
        self.adapter_slots.load_again(step.adapter_loads)
        return outputs

    def fail_request(self, request: Request, message: str, invalid: bool = False) -> EngineCoreOutput:
        """End a request with an error. Its blocks leave the prefix cache: what they hold may be the cause. `invalid`:
        what it asks for is the cause."""
        self._finish(request, FinishReason.ERROR)
        self.kv_cache.forget_after(request, 0)
        return EngineCoreOutput.failed(request.request_id, message, invalid)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.waiting.release(request)
            self._free_row(request)
        else:
            self.waiting.remove(request)
        self.kv_cache.free(request)
        self._blocked = None
        if request is self._exclusive:
            self._exclusive = None
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.learn(request.num_output_tokens)
        if request.matcher is not None:
            self._num_matched -= 1
            request.matcher = None
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _free_row(self, request: Request) -> None:
        self._free_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = -1
        self.adapter_slots.release(request.core_request.adapter)

    # ---- deciding a step

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step, or None if nothing can run before a result comes back or a request is added."""
        plan = StepPlan()
        self._preempt_for_first_waiting(plan)
        partials = self._plan_decodes(plan)
        beside = None if plan.preempted else self._waiting_beside(partials)
        if self.config.num_drafts:
            plan.num_drafts = min((one.num_guesses for one in plan.decodes if one.num_guesses), default=0)
        decode_tokens = len(plan.decodes) * (1 + plan.num_drafts)
        backlog = self.waiting.num_prompt_tokens
        for request in partials:
            backlog += request.num_tokens - request.num_computed_tokens
        budget = self.config.prompt_budget(decode_tokens, backlog, len(partials) + (beside is not None))
        budget = self._plan_partials(plan, partials, beside, budget)
        if not plan.preempted:  # else the blocks just taken from one request would be given to another, and so on
            self._plan_admissions(plan, budget, partials)
        if not plan.decodes and not plan.chunks:
            if plan.preempted and self._exclusive is not None and not self.running.items:
                return self.schedule()  # the last running request preempted itself: it starts again with whole pages
            return None
        requests = plan.requests()
        if self.kv_cache.states:
            self.kv_cache.take_snapshots(requests)
        number, self._next_step = self._next_step, self._next_step + 1
        self._steps[number] = requests
        guesses, chooser = self.config.num_drafts, self.draft_length
        if chooser is not None:
            guesses = chooser.choose(plan.going_on())
        clears, copies = self.kv_cache.take_clears_and_copies()
        return plan.commit(
            number, self.config, self.take_freed_rows(), clears, copies, self._num_matched > 0, guesses,
            self.adapter_slots.take_loads(),
        )  # fmt: skip

    def masked_requests(self, step: SchedulerOutput) -> list[MaskedRequest]:
        """Return the unfinished requests for which a step samples under a grammar. The results of all steps before it
        must have been taken, since masks depend on them."""
        num_drafts = step.num_drafts or [0] * len(step.rows)
        return [
            MaskedRequest(request, row, request.drafts[:drafts])
            for request, row, samples, drafts in zip(
                self._steps[step.step], step.rows, step.samples, num_drafts, strict=True
            )
            if samples and request.matcher is not None
        ]

    def _preempt_for_first_waiting(self, plan: StepPlan) -> None:
        """Preempt one request for fairness, if the first waiting one lacks a row or blocks. The victim is the latest of
        a client (or HTTP request) that runs far more than the waiting one's."""
        first = self.waiting.first
        if first is None or first.num_inflight or (self._free_rows and first is not self._blocked):
            return
        victim = self.waiting.victim_for(first, self.running.items)
        if victim is not None:
            self._preempt(victim, plan)

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """Plan every running request that has a gap of 1; return the others, whose prompts are partly computed. There
        are few of the latter, as only the last prompt of a step is cut, and each of those that share a step. They count
        among max_num_seqs, so the step's budget leaves at least one token for each."""
        decodes, block_size = plan.decodes, self.kv_cache.block_size
        num_drafts, longest = self.config.num_drafts, self.config.max_model_len
        behind = num_drafts + self.config.draft_places
        preempted, partials = False, []
        awaited = self._awaited_by_stages() if self.config.num_stages > 1 else ()
        for request in self.running.items[:]:
            if preempted and request.status is not RequestStatus.RUNNING:
                continue
            computed = request.num_computed_tokens
            total = len(request.token_ids) + request.num_inflight
            if total - computed != 1:
                partials.append(request)
                continue
            if total >= request.max_total_tokens:  # what is in flight fills its length
                continue
            if awaited and request.request_id in awaited:
                continue
            if computed + behind < request.num_blocks * block_size:
                decodes.append(request)
                continue
            if self._ensure_blocks(request, min(computed + 1 + num_drafts, longest), plan):
                decodes.append(request)
            preempted = plan.preempted
        return [request for request in partials if request.status is RequestStatus.RUNNING]

    def _awaited_by_stages(self) -> set[str]:
        """Return the ids of running requests that leave this step to others, so that each pipeline stage has a step to
        compute.

        A request waits until the step that samples its newest token has left the last stage, and each step takes its
        share of all that decode, those first that have waited longest. If all wait and nothing else is queued, those
        that sampled first go on: their tokens reach the first stage without the host, which is then the sooner way.
        """
        stages, now = self.config.num_stages, self._next_step
        ready, others = [], False
        for request in self.running.items:
            total = len(request.token_ids) + request.num_inflight
            if total - request.num_computed_tokens != 1:
                others = True
            elif total < request.max_total_tokens:
                ready.append(request)
        if not ready:
            return set()
        chosen = [request for request in ready if not request.num_inflight or request.sampled_step <= now - stages]
        if not chosen and not others and len(self._steps) < 2:
            first = min(request.sampled_step for request in ready)
            chosen = [request for request in ready if request.sampled_step == first]
        chosen.sort(key=lambda request: request.sampled_step)
        kept = {request.request_id for request in chosen[: -(-len(ready) // stages)]}
        return {request.request_id for request in ready if request.request_id not in kept}

    def _waiting_beside(self, partials: list[Request]) -> Request | None:
        """Return the first waiting request, if it can start now and the prompts under way share their steps with it."""
        first = self.waiting.first
        if not partials or first is None or first.num_inflight or not self._free_rows:
            return None
        if first is self._blocked or not self.adapter_slots.has_room(first.core_request.adapter):
            return None
        if not self._all_share_steps(partials, first):
            return None
        return first

    def _all_share_steps(self, partials: list[Request], waiting: Request) -> bool:
        return all(self.waiting.shares_steps(request, waiting) for request in partials)

    def _plan_partials(self, plan: StepPlan, partials: list[Request], beside: Request | None, budget: int) -> int:
        """Split the budget equally among prompts under way and `beside`, a waiting request; return what is left. What a
        short prompt does not need goes to the longer ones. Prompts that the step completes leave `partials`."""
        kept = 0 if beside is None else min(max(1, budget // (len(partials) + 1)), beside.num_tokens)
        budget -= kept
        unfinished = []
        partials.sort(key=lambda request: request.num_tokens - request.num_computed_tokens)
        for index, request in enumerate(partials):
            if request.status is not RequestStatus.RUNNING:  # preempted for the blocks of one before it
                continue
            gap = request.num_tokens - request.num_computed_tokens
            share = min(gap, -(-budget // (len(partials) - index)))
            count = self._align_chunk(request, request.num_computed_tokens, share)
            if self._ensure_blocks(request, request.num_computed_tokens + count, plan):
                plan.chunks.append((request, count))
                budget -= count
                if count < gap:
                    unfinished.append(request)
        partials[:] = unfinished
        return budget + kept

    def _ensure_blocks(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Give a running request blocks for `num_tokens` tokens, preempting others where there are none. Returns False
        if the request itself had to be preempted. One request alone always fits, so the loop ends."""
        start = request.num_blocks
        while (fresh := self.kv_cache.grow(request, num_tokens)) is None:
            victim = self.waiting.victim(self.running.items)
            self._preempt(victim, plan)
            plan.preempted = True
            if victim is request:
                self._exclusive = self._exclusive if self.running.items else request
                return False
        for group, blocks in enumerate(fresh):
            if blocks:
                plan.block_updates.append(BlockUpdate(request.row, start, blocks, group))
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Take a running request's row, blocks and part in this step. It keeps its tokens and waits again."""
        plan.drop(victim)
        self.running.remove(victim)
        self.kv_cache.free(victim)
        self._free_row(victim)
        self._blocked = None
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.put_back(victim)

    def _plan_admissions(self, plan: StepPlan, budget: int, partials: list[Request]) -> None:
        """Admit waiting requests while rows, budget and blocks last. A request is admitted only if it and the running
        ones are expected to find blocks to their ends. None overtakes the first that does not fit, so that it cannot
        starve, nor a prompt under way that does not share its steps."""
        config, kv_cache = self.config, self.kv_cache
        look_ahead: LookAhead | None = None
        self.steps_blocked -= 1
        while budget > 0 and self._free_rows:
            request = self.waiting.first
            if request is None or request.num_inflight:  # the prefix cache needs all its tokens on the host
                return
            if partials and not self._all_share_steps(partials, request):
                return
            if request is self._blocked and self.steps_blocked > 0:
                return
            if not self.adapter_slots.has_room(request.core_request.adapter):
                return
            if (
                self._exclusive is not None
                and self.running.items
                and self._exclusive in (request, self.running.items[0])
            ):
                return
            prefix = kv_cache.nothing_cached() if request is self._exclusive else kv_cache.find_cached(request)
            computed = prefix.num_blocks * kv_cache.block_size
            gap = request.num_tokens - computed
            count = min(gap, budget)
            if count < gap and not config.enable_chunked_prefill:
                return
            count = self._align_chunk(request, computed, count)
            if config.look_ahead and self.running.items:  # one alone always fits, whatever rounding makes of it
                look_ahead = look_ahead or LookAhead(kv_cache, self._lengths, self.running.items, request)
                if not look_ahead.admit(request, prefix):
                    self._blocked, self.steps_blocked = request, kv_cache.block_size
                    return
            if not kv_cache.admit(request, prefix, computed + count):
                if (
                    not self.running.items and request is not self._exclusive
                ):  # it fits, but not beside the snapshot it reads
                    self._exclusive = request
                    continue
                self._blocked, self.steps_blocked = request, 0
                return
            self.waiting.take(request)
            request.row = self._free_rows.pop()
            request.adapter_slot = self.adapter_slots.take(request.core_request.adapter)
            plan.add_row(request)
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = computed
                if config.enable_prefix_caching and not request.core_request.needs_all_tokens:
                    self._cache_queries += request.num_prompt_tokens
                    self._cache_hits += computed
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed
            request.admitted_step = self._next_step
            request.drafts, request.num_guesses = (), 0
            self.running.add(request)
            for group, (block_ids, first) in enumerate(zip(request.block_ids, request.first_blocks, strict=True)):
                if block_ids[first:]:
                    plan.block_updates.append(BlockUpdate(request.row, first, block_ids[first:], group))
            plan.chunks.append((request, count))
            budget -= count

    def _align_chunk(self, request: Request, start: int, count: int) -> int:
        """Return how many of `count` prompt tokens this step computes: with recurrent states, chunks end with
        blocks."""
        return self.kv_cache.align_chunk(request, start, count) if self.config.enable_chunked_prefill else count

    # ---- taking a result

    def update(self, step: SchedulerOutput, result: RunnerOutput) -> list[EngineCoreOutput]:
        """Take the result of a step, in the order of the steps; return what is new for each request. Appends the
        sampled tokens, offers full blocks to the prefix cache, and ends requests that stop. What the step sampled for a
        request that ended meanwhile is dropped."""
        token_ids, prompt_logprobs = result.token_ids, result.prompt_logprobs
        block_size, states = self.kv_cache.block_size, self.kv_cache.states
        extras: Sequence[Logprobs | Accepted | None] = result.logprobs
        if step.num_drafts:
            requests = self._steps[step.step]
            accepted, self._drafts = accept_drafts(requests, step.num_drafts, result, self._drafts, self.draft_length)
            extras = accepted
            token_ids = [new.token_ids[-1] for new in accepted]
        matched = self._num_matched > 0
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
            if request.finish_reason is not None:  # it ended while this step was under way
                continue
            token = token_ids[sample] if samples else 0
            if token < 0:
                outputs.append(self.fail_request(request, NO_TOKEN_REASONS[token], token == NO_TOKEN_ALLOWED))
                continue
            ends = False
            if matched and samples and (matcher := request.matcher) is not None:
                request.drafts = result.drafts.get(row, ())
                if not step.num_drafts:  # else that is done
                    follow_grammar(request, [token])
                if matcher.error:
                    outputs.append(self.fail_request(request, matcher.error, invalid=True))
                    continue
                ends = matcher.finished
            end = computed + count
            if count > 1 or end % block_size == 0 or (states and request.snapshots):
                self._register(step.step, request, end)
            if request.core_request.pools:
                outputs += self._take_pooled(request, computed, bool(samples), result.pooled.get(row))
            elif samples:
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
                if token in request.stop_set or num_tokens >= request.max_total_tokens or ends:
                    self._end(request, token, output)
            elif row in prompt_logprobs and (unsent := self._unsent(request, computed, prompt_logprobs[row])):
                outputs.append(
                    EngineCoreOutput(request_id=request.request_id, new_token_ids=[], new_prompt_logprobs=unsent)
                )
        return outputs

    def _register(self, step: int, request: Request, num_tokens: int) -> None:
        """Offer the request's full blocks to the prefix cache, unless the step ran before its last preemption: then it
        wrote to blocks that are no longer the request's own."""
        if step >= request.admitted_step and request.status is RequestStatus.RUNNING:
            self.kv_cache.register(request, min(num_tokens, request.num_tokens))

    def _unsent(self, request: Request, computed: int, entries: list[Logprobs]) -> list[Logprobs]:
        """Return those prompt logprobs that no earlier step has brought: recomputing after a preemption repeats them.
        The first of `entries` scores prompt token `computed + 1`."""
        unsent = entries[request.num_positions_sent - computed :]
        request.num_positions_sent += len(unsent)
        return unsent

    def _take_pooled(
        self, request: Request, computed: int, ends: bool, pooled: Pooled | None
    ) -> list[EngineCoreOutput]:
        """Return what a step made of a prompt that is pooled; the request `ends` with its last token. Vectors of tokens
        that an earlier step has brought, before a preemption, are left out."""
        found = []
        if pooled is not None and request.core_request.pools == "tokens":
            row = pooled.width * Pooled.BYTES
            data = pooled.data[(request.num_positions_sent - computed) * row :]
            request.num_positions_sent += len(data) // row
            pooled = Pooled(data, pooled.width)
        if pooled is not None and pooled.data:
            found.append(pooled)
        if not (found or ends):
            return []
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[], pooled=found)
        if ends:
            output.num_cached_tokens = request.num_cached_tokens
            output.finish_reason = FinishReason.STOP
            self._finish(request, FinishReason.STOP)
        return [output]

    def _end(self, request: Request, token: int, output: EngineCoreOutput) -> None:
        """End the request if its newest token is a stop token, once min_tokens is reached, completes what its grammar
        describes, or fills its length. A grammar that allows a stop token wants it, whatever min_tokens says."""
        params, matcher = request.core_request.params, request.matcher
        if token in request.stop_set and (matcher is not None or request.num_output_tokens >= params.min_tokens):
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token if token in params.stop_token_ids else None
        elif matcher is not None and matcher.finished:
            output.finish_reason, output.completes_grammar = FinishReason.STOP, True
        elif request.num_tokens >= request.max_total_tokens:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)

    def take_freed_rows(self) -> list[int]:
        """Return the rows freed since the last step, and forget them. Also for steps that are not planned here."""
        freed_rows, self._freed_rows = self._freed_rows, []
        return freed_rows

    # ---- looking in

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """The numbers of drafts that decodes may have."""
        return (self.config.num_drafts,) if self.draft_length is None else self.draft_length.lengths

    def has_work(self) -> bool:
        """Return whether any request is unfinished. Freed rows are no work: the next step will list them."""
        return bool(self.requests)

    def stats(self) -> SchedulerStats:
        """Return counters since start, and how full queue and cache are now."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_waiting_tokens=self.waiting.num_prompt_tokens,
            num_blocks=self.config.num_pages,
            num_free_blocks=self.kv_cache.num_available_pages,
            num_preemptions=self._num_preemptions,
            drafts=self._drafts,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
        )
