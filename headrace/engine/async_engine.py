"""The engine as a server sees it: an async iterator of RequestOutputs for each request.

The core runs in its own process; text is made here, while the core computes. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.core_client import STOP_SECONDS, AsyncMPClient
from headrace.engine.input_processor import InputProcessor, ModelLimits, sampling_defaults
from headrace.engine.messages import Abort, CoreFacts
from headrace.engine.metrics import EngineMetrics
from headrace.engine.output_processor import OutputKind, OutputProcessor
from headrace.engine.queue_bound import QueueBound, Reservation
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import EngineDeadError, HeadraceError
from headrace.hub import resolve_model_folder, resolve_tokenizer_folder
from headrace.model_config import ModelConfig
from headrace.models.registry import read_served_config
from headrace.planner.record import Decision
from headrace.planner.served import expect, predict_memory, report_memory
from headrace.request import RequestOutput
from headrace.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""Longer prompts are tokenized in a thread, so that the event loop goes on."""
AT_ONCE = 1 << 16
"""Characters or ids of several prompts that a thread takes before those of another request have their turn."""
TOKENIZER_THREADS = 2
STATS_SECONDS = 10.0
MOST_MERGED_STEPS = 8
"""What so many steps brought is written with that of the one before where writing falls behind: a write costs more than
all before it."""


