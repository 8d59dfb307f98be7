"""From a plan to an executor that holds it: load, profile and allocate, with smaller plans until one fits.

Facts come up from the ranks, the planner decides, and what it decided goes down to all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.executor.base import Executor
from headrace.planner.decisions import decide_num_pages
from headrace.planner.fp8_cache import describe_lossy_cache, settled_cache
from headrace.planner.record import Decision
from headrace.planner.smaller import fewer_pages, smaller_plan
from headrace.step import WorkerFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    executor: Executor
    config: EngineConfig
    decisions: list[Decision]
    workers: list[WorkerFacts]
    num_pages: int


def fit(
    make: Callable[[EngineConfig], Executor], config: EngineConfig, given: EngineConfig, asked_cache: bool
) -> Fitted:
    """An executor that is ready to serve `config`, or the largest plan below it that there is memory for. `given` is
    what the user asked for; `asked_cache`: if that, or the checkpoint, names the type of the KV cache, and not the
    objective alone.

    Raises OutOfMemoryError where there is none, ConfigError for a cache that this model cannot live with.
    """
    executor = make(config)
    try:
        workers = executor.load()
        plainer = settled_cache(config, asked_cache, workers)
        if plainer is None:
            return _fit(executor, workers, config, given)
    except BaseException:
        executor.shutdown()
        raise
    executor.shutdown()
    config, decision = plainer
    told([decision], logging.WARNING)
    fitted = fit(make, config, given, asked_cache=True)
    return replace(fitted, decisions=[decision, *fitted.decisions])


def _fit(executor: Executor, workers: list[WorkerFacts], config: EngineConfig, given: EngineConfig) -> Fitted:
    """With all that a loaded executor has room for."""
    decisions: list[Decision] = []
    while (smaller := smaller_plan(config, given, workers)) is not None:
        config, made = smaller
        decisions += told(made, logging.WARNING)
        workers = executor.profile(config)
    for note in workers[0].notes:
        logger.info("%s", note)
    num_pages, made = decide_num_pages(config, workers)
    decisions += told(made)
    answers = executor.initialize_cache(num_pages)
    while any(fact.shortfall for fact in answers):
        num_pages, decision = fewer_pages(config, num_pages, answers)
        decisions += told([decision], logging.WARNING)
        answers = executor.initialize_cache(num_pages)
    if lossy := describe_lossy_cache(config, workers, num_pages):
        logger.info("%s", lossy)
    return Fitted(executor, config, decisions, workers, num_pages)


def told(decisions: list[Decision], level: int = logging.INFO) -> list[Decision]:
    """The same, printed."""
    for decision in decisions:
        logger.log(level, "%s", decision)
    return decisions
