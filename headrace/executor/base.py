"""Defines the executor protocol: whatever runs steps. Tests bring their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.config import EngineConfig
from headrace.lora import LoRARequest
from headrace.step import Masks, RunnerOutput, SchedulerOutput, WorkerFacts


class StepHandle(Protocol):
    """Stands for a step under way. `result` raises HeadraceError if the step failed, EngineDeadError if the executor is
    gone."""

    def done(self) -> bool: ...

    def result(self) -> RunnerOutput: ...


class Executor(Protocol):
    """Runs the steps in the order given; several may be under way."""

    def load(self) -> list[WorkerFacts]:
        """Read the weights and run the largest step of the config that this was made for. Return the facts of every
        rank, or, if the step does not fit, of at least one with a `shortfall`: then `profile` a smaller config."""
        ...

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        """Do what `load` does for a config that differs in how much runs at once, without reading the weights again."""
        ...

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        """Allocate the KV cache; return the facts of every rank. A rank with a `shortfall` had no memory for its share,
        and its `available_kv_memory` says what would fit."""
        ...

    def execute(self, step: SchedulerOutput) -> StepHandle:
        """Launch a step. A masked one stops before it samples; it ends once `sample` has been called, and no other step
        may be executed before that."""
        ...

    def sample(self, masks: Masks) -> None:
        """Launch the rest of the step executed last, which was masked."""
        ...

    def read_adapter(self, request: LoRARequest, dropped: Sequence[int]) -> None:
        """Begin to read an adapter on every rank, which first forgets the `dropped` ones; steps go on meanwhile. One is
        read at a time."""
        ...

    def adapter_error(self) -> str | None:
        """Return why the adapter begun last cannot be used, or nothing, once every rank has read it; None: not yet."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError if no step can succeed any more: a rank is gone, or its GPU's context is broken. Called
        while idle and after a failed step; it must not wait for steps under way."""

    def shutdown(self) -> None:
        """End the ranks and free their memory."""
        ...
