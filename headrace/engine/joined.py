"""Says which engines share their experts, and what does not go with that. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.config import EngineConfig
from headrace.errors import ConfigError, EngineDeadError
from headrace.model_config import ModelConfig
from headrace.models.served import describe
from headrace.process import SocketFolder
from headrace.speculation import NGRAM

BLAME_SECONDS = 0.5
"""How long, after an engine has died that shares its experts, to see whether another died before it."""


def settle_experts(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config with experts spread over engines only if there are any. Raises ConfigError for what does not go
    with that."""
    if config.joined_engines == 1:
        return config
    if not describe(model).is_moe:
        return config.replace(enable_expert_parallel=False)
    if len(config.engine_ranks) != config.data_parallel_size:
        raise ConfigError(
            f"enable_expert_parallel spreads experts over all {config.data_parallel_size} engines of "
            "data_parallel_size, which one server must start on one machine: leave out data_parallel_rank, "
            "data_parallel_external_lb, data_parallel_hybrid_lb and a smaller data_parallel_size_local, or "
            "enable_expert_parallel"
        )
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size must be 1 where engines share their experts (data_parallel_size "
            f"{config.data_parallel_size} with enable_expert_parallel), got {config.pipeline_parallel_size}"
        )
    if config.enable_lora:
        raise ConfigError(
            f"enable_lora does not go with engines that share their experts (data_parallel_size "
            f"{config.data_parallel_size} with enable_expert_parallel): no engine knows the others' adapters"
        )
    guesses = config.speculation
    if guesses is not None and guesses.method != NGRAM:
        raise ConfigError(
            f"speculative_config must have method {NGRAM} where engines share their experts (data_parallel_size "
            f"{config.data_parallel_size} with enable_expert_parallel), got {guesses.method}"
        )
    return config


def what_ended_all(engines: Iterable[tuple[int, EngineDeadError]], number: int) -> EngineDeadError:
    """Return the error for all of `number` engines that share their experts, some of which have died with these errors,
    by rank. All but one die of that; the one to name is the one that a signal has ended, or a rank of it."""
    told = [f"engine {rank}: {error}" for rank, error in engines]
    cause = next((one for one in told if "died (exit code -" in one), told[0])
    return EngineDeadError(f"{cause}; its experts are gone, so all {number} engines end")


def meeting_of(config: EngineConfig) -> SocketFolder | None:
    """Return a new folder in which the cores of engines meet that share their experts; None: they do not."""
    return SocketFolder() if config.joined_engines > 1 else None
