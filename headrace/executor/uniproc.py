"""Runs one rank in this process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.errors import EngineDeadError
from headrace.executor.base import StepHandle
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.runner.worker import Worker
from headrace.step import Masks, SchedulerOutput, WorkerFacts


class UniprocExecutor:
    """Calls its one worker directly."""

    def __init__(self, config: EngineConfig, folder: Path, model_config: ModelConfig, rendezvous: str = "") -> None:
        self._worker = Worker(config, folder, model_config, rendezvous=rendezvous)
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._reading: Future[str] | None = None

    def load(self) -> list[WorkerFacts]:
        return [self._worker.load()]

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        return [self._worker.profile(config)]

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        return [self._worker.initialize_cache(num_pages)]

    def execute(self, step: SchedulerOutput) -> StepHandle:
        return self._worker.execute(step)

    def sample(self, masks: Masks) -> None:
        self._worker.sample(masks)

    def read_adapter(self, request: LoRARequest, dropped: Sequence[int]) -> None:
        self._reading = self._reader.submit(self._worker.read_adapter, request, dropped)

    def adapter_error(self) -> str | None:
        return self._reading.result() if self._reading is not None and self._reading.done() else None

    def check(self) -> None:
        """Raise EngineDeadError if the GPU's context is broken; the rank itself lives as long as this process."""
        device = self._worker.device
        try:
            if device.type == "cuda":
                torch.cuda.current_stream(device).query()
        except RuntimeError as error:
            raise EngineDeadError(f"{device} can compute no more: {str(error).splitlines()[0]}") from error

    def shutdown(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._worker.close()
