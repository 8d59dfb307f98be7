"""Picks the executor for a resolved config. Imports torch only inside its functions."""

from __future__ import annotations

from pathlib import Path

from headrace.config import EngineConfig
from headrace.environment import calm_libraries
from headrace.errors import ConfigError
from headrace.executor.base import Executor
from headrace.model_config import ModelConfig


def detect_device(config: EngineConfig) -> str:
    """Return `cuda` or `cpu`. Raises ConfigError where the device asked for is not there."""
    calm_libraries()
    import torch

    available = "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and available != "cuda":
        raise ConfigError("device is `cuda`, but torch finds no GPU here; use --device cpu or a GPU build of torch")
    return available if config.device == "auto" else config.device


def make_executor(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    rendezvous: str = "",
    given: EngineConfig | None = None,
) -> Executor:
    """Return the executor for a config that the planner has resolved. `rendezvous`: path of a file, not there yet, by
    which its ranks find those of other engines, if these share the experts. `given`: the config before that, with which
    other machines must agree."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank is {config.node_rank}: this machine runs `headrace serve --headless`, and the one with 0 this"
        )
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        from headrace.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, folder, rendezvous, given)
    from headrace.executor.uniproc import UniprocExecutor

    return UniprocExecutor(config, folder, model_config, rendezvous)
