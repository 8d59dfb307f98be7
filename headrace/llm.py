"""Runs a model offline: takes prompts and returns RequestOutputs in the same order. The core runs in this process; the
data-parallel ones, if there are several, in processes of their own."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, NotRequired, TypedDict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headrace.advice.flags.keywords import engine_keywords
from headrace.advice.flags.table import flags_by_name, notice
from headrace.config import EngineConfig
from headrace.engine import offline_pooling
from headrace.engine.async_engine import make_metrics, model_folder
from headrace.engine.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, likely_next
from headrace.engine.build import build_core
from headrace.engine.conversation import render_chat, shown_messages
from headrace.engine.core import EngineCore
from headrace.engine.core_processes import CoreProcesses
from headrace.engine.hf_tokenizer import Conversation, HFTokenizer
from headrace.engine.input_processor import InputProcessor, ModelLimits, sampling_defaults
from headrace.engine.joined import settle_experts
from headrace.engine.output_processor import OpenRequest, OutputProcessor
from headrace.engine.pooling import POOLED, PoolingInputs, need_pooling
from headrace.engine.tokenizer import load_tokenizer
from headrace.environment import knobs_from_environment
from headrace.errors import HeadraceError, RequestError, SomeRequestsError, quoted
from headrace.lora import LoRARequest
from headrace.models.served import read_served_config
from headrace.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from headrace.request import RequestOutput, SchedulerStats
from headrace.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class TextPrompt(TypedDict):
    """Holds a text to complete. A plain dictionary of this shape is as good."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Cached KV blocks are shared only among prompts with the same salt."""


class TokensPrompt(TypedDict):
    """Holds token ids to complete. A plain dictionary of this shape is as good."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    """Text of the prompt for RequestOutput to show."""
    cache_salt: NotRequired[str | None]


Prompt = str | list[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""of all prompts, or of each"""
PROMPT_KEYS = TextPrompt.__annotations__.keys() | TokensPrompt.__annotations__.keys()
NOT_HERE = {
    **dict.fromkeys(("sleep", "wake_up", "start_profile", "stop_profile"), "--enable-sleep-mode"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "--worker-extension-cls"),
}
"""Methods of vLLM's LLM that do not exist here -> a flag for which advice/flags/table.py says why."""


