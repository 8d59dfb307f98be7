"""The engine core: the loop around scheduler and executor, in its own process beside a server or in this one for LLM.

One step is scheduled and submitted while the one before it still runs, so that the device never waits for the host.
Imports no torch: executors are made lazily. Knows nothing of text or sockets.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.cache_groups import CacheLayout
from headrace.config import EngineConfig
from headrace.engine.fit import fit, told
from headrace.engine.messages import Abort, CoreFacts
from headrace.engine.step_health import StepHealth
from headrace.engine.step_watch import StepWatch, Watched
from headrace.errors import ConfigError, EngineDeadError, HeadraceError, OutOfMemoryError
from headrace.executor.base import Executor, StepHandle
from headrace.executor.factory import detect_device, make_executor
from headrace.model_config import ModelConfig
from headrace.models.registry import read_served_config
from headrace.planner.decisions import decide_before_load, decide_mixed_step
from headrace.planner.profile import measured_here
from headrace.planner.served import predict_steps
from headrace.planner.settings import all_settings
from headrace.planner.smaller import smaller_budget
from headrace.quantization.checkpoint_format import holds_kv_scales
from headrace.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.scheduler import Scheduler
from headrace.step import RunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

ExecutorFactory = Callable[[EngineConfig, Path, ModelConfig], Executor]
PIPELINE_DEPTH = 2
"""Steps submitted and not collected: the one that runs and the one behind it."""
REHEARSED = -1
"""number of a step that serves nobody"""


@dataclass(frozen=True)
class _Inflight:
    plan: SchedulerOutput
    handle: StepHandle
    watched: Watched | None


def rehearsal(num_reqs: int, num_tokens: int, freed_rows: list[int], config: SchedulerConfig) -> SchedulerOutput:
    """A step of so many requests and tokens, all in the row behind those of max_num_seqs requests."""
    rows, samples, drafts = [config.max_num_seqs] * num_reqs, [True] * num_reqs, config.num_drafts
    if drafts and num_tokens == num_reqs * (1 + drafts):
        counts = [1 + drafts] * num_reqs
        return SchedulerOutput(
            REHEARSED, [], freed_rows, [], rows, [0] * num_reqs, counts, samples, num_drafts=[drafts] * num_reqs
        )
    counts = [1] * num_reqs
    for index in reversed(range(num_reqs)):  # longer chunks stand last
        counts[index] += min(num_tokens - sum(counts), config.max_model_len - 1)
    return SchedulerOutput(REHEARSED, [], freed_rows, [], rows, [0] * num_reqs, counts, samples)


class EngineCore:
    """`add_request` and `abort` at any time between steps; `step` until `has_work` is false."""

    def __init__(
        self, facts: CoreFacts, scheduler: Scheduler, executor: Executor, watch: StepWatch | None = None
    ) -> None:
        """`watch`: holds the times of steps against what is predicted."""
        self.facts = facts
        self.scheduler = scheduler
        self._executor = executor
        self._watch = watch
        self._health = StepHealth(facts.config.dtype)
        self._rehearsals = collections.deque(facts.workers[0].rehearsals if facts.workers else [])
        self._depth = PIPELINE_DEPTH if facts.config.async_scheduling else 1
        self._inflight: collections.deque[_Inflight] = collections.deque()
        self._refused: list[EngineCoreOutput] = []
        self._config = facts.config
        self._graph_bytes: dict[str, int] = {}
        self._num_short_steps = 0
        self._scheduled_at: dict[str, float] = {}
        """request id -> time.monotonic() of its first step, until its first output takes it along"""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Never raises: what is wrong with one request comes back as its own output, with finish_reason `error`."""
        try:
            self.scheduler.add_request(request)
        except HeadraceError as error:
            self._refused.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=str(error),
                )
            )

    def abort(self, aborts: Iterable[Abort]) -> None:
        for abort in aborts:
            self._scheduled_at.pop(abort.request_id, None)
            self.scheduler.abort(abort.request_id, abort.num_output_tokens_kept)

    def has_work(self) -> bool:
        return bool(self._refused) or bool(self._inflight) or self.scheduler.has_work()

    @property
    def busy(self) -> bool:
        """A step is under way."""
        return bool(self._inflight)

    def step(self) -> EngineCoreOutputs | None:
        """Keep the device fed and collect one step or more; waits only if none is done and the pipeline is full.

        None if there was nothing to collect. Raises EngineDeadError when the executor is gone; any other failure of a
        step ends the requests of that step alone.
        """
        outputs, self._refused = self._refused, []
        collected = self._collect_done(outputs)
        collected |= self._submit(outputs)
        if not collected and self._inflight:
            self._collect(outputs)
            collected = True
        if not collected and not outputs:
            return None
        return self.snapshot(outputs)

    @property
    def may_rehearse(self) -> bool:
        return bool(self._rehearsals) and not self.has_work()

    def rehearse(self) -> bool:
        """With nothing else to do: run a step of a size that has come up for nobody, twice, so that its graph is there
        when it does. It runs on the row and the block that belong to no request. False: there is work, or none is left.

        Raises EngineDeadError when the executor is gone; after any other failure nothing is rehearsed any more.
        """
        if not self.may_rehearse:
            return False
        step = rehearsal(*self._rehearsals.popleft(), self.scheduler.take_freed_rows(), self.scheduler.config)
        try:
            for _ in range(2):  # a size is captured at its second use
                result = self._executor.execute(step).result()
                if result.notes or result.warnings:
                    self._log(result)
                if result.short_of_memory:  # graphs had to go for it: they come back as they are used
                    self._rehearsals.clear()
        except EngineDeadError:
            raise
        except Exception:
            logger.warning("a rehearsed step failed; graphs are captured as their sizes come up", exc_info=True)
            self._executor.check()
            self._rehearsals.clear()
        return True

    def snapshot(self, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
        for output in outputs:
            if (scheduled := self._scheduled_at.pop(output.request_id, None)) is not None:
                output.scheduled_time = scheduled
        stats = self.scheduler.stats()
        stats.num_short_steps, stats.graph_bytes = self._num_short_steps, self._graph_bytes
        if self._watch is not None:
            stats.step_times = self._watch.totals
        stats.problem = self._health.problem
        return EngineCoreOutputs(outputs=outputs, stats=stats, timestamp=time.monotonic())

    def check(self) -> None:
        """Raises EngineDeadError if the executor is gone; for a loop that has nothing to step."""
        self._executor.check()

    def shutdown(self) -> None:
        self._inflight.clear()
        self._executor.shutdown()

    def _submit(self, outputs: list[EngineCoreOutput]) -> bool:
        """Fill the pipeline. True if a step was collected on the way (executors that compute at once)."""
        collected = False
        while len(self._inflight) < self._depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            if plan.new_rows:
                self._note_admissions(plan)
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
            self._inflight.append(_Inflight(plan, handle, None if watch is None else watch.submitted(plan, began)))
            if self._collect_done(outputs):
                return True
        return collected

    def _collect_done(self, outputs: list[EngineCoreOutput]) -> bool:
        collected = False
        while self._inflight and self._inflight[0].handle.done():
            self._collect(outputs)
            collected = True
        return collected

    def _collect(self, outputs: list[EngineCoreOutput]) -> None:
        """Take the oldest step's result, waiting for it if need be."""
        step = self._inflight.popleft()
        try:
            result = step.handle.result()
        except EngineDeadError:
            raise
        except Exception as error:
            self._watched(step, counts=False)
            self._fail(step.plan, error, outputs)
            return
        self._health.finished(result)
        self._watched(step, counts=not (result.notes or result.warnings))
        if result.notes or result.warnings:
            self._log(result)
        if result.short_of_memory:
            self._shrink(step.plan)
        outputs.extend(self.scheduler.update(step.plan, result))

    def _watched(self, step: _Inflight, counts: bool) -> None:
        if self._watch is not None and step.watched is not None:
            self._watch.finished(step.watched, counts)

    def _log(self, result: RunnerOutput) -> None:
        for note in result.notes:
            logger.info("%s", note)
        for warning in result.warnings:
            logger.warning("%s", warning)
        self._graph_bytes = result.graph_bytes

    def _shrink(self, plan: SchedulerOutput) -> None:
        """A step found no memory: plan smaller ones from now on."""
        self._num_short_steps += 1
        smaller = smaller_budget(self._config, plan.num_tokens)
        if smaller is not None:
            self._config, decisions = smaller
            told(decisions, logging.WARNING)
            tokens = self._config.max_num_batched_tokens
            assert tokens is not None
            limits = self.scheduler.config
            tokens = max(tokens, limits.max_num_seqs * (1 + limits.num_drafts))
            self.scheduler.config = dataclasses.replace(limits, max_num_batched_tokens=tokens)

    def _fail(self, plan: SchedulerOutput, error: Exception, outputs: list[EngineCoreOutput]) -> None:
        logger.error("step %d failed", plan.step, exc_info=error)
        self._executor.check()  # else every later step would fail too
        self._health.failed(error)
        if isinstance(error, OutOfMemoryError):
            self._shrink(plan)
        said = f": {error}" if isinstance(error, HeadraceError) else ""  # other words may name internals: logged alone
        outputs.extend(self.scheduler.fail(plan, f"the step failed: {type(error).__name__}{said}"))

    def _note_admissions(self, plan: SchedulerOutput) -> None:
        now = time.monotonic()
        for request in self.scheduler.running.items:
            if request.admitted_step == plan.step and not request.num_preemptions:
                self._scheduled_at[request.request_id] = now


def build_core(config: EngineConfig, folder: Path, beside_server: bool, executor: str | None = None) -> EngineCore:
    """Decide, load and allocate; everything that can be wrong with a start is raised here, as a UserError.

    `executor`: `module:attribute` of a function like `make_executor`, for tests.
    """
    model_config = read_served_config(folder)
    device, factory = _executor_factory(config, executor)
    measured = measured_here(config, model_config, device)
    resolved, decisions = decide_before_load(config, model_config, device, beside_server, measured)
    told(all_settings(resolved, decisions))
    asked_cache = config.kv_cache_dtype != "auto" or holds_kv_scales(model_config.quantization)
    fitted = fit(lambda plan: factory(plan, folder, model_config), resolved, config, asked_cache)
    try:
        mixed_step, chunk = decide_mixed_step(fitted.config, fitted.workers, streamed=beside_server)
        decisions += fitted.decisions + told(chunk)
        scheduler = Scheduler(_scheduler_config(fitted.config, fitted.workers[0].layout, fitted.num_pages, mixed_step))
    except BaseException:
        fitted.executor.shutdown()
        raise
    settled = all_settings(fitted.config, decisions)
    facts = CoreFacts(fitted.config, settled, fitted.workers, fitted.num_pages)
    prediction = predict_steps(fitted.config, model_config, fitted.workers)
    return EngineCore(facts, scheduler, fitted.executor, None if prediction is None else StepWatch(prediction))


def _executor_factory(config: EngineConfig, path: str | None) -> tuple[str, ExecutorFactory]:
    """The device to decide for, and what makes the executor."""
    if path is None:
        return detect_device(config), make_executor
    module, _, attribute = path.partition(":")
    return "cpu" if config.device == "auto" else config.device, getattr(importlib.import_module(module), attribute)


def _scheduler_config(
    config: EngineConfig, layout: CacheLayout, num_pages: int, mixed_step_tokens: int | None
) -> SchedulerConfig:
    if config.max_num_seqs is None or config.max_num_batched_tokens is None or config.max_model_len is None:
        raise ConfigError("the planner left max_num_seqs, max_num_batched_tokens or max_model_len open")
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        layout=layout,
        num_pages=num_pages,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        mixed_step_tokens=mixed_step_tokens,
    )
