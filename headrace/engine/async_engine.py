"""Offers the engine to a server: for each request, an async iterator of RequestOutputs.

The core runs in its own process. Text is made here, while the core computes. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.config import EngineConfig
from headrace.engine.core_client import STOP_SECONDS, AsyncMPClient
from headrace.engine.input_processor import InputProcessor, ModelLimits, sampling_defaults
from headrace.engine.messages import Abort, CoreFacts
from headrace.engine.metrics import EngineMetrics
from headrace.engine.output_processor import OpenRequest, OutputKind, OutputProcessor
from headrace.engine.pooling import PoolingInputs
from headrace.engine.queue_bound import QueueBound, Reservation
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import EngineDeadError
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig
from headrace.models.registry import read_served_config
from headrace.planner.record import Decision
from headrace.planner.served import expect, predict_memory, report_memory
from headrace.request import RequestOutput
from headrace.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_CHARS = 4096
"""Longer prompts are tokenized in a thread, so that the event loop is not held up."""
GROUP_CHARS = 1 << 16
"""Characters or ids of prompts that a thread takes at a time; then it is the turn of other requests' prompts."""
TOKENIZER_THREADS = 2
STATS_SECONDS = 10.0
MAX_MERGED_STEPS = 8
"""Most further steps whose outputs are written together with those of one step, when writing falls behind. The write
itself costs more than all that leads to it."""