class LLM:
    """Runs a model in this process. `LLM(model, **keywords)` takes the fields of EngineConfig, and keywords of vLLM's.
    End it with `shutdown`, with a `with` block, or by dropping the last reference."""

    def __init__(self, model: str | os.PathLike[str] = "demo", *, executor: str | None = None, **keywords: Any) -> None:
        """Load the model. Raises UserError for whatever cannot work. `executor`: `module:attribute` of a function to
        use in place of `make_executor`, for tests."""
        given, notes = engine_keywords({"model": model, **keywords})
        if notes:
            logger.warning("%s", notice(notes).removeprefix("headrace: note: "))
        engine_config = EngineConfig(**(knobs_from_environment(EngineConfig) | given))
        folder = model_folder(engine_config)
        model_config = read_served_config(folder, engine_config)
        engine_config = settle_experts(engine_config, model_config)
        self._defaults = SamplingParams(**sampling_defaults(engine_config, model_config))
        self.tokenizer = load_tokenizer(engine_config, folder)
        self._core: EngineCore | CoreProcesses = (
            build_core(engine_config, folder, False, executor, self.tokenizer)
            if len(engine_config.engine_ranks) == 1
            else CoreProcesses(engine_config, folder, executor)
        )
        self._finalizer = weakref.finalize(self, _shut_down, self._core)
        gc.collect()
        gc.freeze()  # what the start made is never garbage, and scanning it again and again costs 8% of the throughput
        facts = self._core.facts
        self.config = facts.config
        self.decisions = facts.decisions
        self.model_config = model_config
        limits = ModelLimits.of(facts.config, model_config, facts.workers[0].layout, facts.num_pages, self.tokenizer)
        self.max_model_len = limits.max_model_len
        self.metrics = make_metrics(facts, limits)
        self._inputs = InputProcessor(limits, facts.config, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, self.metrics)
        self._ids = itertools.count()
        self._adapters: dict[int, LoRARequest] = {}
        """by their numbers"""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        add_special_tokens: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; return one RequestOutput for each. `sampling_params`: one for all prompts or one for each
        (default: `get_default_sampling_params`). `lora_request`: the adapter of all prompts, or one or None
        for each; it needs enable_lora. Raises RequestError for an invalid prompt before any runs."""
        return self._run(
            _as_list(prompts), sampling_params, use_tqdm, add_special_tokens, priority, lora_request=lora_request
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Write the next message of one conversation, or of each of several. `chat_template`: jinja, or the name of one
        of the model's templates. `continue_final_message` continues the last message instead of writing a new one; it
        needs `add_generation_prompt=False`. Content may be text or a list of parts that are text; arguments of past
        tool calls may be objects or JSON text."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, but skip_tokenizer_init is set", "messages")
        template, kwargs = self.tokenizer.template_for(bool(tools), chat_template), chat_template_kwargs or {}
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [
            render_chat(
                template, shown_messages(one, template), tools, add_generation_prompt, kwargs, continue_final_message
            )
            for one in conversations
        ]
        return self._run(prompts, sampling_params, use_tqdm, False, None, lora_request=lora_request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, lora_request: Adapters = None
    ) -> list[BeamSearchOutput]:
        """Return the likeliest outputs of each prompt that a search with beams finds, the best first. A step of all
        searches is a batch of requests for one token each."""
        ends = self._inputs.limits.eos_token_ids
        searches = []
        for prompt in _as_list(prompts):
            ids = self._tokenize(prompt, True)[1]
            room = self.max_model_len - len(ids)
            searches.append(BeamSearch(ids, replace(params, max_tokens=min(params.max_tokens, room)), frozenset(ends)))
        pairs = [*zip(searches, self._adapters_of(lora_request, len(searches)), strict=True)]
        while going := [pair for pair in pairs if pair[0].open]:
            beams: list[Prompt] = [beam.tokens for search, _ in going for beam in search.open]
            steps = [search.step() for search, _ in going for _ in search.open]
            adapters = [adapter for search, adapter in going for _ in search.open]
            likely = iter(map(likely_next, self._run(beams, steps, False, False, None, lora_request=adapters)))
            for search, _ in going:
                search.advance([next(likely) for _ in search.open])
        found = [BeamSearchOutput(search.best(params.beam_width)) for search in searches]
        for sequence in (sequence for output in found for sequence in output.sequences):
            sequence.text = None if self.tokenizer is None else self.tokenizer.decode(sequence.tokens)
        return found

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what a model that pools makes of each prompt, or of each of its tokens (`token_embed`)."""
        found = self._offline(use_tqdm, lora_request)
        return offline_pooling.encode(found, _as_list(prompts), pooling_params, pooling_task, truncate_prompt_tokens)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt."""
        found = self._offline(use_tqdm, lora_request)
        return offline_pooling.embed(found, _as_list(prompts), pooling_params, truncate_prompt_tokens)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the model's labels for each prompt."""
        return offline_pooling.classify(self._offline(use_tqdm, lora_request), _as_list(prompts), pooling_params)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_2` goes with its own of `data_1`, or with the only one: by a model that
        reads pairs, else by the cosine of two vectors."""
        first, second = ([data] if isinstance(data, str) else [*data] for data in (data_1, data_2))
        return offline_pooling.score(
            self._offline(use_tqdm, lora_request), first, second, pooling_params, truncate_prompt_tokens
        )

    def _offline(self, use_tqdm: bool, lora_request: Adapters) -> offline_pooling.Offline:
        """Return what pools with this engine. Raises RequestError if the model does not."""
        pooling = need_pooling(self._inputs.limits.pooling)
        inputs = PoolingInputs(pooling, self._inputs, self.tokenizer, self.config.chat_template is not None)
        return offline_pooling.Offline(
            inputs, lambda prompts, unit: self._run([*prompts], POOLED, use_tqdm, False, None, unit, lora_request)
        )

    def stats(self) -> SchedulerStats:
        """Return numbers of running and waiting requests and KV blocks, and counters since start."""
        return self._core.stats()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's sampling defaults, from its generation_config.json: a copy that may be changed."""
        return self._defaults.clone()

    def get_tokenizer(self) -> HFTokenizer:
        """Return a tokenizer with the methods of transformers' tokenizers. Raises HeadraceError with
        skip_tokenizer_init."""
        if self.tokenizer is None:
            raise HeadraceError("there is no tokenizer, as skip_tokenizer_init is set")
        return HFTokenizer(self.tokenizer, self.config.tokenizer or self.config.model)

    def shutdown(self) -> None:
        """Free the device. Afterwards the LLM cannot be used."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    if not TYPE_CHECKING:  # else type checkers would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            """Explain why a method of vLLM's LLM is missing here."""
            why = f": {flags_by_name('engine')[NOT_HERE[name]].why}" if name in NOT_HERE else ""
            raise AttributeError(f"LLM has no attribute {name!r}{why}", name=name, obj=self)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        add_special_tokens: bool,
        priority: Sequence[int] | None,
        pools: str = "",
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        if not self._finalizer.alive:
            raise HeadraceError("this LLM has been shut down")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [(sampling_params or self._defaults).clone()] * len(prompts)
        else:
            params = [one.clone() for one in sampling_params]
        for name, values in (("sampling_params", params), ("priority", priority)):
            if values is not None and len(values) != len(prompts):
                raise RequestError(f"{name} must be one a prompt: {len(prompts)} prompts, got {len(values)}", name)
        adapters = self._adapters_of(lora_request, len(prompts))
        arrival_time = time.monotonic()
        tokenized = [self._tokenize(prompt, add_special_tokens) for prompt in prompts]
        opened: list[OpenRequest] = []
        finished = False
        try:
            batch = []
            for i, (text, prompt_ids, cache_salt) in enumerate(tokenized):
                name = str(next(self._ids))
                requests = self._inputs.process(
                    name,
                    prompt_ids,
                    params[i],
                    arrival_time=arrival_time,
                    priority=0 if priority is None else priority[i],
                    cache_salt=cache_salt,
                    pools=pools,
                    lora_request=adapters[i],
                )
                opened.append(self._outputs.add(name, text, requests, params[i], "final", lambda: None))
                batch.extend(requests)
            for request in batch:
                self._core.add_request(request)
            self._step_until_done(len(opened), use_tqdm)
            finished = True
        finally:
            if not finished:  # an invalid prompt, Ctrl-C, a failed step: end whatever runs
                for one in opened:
                    self._core.abort(self._outputs.abort(one))
        if len(opened) > 1 and any(request.error for request in opened):
            raise SomeRequestsError([request.error or _result(request) for request in opened])
        return [_result(request) for request in opened]

    def _adapters_of(self, given: Adapters, count: int) -> list[LoRARequest | None]:
        """Return the adapter of each of `count` prompts. Raises RequestError for what cannot be one."""
        adapters = [given] * count if given is None or isinstance(given, LoRARequest) else [*given]
        if len(adapters) != count:
            raise RequestError(
                f"lora_request must be one a prompt: {count} prompts, got {len(adapters)}", "lora_request"
            )
        for one in filter(None, adapters):
            if not self.config.enable_lora:
                raise RequestError("lora_request must be None unless the LLM has enable_lora=True", "lora_request")
            if not isinstance(one, LoRARequest) or one.lora_int_id < 1:
                raise RequestError(
                    f"lora_request must be a LoRARequest whose lora_int_id is at least 1, got {quoted(one)}",
                    "lora_request",
                )
            if self._adapters.setdefault(one.lora_int_id, one) != one:
                raise RequestError(f"lora_int_id {one.lora_int_id} is that of another adapter", "lora_request")
        return adapters

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, Any, str | None]:
        """Return a prompt's text if it has one, its token ids (given ones are not checked yet) and its cache salt."""
        if isinstance(prompt, str):
            return prompt, self._inputs.tokenize(prompt, add_special_tokens), None
        if not isinstance(prompt, Mapping):
            return None, prompt, None
        for key, value in prompt.items():
            if key not in PROMPT_KEYS and value:
                raise RequestError(f"prompt has {key!r:.100}; known are {', '.join(sorted(PROMPT_KEYS))}", "prompt")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None and isinstance(text, str):
            ids = self._inputs.tokenize(text, add_special_tokens)
        return text, ids, prompt.get("cache_salt")

    def _step_until_done(self, num_requests: int, use_tqdm: bool) -> None:
        progress = Progress(
            TextColumn("Processed prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
            disable=not use_tqdm,
        )
        started, tokens_before = time.monotonic(), self.metrics.num_generation_tokens
        with progress:
            task = progress.add_task("", total=num_requests, speed="")
            while self._outputs.num_requests:
                outputs = self._core.step()
                if outputs is None:
                    raise HeadraceError("the engine stopped with requests unfinished")
                self._core.abort(self._outputs.process(outputs))
                if use_tqdm and any(output.finish_reason for output in outputs.outputs):
                    tokens = self.metrics.num_generation_tokens - tokens_before
                    progress.update(
                        task,
                        completed=num_requests - self._outputs.num_requests,
                        speed=f"{tokens / (time.monotonic() - started):.1f} tokens/s",
                    )


def _shut_down(core: EngineCore | CoreProcesses) -> None:
    core.shutdown()
    gc.unfreeze()


def _result(request: OpenRequest) -> RequestOutput:
    """Return the output of a request that has ended; raise the error of one that failed."""
    output = request.take()
    if output is None:
        raise request.error or HeadraceError("the request brought no output")
    if output.prompt_logprobs is not None:
        output.prompt_logprobs = [*output.prompt_logprobs]
    return output


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [list(prompts)]  # pyrefly: ignore[bad-return]
    return list(prompts)  # pyrefly: ignore[bad-return]
