"""One rank in this very process."""

from __future__ import annotations

from pathlib import Path

from headrace.config import EngineConfig
from headrace.executor.base import StepHandle
from headrace.model_config import ModelConfig
from headrace.runner.worker import Worker
from headrace.step import SchedulerOutput, WorkerFacts


class UniprocExecutor:
    def __init__(self, config: EngineConfig, folder: Path, model_config: ModelConfig) -> None:
        self._worker = Worker(config, folder, model_config)

    def load(self) -> list[WorkerFacts]:
        return [self._worker.load()]

    def initialize_cache(self, num_blocks: int) -> None:
        self._worker.initialize_cache(num_blocks)

    def execute(self, step: SchedulerOutput) -> StepHandle:
        return self._worker.execute(step)

    def check(self) -> None:
        """The rank lives as long as this process."""

    def shutdown(self) -> None:
        self._worker.close()