class AsyncEngine:
    """Make one with `await AsyncEngine.start(config)`; end it with `await engine.shutdown()`."""

    def __init__(
        self, client: AsyncMPClient, facts: CoreFacts, model_config: ModelConfig, tokenizer: Tokenizer | None
    ) -> None:
        self.config: EngineConfig = facts.config
        self.decisions: list[Decision] = facts.decisions
        self.model_config = model_config
        self.tokenizer = tokenizer
        layout = facts.workers[0].layout
        limits = ModelLimits.of(facts.config, model_config, layout, facts.num_pages, tokenizer)
        self.max_model_len: int = limits.max_model_len
        self.vocab_size: int = limits.vocab_size
        self.metrics = make_metrics(facts, limits)
        self.queue = QueueBound(facts.config, self.metrics)
        """What may wait; for whoever wants to keep to it, by `reservation`."""
        self.default_sampling = sampling_defaults(facts.config, model_config)
        """Fields of SamplingParams for requests that leave them out."""
        if self.default_sampling:
            said = ", ".join(f"{name}={value}" for name, value in self.default_sampling.items())
            logger.info("sampling defaults: %s (generation_config.json; --generation-config vllm ignores it)", said)
        self.expected = expect(facts.config, model_config, facts.workers, facts.num_pages)
        """What the planner predicts for the traffic that flags say to expect, or the usual one; None: it cannot."""
        predicted = predict_memory(facts.config, model_config, facts.workers)
        self.memory = report_memory(facts.config, predicted, facts.workers, facts.num_pages)
        for line in filter(None, (self.memory, self.expected)):
            logger.info("%s", line)
        self.kv_cache_tokens = layout.tokens_in(facts.num_pages, limits.max_model_len)
        self._client = client
        self._inputs = InputProcessor(limits, facts.config, tokenizer)
        self._outputs = OutputProcessor(tokenizer, self.metrics)
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._dead: EngineDeadError | None = None
        self._tasks = [asyncio.create_task(self._receive_outputs(), name="engine-outputs")]
        if not facts.config.disable_log_stats:
            self._tasks.append(asyncio.create_task(self._log_stats(), name="engine-stats"))

    @classmethod
    async def start(cls, config: EngineConfig, executor: str | None = None) -> AsyncEngine:
        """Start the core and wait until it can serve. Raises what is wrong as a UserError. `executor`:
        `module:attribute` of a function like `make_executor`, for tests."""
        folder = await asyncio.to_thread(model_folder, config)
        model_config = read_served_config(folder)
        sampling_defaults(config, model_config)  # what is wrong with them is told before anything is loaded
        client = AsyncMPClient(config, folder, executor)
        try:
            # The tokenizer loads while the core does.
            tokenizer, facts = await asyncio.gather(asyncio.to_thread(load_tokenizer, config, folder), client.ready())
        except BaseException:
            await client.shutdown(timeout=0.5)
            raise
        return cls(client, facts, model_config, tokenizer)

    @property
    def core_pid(self) -> int:
        return self._client.pid

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: OutputKind = "delta",
        client: str = "",
        parent: str | None = None,
        reservation: Reservation | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`delta`: what came since the last output, several steps in one if nobody was waiting. `final`: one output.

        `client`: whose it is, and `parent`: what it is part of (None: nothing but its own n choices), as these take
        turns. `reservation`: in the queue; without one it is sent whatever waits.

        Raises RequestError on the first step for invalid input, EngineDeadError when the core dies, HeadraceError if
        this request failed there. Closing or cancelling the iterator aborts the request.
        """
        arrival_time = time.monotonic()
        if self._dead is not None:
            raise self._dead
        ids = await self.tokenize(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        requests = self._inputs.process(
            request_id, ids, params, arrival_time=arrival_time, priority=priority, cache_salt=cache_salt,
            client=client, parent=request_id if parent is None else parent,
        )  # fmt: skip
        text = prompt if isinstance(prompt, str) else None
        changed = asyncio.Event()
        request = self._outputs.add(request_id, text, requests, params, output_kind, changed.set)
        if not self.config.disable_log_requests:
            logger.info("request %s: %d prompt tokens, %s", request_id, len(ids), params)
        finished = False
        try:
            self._client.add(requests)
            self.queue.sent(len(requests), len(requests) * len(ids), reservation)
            while not finished:
                output = request.take()
                if output is None:
                    changed.clear()
                    await changed.wait()
                    continue
                finished = output.finished
                yield output
        except HeadraceError:
            finished = True  # the engine ended it
            self._outputs.abort(request)
            raise
        finally:
            if not finished:
                self._abort(self._outputs.abort(request))

    async def prepare(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of all prompts of one request, for `generate`. Raises RequestError where one of them, or all
        together, could not run with `params`: then none of them does."""
        if self._dead is not None:
            raise self._dead
        loop = asyncio.get_running_loop()

        def work(group: list[str | list[int]]) -> list[list[int]]:
            return [self._inputs.prepare(prompt, params, add_special_tokens) for prompt in group]

        found: list[list[int]] = []
        for group, size in _groups(prompts):
            found += work(group) if size <= INLINE_CHARS else await loop.run_in_executor(self._threads, work, group)
        self._inputs.check_together(sum(map(len, found)), params)
        return found

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError if the text cannot fit into the model's context; long texts leave the event loop free."""
        if len(text) <= INLINE_CHARS:
            return self._inputs.tokenize(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._inputs.tokenize, text, add_special_tokens)

    async def abort(self, request_id: str) -> None:
        """End a request from outside: its iterator gets what there is, with finish_reason `abort`."""
        self._abort(self._outputs.finish_aborted(request_id))

    def check_health(self) -> None:
        """Raises EngineDeadError unless the core lives and its loop goes round, StepsFailError while its steps fail."""
        if self._dead is not None:
            raise self._dead
        self._client.check_health(has_requests=self._outputs.num_requests > 0)

    @property
    def num_requests(self) -> int:
        """Unfinished ones."""
        return self._outputs.num_requests

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """Ends open requests with EngineDeadError; no process is left behind when it returns."""
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
                # Steps that have come meanwhile say that writing takes longer than a step.
                for _ in range(MOST_MERGED_STEPS):
                    if (waiting := self._client.receive_waiting()) is None:
                        break
                    self._abort(self._outputs.process(waiting))
                self.queue.observe()
                await asyncio.sleep(0)  # a core faster than this loop must not keep the readers from their tokens
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
        """One line every ten seconds in which tokens were made."""
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
    """In order, and the characters or ids of each group."""
    group: list[str | list[int]] = []
    size = 0
    for prompt in prompts:
        if group and size + len(prompt) > AT_ONCE:
            yield group, size
            group, size = [], 0
        group.append(prompt)
        size += len(prompt)
    yield group, size


def model_folder(config: EngineConfig) -> Path:
    return resolve_model_folder(config.model, config.revision, config.download_dir, config.load_format)


def load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        folder = resolve_tokenizer_folder(config.tokenizer, config.revision, config.download_dir)
    return Tokenizer.from_folder(folder, config.chat_template)


def make_metrics(facts: CoreFacts, limits: ModelLimits) -> EngineMetrics:
    config = facts.config
    name = config.served_model_name[0] if config.served_model_name else config.model
    cache_config: dict[str, object] = {
        "block_size": config.block_size,
        "num_gpu_blocks": facts.num_pages,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    return EngineMetrics(name, limits.max_model_len, cache_config, facts.workers[0].demoted if facts.workers else ())
