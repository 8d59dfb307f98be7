"""Builds an engine core: decides the settings, loads the model, and makes the plan smaller until it fits into memory.

The ranks report facts, the planner decides from them, and its decisions go to all ranks.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llguidance import LLTokenizer
from msgspec.structs import replace

from headrace.config import EngineConfig
from headrace.engine.core import EngineCore, log_decisions
from headrace.engine.grammars import TURN_SECONDS
from headrace.engine.input_processor import eos_token_ids
from headrace.engine.messages import CoreFacts
from headrace.engine.step_watch import StepWatch
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import ConfigError
from headrace.executor.base import Executor
from headrace.executor.factory import detect_device, make_executor
from headrace.executor.together import Peers, Together
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig
from headrace.models.served import read_served_config
from headrace.planner.decisions import decide_before_load, decide_mixed_step, decide_num_pages
from headrace.planner.fp8_cache import describe_lossy_cache, settled_cache
from headrace.planner.profile import measured_here
from headrace.planner.record import Decision
from headrace.planner.served import StepPrediction, decide_gain, predict_steps
from headrace.planner.settings import all_settings
from headrace.planner.smaller import fewer_pages, smaller_plan
from headrace.planner.speculation import FIELD
from headrace.quantization.checkpoint_format import holds_kv_scales
from headrace.quantization.table import resolve_format
from headrace.scheduler.config import SchedulerConfig
from headrace.scheduler.draft_length import DraftLength
from headrace.scheduler.scheduler import Scheduler
from headrace.speculation import NGRAM
from headrace.step import WorkerFacts
from headrace.structured_outputs.matcher import GrammarCompiler
from headrace.structured_outputs.vocabulary import vocabulary

logger = logging.getLogger(__name__)

ExecutorFactory = Callable[..., Executor]
"""of (config, folder, model_config), and where engines share their experts `rendezvous`, as make_executor"""


def build_core(
    config: EngineConfig,
    folder: Path,
    beside_server: bool,
    executor: str | None = None,
    tokenizer: Tokenizer | None = None,
    meeting: str = "",
) -> EngineCore:
    """Return a core that is ready to serve the model in `folder`. Raises UserError for whatever keeps it from starting.
    `beside_server`: an HTTP process shares the machine, and answers are streamed. `executor`: `module:attribute` of a
    function to use in place of `make_executor`, for tests. `tokenizer`: the model's, if it is loaded already.
    `meeting`: folder in which engines meet that share their experts; empty: this one has its own."""
    model_config = read_served_config(folder, config)
    device, factory = _executor_factory(config, executor)
    config = with_local_draft(config)
    peers = None
    if meeting:
        peers = Peers(meeting, (config.data_parallel_rank or 0) % config.joined_engines, config.joined_engines)
        factory = _together(factory, peers, meeting)
    measured = measured_here(config, model_config, device)
    resolved, decisions = decide_before_load(config, model_config, device, beside_server, measured)
    for note in resolve_format(model_config, config.quantization).notes:
        logger.info("%s", note)
    log_decisions(all_settings(resolved, decisions))
    asked_cache = config.kv_cache_dtype != "auto" or holds_kv_scales(model_config.quantization)
    compiler = _grammar_compiler(config, folder, model_config, tokenizer)  # which gets ready while the weights load
    ranks: Executor | None = None
    try:
        ranks, loaded = load(lambda plan: factory(plan, folder, model_config), resolved, config, asked_cache)
        mixed_step, chunk = decide_mixed_step(loaded.config, loaded.workers, streamed=beside_server)
        prediction = predict_steps(loaded.config, model_config, loaded.workers)
        scheduler = Scheduler(_scheduler_config(loaded, mixed_step), _draft_length(loaded.config, prediction))
    except BaseException:
        for part in (ranks, compiler):
            if part is not None:
                part.shutdown()
        raise
    guesses = log_decisions([] if FIELD in measured else decide_gain(loaded.config, prediction))
    settled = all_settings(loaded.config, [*decisions, *loaded.decisions, *log_decisions(chunk), *guesses])
    watch = None if prediction is None else StepWatch(prediction)
    patience = TURN_SECONDS if beside_server else math.inf  # offline nobody else waits who could come back later
    return EngineCore(replace(loaded, decisions=settled), scheduler, ranks, watch, compiler, patience, peers)


def _together(factory: ExecutorFactory, peers: Peers, meeting: str) -> ExecutorFactory:
    """Return a factory of executors whose ranks meet those of other engines, which make as many, in one order."""
    number = itertools.count()

    def make(config: EngineConfig, folder: Path, model_config: ModelConfig) -> Executor:
        meet = partial(factory, rendezvous=f"{meeting}/ranks{next(number)}")
        return Together(meet(config, folder, model_config), peers)

    return make


def with_local_draft(config: EngineConfig) -> EngineConfig:
    """Return the config with the folder of the model that guesses tokens, downloaded if necessary, for its name."""
    guesses = config.speculation
    if guesses is None or not guesses.model:
        return config
    folder = resolve_model_folder(guesses.model, guesses.revision, config.download_dir, config.load_format)
    local = {"method": guesses.method, "model": str(folder)}  # the folder's name need not say what the model's says
    return config.replace(speculative_config={**config.speculative_config, **local})


def _grammar_compiler(
    config: EngineConfig, folder: Path, model_config: ModelConfig, tokenizer: Tokenizer | None
) -> GrammarCompiler | None:
    """Return what compiles grammars for the model's vocabulary, which it reads on a thread; None without tokenizer."""
    if config.skip_tokenizer_init:
        return None

    def read() -> LLTokenizer:
        known = tokenizer or load_tokenizer(config, folder)
        assert known is not None
        return vocabulary(known, model_config.vocab_size, eos_token_ids(model_config, known))

    return GrammarCompiler(read)