class AsyncEngine:
    """Runs the requests of a server on a core in another process. Make one with `await AsyncEngine.start(config)`; end
    it with `await engine.shutdown()`."""

    def __init__(
        self, client: AsyncMPClient, facts: CoreFacts, model_config: ModelConfig, tokenizer: Tokenizer | None
    ) -> None:
        self.config: EngineConfig = facts.config
        self.decisions: list[Decision] = facts.decisions
        self.model_config = model_config
        self.tokenizer = tokenizer
        layout = facts.workers[0].layout
        limits = ModelLimits.of(facts.config, model_config, layout, facts.num_pages, tokenizer)
        self.limits = limits
        self.max_model_len: int = limits.max_model_len
        self.vocab_size: int = limits.vocab_size
        self.metrics = make_metrics(facts, limits)
        self.queue = QueueBound(facts.config, self.metrics)
        """Bounds what waits; it holds for callers that reserve a place in it before they call `generate`."""
        self.default_sampling = sampling_defaults(facts.config, model_config)
        """Sampling parameters of requests that leave them out."""
        self.expected = expect(facts.config, model_config, facts.workers, facts.num_pages)
        """The planner's prediction for the expected traffic, from flags or the usual one; None: it has none."""
        predicted = predict_memory(facts.config, model_config, facts.workers)
        self.memory = report_memory(facts.config, predicted, facts.workers, facts.num_pages)
        """Memory of the device, predicted and reported."""
        self.device_name: str = facts.workers[0].device_name
        self.demoted: list[str] = facts.workers[0].demoted
        """Kernels and the like that failed the self-check at load and are not used."""
        self.kv_cache_tokens = layout.tokens_in(facts.num_pages, limits.max_model_len)
        self._client = client
        self._inputs = InputProcessor(limits, facts.config, tokenizer)
        self.pooling_inputs: PoolingInputs | None = None
        """What prepares the prompts of a model that pools."""
        if limits.pooling is not None:
            templated = facts.config.chat_template is not None
            self.pooling_inputs = PoolingInputs(limits.pooling, self._inputs, tokenizer, templated)
        self._outputs = OutputProcessor(tokenizer, self.metrics)
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._dead: EngineDeadError | None = None
        self._tasks = [asyncio.create_task(self._receive_outputs(), name="engine-outputs")]
        if not facts.config.disable_log_stats:
            self._tasks.append(asyncio.create_task(self._log_stats(), name="engine-stats"))

    @classmethod
    async def start(cls, config: EngineConfig, executor: str | None = None) -> AsyncEngine:
        """Start the core and wait until it can serve. Raises UserError for whatever keeps it from starting. `executor`:
        `module:attribute` of a function to use in place of `make_executor`, for tests."""
        folder = await asyncio.to_thread(model_folder, config)
        model_config = read_served_config(folder, config)
        sampling_defaults(config, model_config)  # raises what is wrong with them before anything is loaded
        client = AsyncMPClient(config, folder, executor)
        try:
            # The tokenizer loads while the core does.
            tokenizer, facts = await asyncio.gather(asyncio.to_thread(load_tokenizer, config, folder), client.ready())
        except BaseException:
            await client.shutdown(timeout=0.5)
            raise
        return cls(client, facts, model_config, tokenizer)

    async def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: OutputKind = "delta",
        kept: Set[int] = frozenset(),
        client: str = "",
        parent: str | None = None,
        reservation: Reservation | None = None,
        grammar: str | None = None,
        pools: str = "",
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Run the prompts of one HTTP request; yield batches of (prompt index, output) with all that has come.

        `output_kind`: with `delta` each output holds what came since the last one, of several steps if the reader was
        slow; with `final` each prompt has one output. `kept`: special tokens that stay in the text although `params`
        skip them. `client` and `parent`: whose request it is, and the HTTP request that it is part of (None: it stands
        alone), among which the scheduler takes turns. `reservation`: the prompts' place in the queue; without one they
        are sent whatever waits. `grammar`: what holds the outputs (made off the event loop); None: what `params` ask
        for. `pools`: see EngineCoreRequest.

        Raises RequestError for invalid input before the first output, EngineDeadError when the core dies, and
        HeadraceError if a prompt failed there. An error, or closing or cancelling the iterator, aborts all prompts.
        """
        changed = asyncio.Event()
        opened: dict[int, OpenRequest] = {}
        try:
            for index, ids in enumerate(prompts):
                if index:
                    await asyncio.sleep(0)  # checking and sending many prompts must not hold up other requests
                if self._dead is not None:
                    raise self._dead
                name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
                requests = self._inputs.process(
                    name, ids, params, arrival_time=time.monotonic(), priority=priority, cache_salt=cache_salt,
                    client=client, parent=request_id if parent is None else parent, grammar=grammar,
                    pools=pools,
                )  # fmt: skip
                opened[index] = self._outputs.add(name, None, requests, params, output_kind, changed.set, kept)
                if not self.config.disable_log_requests:
                    logger.info("request %s: %d prompt tokens, %s", name, len(ids), params)
                self._client.add(requests)
                self.queue.sent(len(requests), len(requests) * len(ids), reservation)
            while opened:
                changed.clear()
                batch = [(index, output) for index, item in opened.items() if (output := item.take()) is not None]
                for index, output in batch:
                    if output.finished:
                        del opened[index]
                if batch:
                    yield batch
                for request in opened.values():
                    if request.error is not None and request.failed:
                        raise request.error
                if not batch:
                    await changed.wait()
        finally:
            for request in opened.values():
                self._abort(self._outputs.abort(request))

    async def prepare(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of all prompts of one HTTP request, for `generate`. Raises RequestError if one of them,
        or all together, could not run with `params`, so that none of them does."""
        if self._dead is not None:
            raise self._dead

        def work(group: list[str | list[int]]) -> list[list[int]]:
            return [self._inputs.prepare(prompt, params, add_special_tokens) for prompt in group]

        found: list[list[int]] = []
        for group, size in _groups(prompts):
            found += await self._work(size, functools.partial(work, group))
        self._inputs.check_together(sum(map(len, found)), params)
        return found

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids; long texts are tokenized in a thread. Raises RequestError for one that is too long
        for the model's context."""
        return await self._work(len(text), lambda: self._inputs.tokenize(text, add_special_tokens))

    async def _work(self, size: int, function: Callable[[], T]) -> T:
        """Call a function that handles `size` characters or ids: here if they are few, else in a thread."""
        if size <= INLINE_CHARS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def abort(self, request_id: str) -> None:
        """End a request. Its iterator yields what there is, with finish_reason `abort`."""
        self._abort(self._outputs.finish_aborted(request_id))

    def check_health(self) -> None:
        """Raise EngineDeadError if the core is dead or silent for too long, StepsFailError while its steps fail."""
        if self._dead is not None:
            raise self._dead
        self._client.check_health(has_requests=self._outputs.num_requests > 0)

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """End open requests with EngineDeadError, and the core's process. No process is left when this returns."""
        self._dead = self._dead or EngineDeadError("the engine is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._outputs.fail_all(self._dead)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._client.shutdown(timeout)

    def _abort(self, aborts: list[Abort]) -> None:
        if aborts and self._dead is None:
            self._client.abort(aborts)

    async def _receive_outputs(self) -> None:
        try:
            while True:
                self._abort(self._outputs.process(await self._client.receive()))
                # If further steps have arrived meanwhile, writing takes longer than a step.
                for _ in range(MAX_MERGED_STEPS):
                    if (waiting := self._client.receive_waiting()) is None:
                        break
                    self._abort(self._outputs.process(waiting))
                self.queue.observe()
                await asyncio.sleep(0)  # lets the readers run, even if the core is faster than this loop
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # a bug on this side must not leave requests waiting for ever
            logger.exception("the engine's front end failed")
            self._die(EngineDeadError(f"the engine's front end failed: {type(error).__name__}: {error}"))

    def _die(self, error: EngineDeadError) -> None:
        logger.error("%s", error)
        self._dead = error
        self._outputs.fail_all(error)

    async def _log_stats(self) -> None:
        """Log throughput every ten seconds, unless no token was processed."""
        metrics = self.metrics
        prompt, generation = metrics.num_prompt_tokens, metrics.num_generation_tokens
        while True:
            await asyncio.sleep(STATS_SECONDS)
            new_prompt, new_generation = metrics.num_prompt_tokens - prompt, metrics.num_generation_tokens - generation
            if new_prompt or new_generation:
                stats = metrics.stats
                logger.info(
                    "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f%%, "
                    "prefix cache hits %.1f%%",
                    new_prompt / STATS_SECONDS,
                    new_generation / STATS_SECONDS,
                    stats.num_running,
                    stats.num_waiting,
                    100 * metrics.kv_cache_usage,
                    100 * stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
                )
            prompt, generation = prompt + new_prompt, generation + new_generation


def _groups(prompts: Sequence[str | list[int]]) -> Iterator[tuple[list[str | list[int]], int]]:
    """Split prompts into groups of about GROUP_CHARS, in order; yield each group with its characters or ids."""
    group: list[str | list[int]] = []
    size = 0
    for prompt in prompts:
        if group and size + len(prompt) > GROUP_CHARS:
            yield group, size
            group, size = [], 0
        group.append(prompt)
        size += len(prompt)
    yield group, size


def model_folder(config: EngineConfig) -> Path:
    """Return the folder of the config's model, downloading it if necessary."""
    return resolve_model_folder(config.model, config.revision, config.download_dir, config.load_format)


def make_metrics(facts: CoreFacts, limits: ModelLimits) -> EngineMetrics:
    """Return the metrics of an engine that has started."""
    config = facts.config
    name = config.served_model_name[0] if config.served_model_name else config.model
    cache_config: dict[str, object] = {
        "block_size": config.block_size,
        "num_gpu_blocks": facts.num_pages,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    return EngineMetrics(name, limits.max_model_len, cache_config, facts.workers[0].demoted if facts.workers else ())
