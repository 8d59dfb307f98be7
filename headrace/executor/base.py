"""What an executor is: whatever runs steps. Tests bring their own."""

from __future__ import annotations

from typing import Protocol

from headrace.step import RunnerOutput, SchedulerOutput, WorkerFacts


class StepHandle(Protocol):
    """A step under way. `result` raises HeadraceError if that step failed, EngineDeadError if the executor is gone."""

    def done(self) -> bool: ...

    def result(self) -> RunnerOutput: ...


class Executor(Protocol):
    """Runs steps in the order given; several may be under way."""

    def load(self) -> list[WorkerFacts]: ...

    def initialize_cache(self, num_blocks: int) -> None: ...

    def execute(self, step: SchedulerOutput) -> StepHandle: ...

    def check(self) -> None:
        """Raises EngineDeadError if no step can succeed any more: a rank is gone, or its GPU's context is broken. Asked
        while idle and after a failed step; it must not wait for steps under way."""

    def shutdown(self) -> None: ...
