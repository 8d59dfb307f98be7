"""Ranks as threads of this process, which an engine takes in place of processes: `executor="thread_ranks:make"`. They
start in no time and communicate over gloo as processes do."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import EngineConfig
from headrace.distributed.ranks import Place, Ranks
from headrace.errors import EngineDeadError
from headrace.model_config import ModelConfig
from headrace.runner.pending import MaskedStep
from headrace.runner.worker import Worker
from headrace.step import Masks, RunnerOutput, SchedulerOutput, WorkerFacts

THREADS = f"{__name__}:make"
"""An LLM's `executor`: tests of what ranks compute start no processes for it; those of processes are elsewhere"""
TIMEOUT = 120.0


class Handle:
    def __init__(self) -> None:
        self.future: Future[RunnerOutput] = Future()

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> RunnerOutput:
        return self.future.result(TIMEOUT)


class Rank(threading.Thread):
    """One rank: does what is asked of its worker, in order."""

    def __init__(self, rank: int, config: EngineConfig, folder: Path, model_config: ModelConfig, meet: str) -> None:
        super().__init__(daemon=True)
        self.orders: queue.SimpleQueue[tuple[Callable[[Worker], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.made = rank, config, folder, model_config, meet
        self.start()

    def ask(self, order: Callable[[Worker], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.orders.put((order, future))
        return future

    def run(self) -> None:
        rank, config, folder, model_config, meet = self.made
        worker = Worker(config, folder, model_config, rank, meet)
        while (order := self.orders.get()) is not None:
            try:
                order[1].set_result(order[0](worker))
            except BaseException as error:  # the tests look at it
                order[1].set_exception(error)
        worker.close()


class ThreadRanks:
    """An executor of ranks that are threads."""

    def __init__(self, config: EngineConfig, folder: Path, model_config: ModelConfig, rendezvous: str) -> None:
        ranks = Ranks(tp=config.tensor_parallel_size, pp=config.pipeline_parallel_size)
        self.folder = tempfile.TemporaryDirectory()
        meet = rendezvous or str(Path(self.folder.name) / "meet")
        self.ranks = [Rank(rank, config, folder, model_config, meet) for rank in range(ranks.world)]
        self.answering = ranks.rank(Place(0, ranks.pp - 1, 0))
        self.handle: Handle | None = None

    def all(self, order: Callable[[Worker], WorkerFacts]) -> list[WorkerFacts]:
        return [future.result(TIMEOUT) for future in [rank.ask(order) for rank in self.ranks]]

    def load(self) -> list[WorkerFacts]:
        return self.all(Worker.load)

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        return self.all(lambda worker: worker.profile(config))

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        return self.all(lambda worker: worker.initialize_cache(num_pages))

    def execute(self, step: SchedulerOutput) -> Handle:
        self.handle = handle = Handle()
        self._launch(lambda worker: worker.execute(step), handle)
        return handle

    def sample(self, masks: Masks) -> None:
        assert self.handle is not None
        own = msgspec.structs.replace(masks, bits=memoryview(bytes(masks.bits)))  # as a message to a process would be
        self._launch(lambda worker: worker.sample(own), self.handle)

    def _launch(self, order: Callable[[Worker], Any], handle: Handle) -> None:
        def answer(future: Future[Any]) -> None:
            try:
                step = future.result()
                if not isinstance(step, MaskedStep):
                    handle.future.set_result(step.result())
            except BaseException as error:
                handle.future.set_exception(EngineDeadError(f"{type(error).__name__}: {error}"))

        for number, rank in enumerate(self.ranks):
            future = rank.ask(order)
            if number == self.answering:
                future.add_done_callback(answer)

    def check(self) -> None: ...

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.orders.put(None)
        for rank in self.ranks:
            rank.join(TIMEOUT)
        self.folder.cleanup()


def make(config: EngineConfig, folder: Path, model_config: ModelConfig, rendezvous: str = "") -> ThreadRanks:
    return ThreadRanks(config, folder, model_config, rendezvous)
