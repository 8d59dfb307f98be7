"""Runs the engine's loop: the scheduler decides a step, the executor computes it, and the scheduler takes the result.

The next step is scheduled and submitted while the current one still runs, so that the device never waits for the host.
A step with grammars is submitted in two parts: its masks depend on the results of the step before, so they are made
while its forward runs, and it samples once they are there. A server runs this loop in its own process, `LLM` in the
caller's. It works on token ids alone, without text or sockets. Engines that share their experts agree on each step
before they submit it (executor/together.py).
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from headrace.engine.adapters import AdapterReading
from headrace.engine.grammars import Grammars
from headrace.engine.messages import Abort, CoreFacts
from headrace.engine.step_health import StepHealth
from headrace.engine.step_watch import StepWatch, Watched
from headrace.errors import EngineDeadError, HeadraceError, OutOfMemoryError, QueueFullError, RequestError
from headrace.executor.base import Executor, StepHandle
from headrace.executor.together import Peers
from headrace.planner.record import Decision
from headrace.planner.smaller import smaller_budget
from headrace.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import ExpertLoad, Masks, RunnerOutput, SchedulerOutput
from headrace.structured_outputs.matcher import GrammarCompiler

logger = logging.getLogger(__name__)

PIPELINE_DEPTH = 2
"""Most steps submitted at once: the one that runs, and the next. Each further pipeline stage runs one more."""
COMPILE_POLL_SECONDS = 0.001
"""How long `step` waits for a grammar or an adapter, with nothing else to do, before new requests are looked for."""
WARMUP_STEP = -1
"""The number of every warm-up step. Its result goes to no request."""
AGREE_SECONDS = 0.2
"""How long to wait for other engines' steps before the loop looks for commands again, and says that it runs."""
AGREE_POLL_MS = 1


@dataclass
class _Inflight:
    """Holds a step that was submitted and whose result has not been taken."""

    plan: SchedulerOutput
    handle: StepHandle
    watched: Watched | None
    masked: bool
    """Its masks have not been made, so it has not sampled. It is the newest."""


def warmup_step(
    num_reqs: int, num_tokens: int, freed_rows: list[int], config: SchedulerConfig, lengths: Sequence[int]
) -> SchedulerOutput:
    """Return a step of `num_reqs` requests and `num_tokens` tokens in all that belongs to no request. All its requests
    use the row behind those of real requests, and no blocks of theirs. `lengths`: the numbers of drafts that decodes
    may have."""
    rows, samples = [config.max_num_seqs] * num_reqs, [True] * num_reqs
    drafts = num_tokens // num_reqs - 1
    if drafts in lengths and num_tokens == num_reqs * (1 + drafts):
        counts = [1 + drafts] * num_reqs
        return SchedulerOutput(
            WARMUP_STEP, [], freed_rows, [], rows, [0] * num_reqs, counts, samples,
            num_drafts=[drafts] * num_reqs if drafts else [], num_guesses=drafts,
        )  # fmt: skip
    counts = [1] * num_reqs
    for index in reversed(range(num_reqs)):  # decodes come first in a step, so the longer chunks go last
        counts[index] += min(num_tokens - sum(counts), config.max_model_len - 1)
    return SchedulerOutput(WARMUP_STEP, [], freed_rows, [], rows, [0] * num_reqs, counts, samples)


