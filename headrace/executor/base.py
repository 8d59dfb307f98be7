"""What an executor is: whatever runs steps. Tests bring their own."""

from __future__ import annotations

from typing import Protocol

from headrace.config import EngineConfig
from headrace.step import RunnerOutput, SchedulerOutput, WorkerFacts


class StepHandle(Protocol):
    """A step under way. `result` raises HeadraceError if that step failed, EngineDeadError if the executor is gone."""

    def done(self) -> bool: ...

    def result(self) -> RunnerOutput: ...


class Executor(Protocol):
    """Runs steps in the order given; several may be under way."""

    def load(self) -> list[WorkerFacts]:
        """Read the weights and run the largest step of the config that this was made for. Facts of every rank, or, if
        the step does not fit, of at least one with a `shortfall`: then `profile` a smaller config."""
        ...

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        """As `load`, for another config that differs in how much runs at once, the weights being there."""
        ...

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        """Facts of every rank; one with a `shortfall` found no room, and says what there is room for: it alone."""
        ...

    def execute(self, step: SchedulerOutput) -> StepHandle: ...

    def check(self) -> None:
        """Raises EngineDeadError if no step can succeed any more: a rank is gone, or its GPU's context is broken. Asked
        while idle and after a failed step; it must not wait for steps under way."""

    def shutdown(self) -> None: ...