def load(
    make: Callable[[EngineConfig], Executor], config: EngineConfig, given: EngineConfig, asked_cache: bool
) -> tuple[Executor, CoreFacts]:
    """Return an executor that is ready to serve `config` or the largest smaller plan that memory allows, and that plan.

    `given`: what the user asked for. `asked_cache`: the user or the checkpoint names the KV cache's type; otherwise the
    objective alone chose it. Raises OutOfMemoryError where no plan fits, and ConfigError for a KV cache type that moves
    this model's hidden states too far.
    """
    executor = make(config)
    try:
        workers = executor.load()
        plainer = settled_cache(config, asked_cache, workers)
        if plainer is None:
            return executor, _fit(executor, workers, config, given)
    except BaseException:
        executor.shutdown()
        raise
    executor.shutdown()
    config, decision = plainer
    log_decisions([decision], logging.WARNING)
    executor, loaded = load(make, config, given, asked_cache=True)
    return executor, replace(loaded, decisions=[decision, *loaded.decisions])


def _fit(executor: Executor, workers: list[WorkerFacts], config: EngineConfig, given: EngineConfig) -> CoreFacts:
    """Make the plan smaller until all that a loaded executor needs fits into memory, and allocate the KV cache."""
    decisions: list[Decision] = []
    while (smaller := smaller_plan(config, given, workers)) is not None:
        config, made = smaller
        decisions += log_decisions(made, logging.WARNING)
        workers = executor.profile(config)
    for note in workers[0].notes:
        logger.debug("%s", note)
    num_pages, made = decide_num_pages(config, workers)
    decisions += log_decisions(made)
    answers = executor.initialize_cache(num_pages)
    while any(fact.shortfall for fact in answers):
        num_pages, decision = fewer_pages(config, num_pages, answers)
        decisions += log_decisions([decision], logging.WARNING)
        answers = executor.initialize_cache(num_pages)
    if lossy := describe_lossy_cache(config, workers, num_pages):
        logger.info("%s", lossy)
    return CoreFacts(config, decisions, workers, num_pages)


def _executor_factory(config: EngineConfig, path: str | None) -> tuple[str, ExecutorFactory]:
    """Return the device to decide for, and the function that makes the executor."""
    if path is None:
        return detect_device(config), partial(make_executor, given=config)
    module, _, attribute = path.partition(":")
    return "cpu" if config.device == "auto" else config.device, getattr(importlib.import_module(module), attribute)


def _draft_length(config: EngineConfig, prediction: StepPrediction | None) -> DraftLength | None:
    """Return what chooses how many tokens a step guesses; None: it is always as many, or none are guessed."""
    speculation = config.speculation
    if speculation is None or not speculation.adaptive:
        return None
    if prediction is None or prediction.drafts is None:
        logger.warning(
            "every step guesses %d tokens: the planner does not know what steps cost here, so that fewer cannot be "
            "chosen where guessing stops to pay", speculation.num_tokens,
        )  # fmt: skip
        return None
    return DraftLength(speculation.lengths, prediction.drafts)


def _scheduler_config(facts: CoreFacts, mixed_step_tokens: int | None) -> SchedulerConfig:
    config = facts.config
    if config.max_num_seqs is None or config.max_num_batched_tokens is None or config.max_model_len is None:
        raise ConfigError("the planner left max_num_seqs, max_num_batched_tokens or max_model_len open")
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        layout=facts.workers[0].layout,
        max_loras=config.max_loras if config.enable_lora else 0,
        num_stages=config.pipeline_parallel_size,
        num_pages=facts.num_pages,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        mixed_step_tokens=mixed_step_tokens,
        num_drafts=config.decode_len - 1,
        draft_places=0 if config.speculation is None or config.speculation.method == NGRAM else config.decode_len - 1,
    )
