"""Runs the data-parallel cores of `LLM`, each in a process of its own, behind the interface of one EngineCore.

Nothing is started again offline: if a core dies, so does the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import reduce
from pathlib import Path

import msgspec

from headrace.config import EngineConfig
from headrace.engine.core_client import AsyncMPClient
from headrace.engine.joined import BLAME_SECONDS, meeting_of, what_ended_all
from headrace.engine.messages import Abort, CoreFacts
from headrace.engine.router import EngineLoad, Speed, choose, chunk_keys
from headrace.errors import ConfigError, EngineDeadError
from headrace.request import EngineCoreOutputs, EngineCoreRequest, SchedulerStats, StepTimes


class CoreProcesses:
    """Holds cores in child processes. Call `step` while requests are open, as of an EngineCore; it waits for outputs of
    any of them."""

    def __init__(self, config: EngineConfig, folder: Path, executor: str | None = None) -> None:
        """Start the cores and wait until all can take requests. Raises UserError for whatever keeps one from it."""
        if config.remote_engines:
            raise ConfigError(
                f"data_parallel_size_local must be data_parallel_size ({config.data_parallel_size}) in Python, got "
                f"{config.data_parallel_size_local}: `headrace serve` runs engines on several machines"
            )
        self._loop = asyncio.new_event_loop()
        self._joined = config.joined_engines > 1
        self._ended = False
        """All have, since one has whose experts the others need."""
        self._clients: list[AsyncMPClient] = []
        self._next: dict[asyncio.Task[EngineCoreOutputs], int] = {}
        try:
            facts = self._loop.run_until_complete(self._start(config, folder, executor))
        except BaseException:
            self.shutdown()
            raise
        self.facts: CoreFacts = min(facts, key=lambda each: each.num_pages)
        self._stats = [SchedulerStats() for _ in facts]
        self._open: list[set[str]] = [set() for _ in facts]
        speed = Speed()
        self._loads = [
            EngineLoad.of(each, speed, opened.__len__) for each, opened in zip(facts, self._open, strict=True)
        ]

    async def _start(self, config: EngineConfig, folder: Path, executor: str | None) -> list[CoreFacts]:
        meeting = meeting_of(config)
        name = "" if meeting is None else meeting.name
        for rank in config.engine_ranks:
            self._clients.append(AsyncMPClient(config.for_engine(rank), folder, executor, f"core {rank}", name))
        try:
            return await asyncio.gather(*(client.ready() for client in self._clients))
        finally:
            if meeting is not None:
                meeting.remove()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that is expected to answer first."""
        now, tokens = time.monotonic(), request.prompt_token_ids
        keys = chunk_keys(tokens, request.cache_salt)
        place = choose(self._loads, keys, len(tokens), now)
        self._loads[place].add(request.request_id, keys, len(tokens), 1, now)
        self._open[place].add(request.request_id)
        self._clients[place].add([request])

    def abort(self, aborts: Iterable[Abort]) -> None:
        """End requests without further output. Ids of requests that have ended already are ignored."""
        for abort in aborts:
            for client, load, opened in zip(self._clients, self._loads, self._open, strict=True):
                if abort.request_id in opened:
                    opened.discard(abort.request_id)
                    load.drop(abort.request_id)
                    if not self._ended:
                        client.abort([abort])

    def step(self) -> EngineCoreOutputs:
        """Wait until a core has sent something, and return it. Raises EngineDeadError if one has died."""
        return self._loop.run_until_complete(self._step())

    async def _step(self) -> EngineCoreOutputs:
        waiting = set(self._next.values())
        for place, client in enumerate(self._clients):
            if place not in waiting:
                self._next[asyncio.ensure_future(client.receive())] = place
        done, _ = await asyncio.wait(self._next, return_when=asyncio.FIRST_COMPLETED)
        outputs = []
        if self._joined and any(isinstance(task.exception(), EngineDeadError) for task in done):
            await asyncio.sleep(BLAME_SECONDS)
            errors = ((place, task.exception()) for task, place in self._next.items() if task.done())
            dead = [(place, error) for place, error in errors if isinstance(error, EngineDeadError)]
            self._ended = True
            for client in self._clients:
                client.kill()
            raise what_ended_all(dead, len(self._clients))
        for task in done:
            place, found = self._next.pop(task), task.result()
            self._stats[place] = found.stats
            self._open[place] -= {each.request_id for each in found.outputs if each.finish_reason is not None}
            self._loads[place].took(found.outputs, found.stats, time.monotonic())
            outputs += found.outputs
        return EngineCoreOutputs(outputs=outputs, stats=self.stats(), timestamp=time.monotonic())

    def stats(self) -> SchedulerStats:
        """Return the sums of what the cores said last."""
        return reduce(_sum, self._stats)

    def shutdown(self) -> None:
        """End the cores. No process is left when this returns."""
        for task in self._next:
            task.cancel()

        async def end() -> None:
            stops = [client.shutdown() for client in self._clients]
            await asyncio.gather(*self._next, *stops, return_exceptions=True)

        self._loop.run_until_complete(end())
        self._loop.close()


def _sum(one: SchedulerStats, other: SchedulerStats) -> SchedulerStats:
    """Add what two engines count; of what is no count, the first one's stays."""
    fields: dict[str, object] = {}
    for name in SchedulerStats.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, int | float):
            fields[name] = mine + theirs
        elif name == "step_times":
            fields[name] = {kind: _add(mine.get(kind), theirs.get(kind)) for kind in {*mine, *theirs}}
    return msgspec.structs.replace(one, **fields)


def _add(one: StepTimes | None, other: StepTimes | None) -> StepTimes:
    a, b = one or StepTimes(), other or StepTimes()
    return StepTimes(a.steps + b.steps, a.observed + b.observed, a.predicted + b.predicted)
