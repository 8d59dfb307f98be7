"""Offers the engine to a server: for each request, an async iterator of RequestOutputs.

The core runs in its own process, or several do (replicas.py). Text is made here, while they compute. Knows nothing of
HTTP.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.config import EngineConfig
from headrace.engine.core_client import STOP_SECONDS, AsyncMPClient, CoreLink, JoinedCore
from headrace.engine.input_processor import InputProcessor, ModelLimits, sampling_defaults
from headrace.engine.joined import meeting_of, settle_experts
from headrace.engine.machines import Machines, RemoteCore
from headrace.engine.messages import CoreFacts, Join
from headrace.engine.metrics import EngineMetrics
from headrace.engine.output_processor import OpenRequest, OutputKind
from headrace.engine.pooling import PoolingInputs
from headrace.engine.queue_bound import QueueBound, Reservation
from headrace.engine.replicas import Replicas
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.hub import resolve_model_folder
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.models.served import read_served_config
from headrace.planner.record import Decision
from headrace.planner.served import expect, most_output, predict_memory, report_memory
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


class AsyncEngine:
    """Runs the requests of a server on cores in other processes. Make one with `await AsyncEngine.start(config)`; end
    it with `await engine.shutdown()`. A further HTTP process makes one of the same cores with `AsyncEngine.join`."""

    def __init__(
        self, clients: dict[int, CoreLink], all_facts: list[CoreFacts], model_config: ModelConfig,
        tokenizer: Tokenizer | None, folder: Path, front_end: int = 0,
    ) -> None:  # fmt: skip
        """`clients`: those of the cores that have started, by rank; `all_facts` are parallel to them. Of several
        engines the one with the least room bounds what a request may ask. `folder`: the model's. `front_end`: which of
        the HTTP processes this is; the first one shows what is the cores' own."""
        self.folder = folder
        facts = min(all_facts, key=lambda each: each.num_pages)
        self.config: EngineConfig = facts.config
        self.num_engines = len(clients)
        self.decisions: list[Decision] = facts.decisions
        self.model_config = model_config
        self.tokenizer = tokenizer
        layout = facts.workers[0].layout
        limits = ModelLimits.of(facts.config, model_config, layout, facts.num_pages, tokenizer)
        self.limits = limits
        self.max_model_len: int = limits.max_model_len
        self.vocab_size: int = limits.vocab_size
        shown = [
            make_metrics(each, limits, rank, first=not front_end) for rank, each in zip(clients, all_facts, strict=True)
        ]
        self.metrics, *self.metrics.others = shown
        self.queue = QueueBound(facts.config, shown)
        """Bounds what waits; it holds for callers that reserve a place in it before they call `generate`."""
        self.default_sampling = sampling_defaults(facts.config, model_config)
        """Sampling parameters of requests that leave them out."""
        self.expected = expect(facts.config, model_config, facts.workers, facts.num_pages)
        """The planner's prediction for the expected traffic, from flags or the usual one; None: it has none."""
        self.most_output: float | None = None
        """The most output tokens a second of several engines together, as predicted; None: it is not."""
        if len(clients) > 1 and facts.workers[0].device != "cpu":  # where engines take the cores themselves
            one = most_output(facts.config, model_config, facts.workers, facts.num_pages)
            self.most_output = None if one is None else len(clients) * one
        predicted = predict_memory(facts.config, model_config, facts.workers)
        self.memory = report_memory(facts.config, predicted, facts.workers, facts.num_pages)
        """Memory of the device, predicted and reported."""
        self.device_name: str = facts.workers[0].device_name
        self.demoted: list[str] = facts.workers[0].demoted
        """Kernels and the like that failed the self-check at load and are not used."""
        self.kv_cache_tokens = layout.tokens_in(facts.num_pages, limits.max_model_len)
        own_seeds = facts.config.replace(seed=facts.config.seed + front_end)  # no two draw the same for requests
        self._inputs = InputProcessor(limits, own_seeds, tokenizer)
        self.pooling_inputs: PoolingInputs | None = None
        """What prepares the prompts of a model that pools."""
        if limits.pooling is not None:
            templated = facts.config.chat_template is not None
            self.pooling_inputs = PoolingInputs(limits.pooling, self._inputs, tokenizer, templated)
        self.replicas = Replicas(clients, all_facts, shown, self.queue, tokenizer)
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self.machines: Machines | None = None
        """The other machines on which there are engines; None: there are none"""
        self._logging = None if facts.config.disable_log_stats else asyncio.create_task(self._log_stats())

    @classmethod
    async def start(cls, config: EngineConfig, executor: str | None = None) -> AsyncEngine:
        """Start the core and wait until it can serve. Raises UserError for whatever keeps it from starting. `executor`:
        `module:attribute` of a function to use in place of `make_executor`, for tests."""
        folder = await asyncio.to_thread(model_folder, config)
        model_config = read_served_config(folder, config)
        sampling_defaults(config, model_config)  # raises what is wrong with them before anything is loaded
        given, config = config, settle_experts(config, model_config)
        machines = Machines(given, config, folder) if config.remote_engines else None
        meeting = meeting_of(config)
        met = "" if meeting is None else meeting.name
        clients: dict[int, CoreLink] = {}
        for rank in config.engine_ranks:
            name = "core" if config.data_parallel_size == 1 else f"core {rank}"
            clients[rank] = AsyncMPClient(config.for_engine(rank), folder, executor, name, met)
        if machines is not None:
            clients |= {rank: RemoteCore(machines, rank) for rank in config.remote_engines}
        try:
            engine = await cls._of(clients, config, folder, model_config)
            engine.machines = machines
            return engine
        except BaseException:
            if machines is not None:
                await machines.close()
            raise
        finally:
            if meeting is not None:
                meeting.remove()

    @classmethod
    async def join(cls, config: EngineConfig, folder: Path, front_end: int, sockets: Mapping[int, Join]) -> AsyncEngine:
        """Share the cores of an engine with `folder`'s model that another HTTP process has started, and wait until they
        know. `front_end`: which of the processes this is, from 1; `sockets`: addresses for each core, by rank."""
        clients: dict[int, CoreLink] = {rank: JoinedCore(each) for rank, each in sockets.items()}
        return await cls._of(clients, config, folder, read_served_config(folder, config), front_end)

    @classmethod
    async def _of(
        cls, clients: dict[int, CoreLink], config: EngineConfig, folder: Path, model_config: ModelConfig,
        front_end: int = 0,
    ) -> AsyncEngine:  # fmt: skip
        """Return the engine once its cores are ready; the tokenizer loads while they do."""
        try:
            tokenizer, facts = await asyncio.gather(
                asyncio.to_thread(load_tokenizer, config, folder),
                asyncio.gather(*(client.ready() for client in clients.values())),
            )
        except BaseException:
            await asyncio.gather(*(client.shutdown(timeout=0.5) for client in clients.values()))
            raise
        return cls(clients, facts, model_config, tokenizer, folder, front_end)

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
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Run the prompts of one HTTP request; yield batches of (prompt index, output) with all that has come.

        `output_kind`: with `delta` each output holds what came since the last one, of several steps if the reader was
        slow; with `final` each prompt has one output. `kept`: special tokens that stay in the text although `params`
        skip them. `client` and `parent`: whose request it is, and the HTTP request that it is part of (None: it stands
        alone), among which the scheduler takes turns. `reservation`: the prompts' place in the queue; without one they
        are sent whatever waits. `grammar`: what holds the outputs (made off the event loop); None: what `params` ask
        for. `pools`, `lora_request`: see EngineCoreRequest.

        Raises RequestError for invalid input before the first output, EngineDeadError when the core dies, and
        HeadraceError if a prompt failed there. An error, or closing or cancelling the iterator, aborts all prompts.
        """
        changed = asyncio.Event()
        opened: dict[int, OpenRequest] = {}
        try:
            for index, ids in enumerate(prompts):
                if index:
                    await asyncio.sleep(0)  # checking and sending many prompts must not hold up other requests
                self.replicas.check_alive()
                name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
                requests = self._inputs.process(
                    name, ids, params, arrival_time=time.monotonic(), priority=priority, cache_salt=cache_salt,
                    client=client, parent=request_id if parent is None else parent, grammar=grammar,
                    pools=pools, lora_request=lora_request,
                )  # fmt: skip
                if not self.config.disable_log_requests:
                    logger.info("request %s: %d prompt tokens, %s", name, len(ids), params)
                opened[index] = self.replicas.send(name, requests, params, output_kind, changed.set, kept)
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
                self.replicas.abort(request)

    async def prepare(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of all prompts of one HTTP request, for `generate`. Raises RequestError if one of them,
        or all together, could not run with `params`, so that none of them does."""
        self.replicas.check_alive()

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
        self.replicas.finish_aborted(request_id)

    def check_health(self) -> None:
        """Raise EngineDeadError if the core is dead or silent for too long, StepsFailError while its steps fail; of
        several cores, if that is so of all."""
        self.replicas.check_health()

    def engine_states(self) -> dict[str, str]:
        """Return what each engine does: `serving`, or why it does not."""
        return self.replicas.states()

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """End open requests with EngineDeadError, and the cores' processes. None is left when this returns."""
        if self._logging is not None:
            self._logging.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.replicas.shutdown(timeout)
        if self.machines is not None:
            await self.machines.close()

    async def _log_stats(self) -> None:
        """Log throughput every ten seconds, unless no token was processed."""
        engines = [self.metrics, *self.metrics.others]

        def totals() -> tuple[int, int]:
            return sum(one.num_prompt_tokens for one in engines), sum(one.num_generation_tokens for one in engines)

        before = totals()
        while True:
            await asyncio.sleep(STATS_SECONDS)
            now = totals()
            prompt, generation = (new - old for new, old in zip(now, before, strict=True))
            if prompt or generation:
                stats = [one.stats for one in engines]
                logger.info(
                    "%sprompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f%%, "
                    "prefix cache hits %.1f%%",
                    "through this of several HTTP processes: " if any(s.others.num_received for s in stats) else "",
                    prompt / STATS_SECONDS,
                    generation / STATS_SECONDS,
                    sum(one.num_running for one in stats),
                    sum(one.num_waiting for one in stats),
                    100 * sum(one.kv_cache_usage for one in engines) / len(engines),
                    100 * sum(s.prefix_cache_hits for s in stats) / max(1, sum(s.prefix_cache_queries for s in stats)),
                )
            before = now


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


def make_metrics(facts: CoreFacts, limits: ModelLimits, rank: int = 0, first: bool = True) -> EngineMetrics:
    """Return the metrics of an engine that has started; `rank`: which of several it is; `first`: see EngineMetrics."""
    config = facts.config
    name = config.served_model_name[0] if config.served_model_name else config.model
    cache_config: dict[str, object] = {
        "block_size": config.block_size,
        "num_gpu_blocks": facts.num_pages,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
    demoted = facts.workers[0].demoted if facts.workers else ()
    return EngineMetrics(name, limits.max_model_len, cache_config, demoted, rank, first)