class EngineCore:
    """Runs all requests, step by step. Call `step` while `has_work` is true; add and abort requests between two
    calls."""

    def __init__(
        self, facts: CoreFacts, scheduler: Scheduler, executor: Executor, watch: StepWatch | None = None,
        compiler: GrammarCompiler | None = None, turn_seconds: float = math.inf, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        """`watch` compares the times of steps with predicted ones; `compiler` is for requests with a grammar, and
        `turn_seconds` how long one may wait until the compiler begins with it. `peers`: the engines that share this
        one's experts."""
        self.facts = facts
        self.scheduler = scheduler
        self._executor = executor
        self.peers = peers
        self._offered: SchedulerOutput | None = None
        """The step of which the other engines have been told, until all have told theirs."""
        self._num_empty = 0
        self._watch = watch
        self._grammars = Grammars(compiler, turn_seconds)
        most = facts.config.max_cpu_loras or facts.config.max_loras
        self._adapters = AdapterReading(executor, most, self._used_adapters)
        self._health = StepHealth(facts.config.dtype)
        self._warmup_sizes = collections.deque(facts.workers[0].warmup_sizes if facts.workers else [])
        """(requests, tokens) of the warm-up steps that have not run yet."""
        self._depth = (PIPELINE_DEPTH if facts.config.async_scheduling else 1) + facts.config.pipeline_parallel_size - 1
        self._inflight: collections.deque[_Inflight] = collections.deque()
        """Submitted steps, oldest first."""
        self._refused: list[EngineCoreOutput] = []
        """Errors of requests that were refused, for the next `step` to return."""
        self._config = facts.config
        self._graph_bytes: dict[str, int] = {}
        self._num_short_steps = 0
        self._expert_load = ExpertLoad()
        self._num_received = 0
        self._num_received_tokens = 0
        self._scheduled_at: dict[str, float] = {}
        """Request id -> time.monotonic() of its first step, until its first output carries it."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Accept a request. If it is invalid, the next `step` returns an output for it with finish_reason `error`. One
        with a grammar reaches the scheduler when that is compiled."""
        self._num_received += 1
        self._num_received_tokens += len(request.prompt_token_ids)
        if not self._adapters.hold(request):
            self._pass_on(request)

    def _pass_on(self, request: EngineCoreRequest) -> None:
        """Give a request whose adapter is there to the scheduler, one with a grammar to what compiles it."""
        try:
            if request.grammar:
                self._grammars.hold(request)
            else:
                self.scheduler.add_request(request)
        except HeadraceError as error:
            self._refused.append(_failed(request, error))

    def _used_adapters(self) -> set[int]:
        """Return the adapters of unfinished requests that do not wait for them."""
        return {one.core_request.adapter for one in self.scheduler.requests.values()} | self._grammars.adapters

    def abort(self, aborts: Iterable[Abort]) -> None:
        """End requests without further output. Ids of requests that have ended already are ignored."""
        for abort in aborts:
            self._scheduled_at.pop(abort.request_id, None)
            self._adapters.drop(abort.request_id)
            self._grammars.drop(abort.request_id)
            self.scheduler.abort(abort.request_id, abort.num_output_tokens_kept)

    def has_work(self) -> bool:
        """Return whether `step` has anything to do: a request, a step under way, or a refusal to report."""
        held = len(self._grammars) + len(self._adapters)
        return bool(self._refused or self.busy or held) or self.scheduler.has_work()

    @property
    def busy(self) -> bool:
        """True while a step is under way, or waits for those of other engines."""
        return bool(self._inflight) or self._offered is not None

    def step(self) -> EngineCoreOutputs | None:
        """Submit what can be submitted, and return the results of the steps that are done. Waits for a result only if
        no step is done and no further one can be submitted. Returns None if there was nothing to collect. A step that
        fails ends its own requests with an error, and no others. Raises EngineDeadError when the executor is gone."""
        if len(self._adapters):
            self._take_read()
        outputs, self._refused = self._refused, []
        if len(self._grammars):
            self._take_compiled(outputs)
        collected = self._collect_done(outputs)
        collected |= self._submit(outputs)
        if not collected and self._inflight and self._offered is None:
            self._collect(outputs)
            collected = True
        if self._inflight and self._inflight[0].masked:
            self._sample(outputs)
        if not collected and not outputs:
            if len(self._grammars):
                self._grammars.wait(COMPILE_POLL_SECONDS)
            elif len(self._adapters):
                time.sleep(COMPILE_POLL_SECONDS)
            else:
                return None
        return self.snapshot(outputs)

    @property
    def may_warm_up(self) -> bool:
        """True while there is a warm-up step left and no other work."""
        return bool(self._warmup_sizes) and not self.has_work()

    def warm_up(self) -> bool:
        """Run the next warm-up step, so that its CUDA graph exists when a request needs it; return whether one ran. It
        is for times without work, and runs on a row and a block that belong to no request. After a warm-up step has
        failed, no other one runs. Raises EngineDeadError when the executor is gone."""
        if not self.may_warm_up:
            return False
        scheduler, freed_rows = self.scheduler, self.scheduler.take_freed_rows()
        step = warmup_step(*self._warmup_sizes.popleft(), freed_rows, scheduler.config, scheduler.draft_lengths)
        try:
            for _ in range(2):  # a size is captured the second time that it runs
                result = self._executor.execute(self._agreed(step)).result()
                if result.notes or result.warnings:
                    self._log(result)
                if result.short_of_memory:  # graphs were dropped to make room; they come back when they are used
                    self._warmup_sizes.clear()
        except EngineDeadError:
            raise
        except Exception:
            logger.warning(
                "a warm-up step failed, so no more will run; graphs are captured when their sizes are first used",
                exc_info=True,
            )
            self._check_after_failure()
            self._warmup_sizes.clear()
        return True

    def snapshot(self, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
        """Return `outputs` together with the engine's statistics of this moment."""
        for output in outputs:
            if (scheduled := self._scheduled_at.pop(output.request_id, None)) is not None:
                output.scheduled_time = scheduled
        stats = self.scheduler.stats()
        stats.num_received, stats.num_received_tokens = self._num_received, self._num_received_tokens
        for held in (self._grammars, self._adapters):
            if len(held):
                stats.num_waiting += len(held)
                stats.num_waiting_tokens += held.num_prompt_tokens
        stats.num_short_steps, stats.graph_bytes = self._num_short_steps, self._graph_bytes
        stats.expert_load = self._expert_load
        stats.num_grammars, stats.mask_seconds = self._grammars.num_compiled, self._grammars.mask_seconds
        if self._watch is not None:
            stats.step_times = self._watch.totals
        stats.problem = self._health.problem
        return EngineCoreOutputs(outputs=outputs, stats=stats, timestamp=time.monotonic())

    def stats(self) -> SchedulerStats:
        """Return the scheduler's statistics of this moment."""
        return self.scheduler.stats()

    def check(self) -> None:
        """Raise EngineDeadError if the executor is gone. A loop calls this while it has nothing to step."""
        self._executor.check()

    def shutdown(self) -> None:
        """Stop the executor. Steps under way are dropped."""
        self._inflight.clear()
        self._grammars.shutdown()
        self._executor.shutdown()
        if self.peers is not None:
            self.peers.close()

    def _submit(self, outputs: list[EngineCoreOutput]) -> bool:
        """Schedule and submit steps until the pipeline is full. Returns True if a step was collected meanwhile. That
        happens with executors that compute within `execute`, and when `execute` raises."""
        collected = False
        while len(self._inflight) < self._depth and not (self._inflight and self._inflight[-1].masked):
            plan = self._next_step()
            if plan is None:
                break
            if plan.new_rows:
                self._note_first_steps(plan)
            watch = self._watch
            began = 0.0 if watch is None else watch.clock()
            try:
                handle = self._executor.execute(plan)
            except EngineDeadError:
                raise
            except Exception as error:
                self._fail(plan, error, outputs)
                collected = True
                continue
            watched = None if watch is None or plan.step < 0 else watch.submitted(plan, began)
            self._inflight.append(_Inflight(plan, handle, watched, plan.masked))
            if plan.masked and len(self._inflight) == 1:
                self._sample(outputs)
            if self._collect_done(outputs):
                return True
        return collected

    def _next_step(self) -> SchedulerOutput | None:
        """Return the step to submit next; None: there is none yet. Where engines share their experts, all have agreed
        to it, and it may be empty: it has a token that belongs to no request."""
        peers = self.peers
        if peers is None:
            return self.scheduler.schedule()
        if self._offered is None:
            step = self.scheduler.schedule()
            if step is None and peers.wait_for_us:
                self._num_empty += 1
                scheduler, number = self.scheduler, WARMUP_STEP - self._num_empty
                empty = warmup_step(1, 1, scheduler.take_freed_rows(), scheduler.config, scheduler.draft_lengths)
                step = structs.replace(empty, step=number)
            if step is None:
                return None
            peers.offer(step.num_tokens)
            self._offered = step
        until = time.monotonic() + AGREE_SECONDS
        while (tokens := peers.agreed(AGREE_POLL_MS)) is None:
            if time.monotonic() > until or (self._inflight and self._inflight[0].handle.done()):
                return None
        step, self._offered = self._offered, None
        return structs.replace(step, engine_tokens=tokens)

    def _agreed(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return a step for which no request waits, once other engines have agreed to it."""
        if self.peers is None:
            return step
        self.peers.offer(step.num_tokens)
        return structs.replace(step, engine_tokens=self.peers.agreed() or [])

    def _sample(self, outputs: list[EngineCoreOutput]) -> None:
        """Make the masks of the one step under way, whose forward runs meanwhile, and let it sample. A request whose
        grammar fails now ends with an error; what the step samples for it is dropped. If none can be made, all with a
        grammar do, and the step samples for the others."""
        step = self._inflight[0]
        requests = self.scheduler.masked_requests(step.plan)
        failure = ""
        try:
            masks = self._grammars.masks(step.plan.step, requests)
        except Exception as error:
            logger.error("the masks of step %d failed", step.plan.step, exc_info=error)
            masks, failure = Masks(step.plan.step), f"its masks failed: {type(error).__name__}"
        for request in (masked.request for masked in requests):
            assert request.matcher is not None
            if reason := failure or request.matcher.error:
                outputs.append(self.scheduler.fail_request(request, reason, invalid=not failure))
        step.masked = False
        try:
            self._executor.sample(masks)
        except EngineDeadError:
            raise
        except Exception as error:
            self._inflight.clear()
            self._fail(step.plan, error, outputs)

    def _take_read(self) -> None:
        """Pass on the requests whose adapters the ranks have read, and refuse those whose adapters cannot be used."""
        for request, error in self._adapters.released():
            if error:
                self._refused.append(_failed(request, RequestError(error, "model")))
            else:
                self._pass_on(request)

    def _take_compiled(self, outputs: list[EngineCoreOutput]) -> None:
        """Pass on the requests whose grammars are compiled, and end those whose grammars cannot be."""
        for request, outcome in self._grammars.released():
            if isinstance(outcome, HeadraceError):
                outputs.append(_failed(request, outcome))
                continue
            try:
                self.scheduler.add_request(request, outcome)
            except HeadraceError as error:
                outputs.append(_failed(request, error))

    def _collect_done(self, outputs: list[EngineCoreOutput]) -> bool:
        """Take the results of all steps that are done; return whether there was any."""
        collected = False
        while self._inflight and not self._inflight[0].masked and self._inflight[0].handle.done():
            self._collect(outputs)
            collected = True
        return collected

    def _collect(self, outputs: list[EngineCoreOutput]) -> None:
        """Take the oldest step's result, waiting for it if necessary, and add what it brought to `outputs`."""
        step = self._inflight.popleft()
        try:
            result = step.handle.result()
        except EngineDeadError:
            raise
        except Exception as error:
            self._watch_finished(step, counts=False)
            self._fail(step.plan, error, outputs)
            return
        if step.plan.step >= 0:
            self._health.finished(result)
        self._watch_finished(step, counts=not (result.notes or result.warnings))
        if result.notes or result.warnings:
            self._log(result)
        if result.short_of_memory:
            self._shrink_steps(step.plan)
        if step.plan.step >= 0:
            if result.expert_load is not None:
                self._expert_load = self._expert_load.plus(result.expert_load)
            outputs.extend(self.scheduler.update(step.plan, result))

    def _watch_finished(self, step: _Inflight, counts: bool) -> None:
        if self._watch is not None and step.watched is not None:
            seconds, length = self._watch.finished(step.watched, counts), self.scheduler.draft_length
            if length is not None:
                length.observe(step.plan, seconds, counts)

    def _log(self, result: RunnerOutput) -> None:
        for note in result.notes:
            logger.debug("%s", note)
        for warning in result.warnings:
            logger.warning("%s", warning)
        self._graph_bytes = result.graph_bytes

    def _shrink_steps(self, plan: SchedulerOutput) -> None:
        """Lower the token budget of later steps, because there was no memory for this one."""
        self._num_short_steps += 1
        smaller = smaller_budget(self._config, plan.num_tokens)
        if smaller is not None:
            self._config, decisions = smaller
            log_decisions(decisions, logging.WARNING)
            tokens = self._config.max_num_batched_tokens
            assert tokens is not None
            limits = self.scheduler.config
            tokens = max(tokens, limits.max_num_seqs * (1 + limits.num_drafts))
            self.scheduler.config = dataclasses.replace(limits, max_num_batched_tokens=tokens)

    def _fail(self, plan: SchedulerOutput, error: Exception, outputs: list[EngineCoreOutput]) -> None:
        """End the requests of a step that failed. Raises EngineDeadError if no later step could succeed either."""
        logger.error("step %d failed", plan.step, exc_info=error)
        self._check_after_failure()
        self._health.failed(error)
        if isinstance(error, OutOfMemoryError):
            self._shrink_steps(plan)
        # Messages of other errors may name internals, so they go to the log alone.
        detail = f": {error}" if isinstance(error, HeadraceError) else ""
        outputs.extend(self.scheduler.fail(plan, f"the step failed: {type(error).__name__}{detail}"))

    def _check_after_failure(self) -> None:
        """Raise EngineDeadError if no later step could succeed after one has failed: the executor is gone, or engines
        that share the experts wait inside the step."""
        self._executor.check()
        if self.peers is not None:
            raise EngineDeadError("a step failed that engines take together, as they share their experts")

    def _note_first_steps(self, plan: SchedulerOutput) -> None:
        """Note the time for requests whose first step this is; one that resumes after a preemption is none of them."""
        now = time.monotonic()
        for request in self.scheduler.running.items:
            if request.admitted_step == plan.step and not request.num_preemptions:
                self._scheduled_at[request.request_id] = now


def _failed(request: EngineCoreRequest, error: HeadraceError) -> EngineCoreOutput:
    retry_after = error.retry_after if isinstance(error, QueueFullError) else 0
    return EngineCoreOutput.failed(request.request_id, str(error), isinstance(error, RequestError), retry_after)


def log_decisions(decisions: list[Decision], level: int = logging.DEBUG) -> list[Decision]:
    """Log each decision with its reason, and return them."""
    for decision in decisions:
        logger.log(level, "%s", decision)
    return decisions
