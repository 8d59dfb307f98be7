"""Runs a server's engine cores: one, or several data-parallel ones, each of which serves requests of its own.

With several, a request goes to the one that is expected to answer first (router.py). One that dies is taken out and
started again; requests of which nothing has reached their readers go to another one, the others end with an error. A
core that is alone is not started again: then nothing is served, and who supervises the server should know. So it is
with engines that share their experts, all of which end when one dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from headrace.engine.core_client import STOP_SECONDS, AsyncMPClient, CoreLink
from headrace.engine.joined import BLAME_SECONDS, what_ended_all
from headrace.engine.messages import Abort, CoreFacts, Join
from headrace.engine.metrics import EngineMetrics
from headrace.engine.output_processor import OpenRequest, OutputKind, OutputProcessor
from headrace.engine.queue_bound import QueueBound
from headrace.engine.router import EngineLoad, Speed, choose, chunk_keys
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import EngineDeadError, HeadraceError, StepsFailError
from headrace.request import EngineCoreOutputs, EngineCoreRequest
from headrace.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_MERGED_STEPS = 8
"""Most further steps whose outputs are written together with those of one step, when writing falls behind. The write
itself costs more than all that leads to it."""
MOST_LOST = 2
"""How many engines may die with one request: it is sent again that often, unless it is what kills them."""
WATCH_SECONDS = 1.0
"""How often engines are asked whether they are silent."""
PROBE_SECONDS = 10.0
"""An engine whose steps fail gets one request in so many seconds, so that it can show that they no longer do."""
RESTART_SECONDS, LONGEST_RESTART_SECONDS = 1.0, 60.0
"""Pause after a start that failed; it doubles each time."""


@dataclass
class Replica:
    """Holds one engine as the front end sees it."""

    rank: int
    client: CoreLink
    metrics: EngineMetrics
    outputs: OutputProcessor
    load: EngineLoad
    on_change: Callable[[bool], None]
    """Told when it begins or ends to serve."""
    error: EngineDeadError | None = None
    """Why it takes no requests; None while it does."""

    def add(self, request: OpenRequest, keys: Sequence[bytes]) -> None:
        """Send a request, for whose outputs `outputs` waits already."""
        first, now = request.core_requests[0], time.monotonic()
        self.load.add(first.request_id, keys, len(first.prompt_token_ids), len(request.core_requests), now)
        self.client.add(request.core_requests)

    def abort(self, aborts: list[Abort]) -> None:
        for abort in aborts:
            self.load.drop(abort.request_id)
        if aborts and self.error is None:
            self.client.abort(aborts)

    def problem(self) -> HeadraceError | None:
        """Return why it cannot be relied on; None: it can."""
        if self.error is not None:
            return self.error
        try:
            self.client.check_health(has_requests=self.outputs.num_requests > 0)
        except (EngineDeadError, StepsFailError) as error:
            return error
        return None


class Replicas:
    """Holds the cores that run here. To be used from one event loop."""

    def __init__(
        self, clients: dict[int, CoreLink], facts: list[CoreFacts],
        metrics: list[EngineMetrics], queue: QueueBound, tokenizer: Tokenizer | None,
    ) -> None:  # fmt: skip
        """`clients`: those of the cores that have started, by rank; `facts` and `metrics` are parallel to them."""
        self._joined = facts[0].config.joined_engines > 1
        self._queue = queue
        self._speed = Speed()
        self._all: list[Replica] = []
        for (rank, client), fact, shown in zip(clients.items(), facts, metrics, strict=True):
            outputs = OutputProcessor(tokenizer, shown)
            told = shown.show_engine() if len(clients) > 1 else lambda serves: None
            self._all.append(Replica(rank, client, shown, outputs, self._load(outputs, fact), told))
        self._tasks = [asyncio.create_task(self._run(each), name=f"engine-{each.rank}") for each in self._all]
        if not self._alone:
            self._tasks.append(asyncio.create_task(self._watch(), name="engine-watch"))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def _alone(self) -> bool:
        return len(self._all) == 1

    def _load(self, outputs: OutputProcessor, facts: CoreFacts) -> EngineLoad:
        return EngineLoad.of(facts, self._speed, lambda: outputs.num_choices)

    def send(
        self, name: str, requests: list[EngineCoreRequest], params: SamplingParams, kind: OutputKind,
        on_change: Callable[[], None], kept: Set[int],
    ) -> OpenRequest:  # fmt: skip
        """Send the choices of one request to the engine that is expected to answer first. Raises EngineDeadError if
        there is none."""
        replica, keys = self._choose(requests[0])
        request = replica.outputs.add(name, None, requests, params, kind, on_change, kept)
        replica.add(request, keys)
        return request

    def abort(self, request: OpenRequest) -> None:
        """Forget a request that nobody waits for any more."""
        for each in self._all:
            each.abort(each.outputs.abort(request))

    def finish_aborted(self, request_id: str) -> None:
        """End a request for somebody other than its reader, who still gets what there is."""
        for each in self._all:
            each.abort(each.outputs.finish_aborted(request_id))

    def check_alive(self) -> None:
        """Raise EngineDeadError if no engine takes requests."""
        if all(each.error is not None for each in self._all):
            raise self._dead()

    def check_health(self) -> None:
        """Raise EngineDeadError or StepsFailError if no engine can be relied on."""
        problems = [each.problem() for each in self._all]
        if None not in problems:
            self.check_alive()
            error = problems[0]
            assert error is not None
            raise error

    def states(self) -> dict[str, str]:
        """Return what each engine does, by rank."""
        return {str(each.rank): "serving" if (why := each.problem()) is None else str(why) for each in self._all}

    def join(self, sockets: Mapping[int, Join]) -> None:
        """Tell the cores, which this process runs, of a further front end: of its sockets for each, by rank."""
        for each in self._all:
            assert isinstance(each.client, AsyncMPClient)
            each.client.join(sockets[each.rank])

    async def shutdown(self, timeout: float = STOP_SECONDS) -> None:
        """End open requests with EngineDeadError, and all cores. No process is left when this returns."""
        for each in self._all:
            each.error = each.error or EngineDeadError("the engine is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._all:
            each.outputs.fail_all(each.error or self._dead())
        await asyncio.gather(*(each.client.shutdown(timeout) for each in self._all))

    def _dead(self) -> EngineDeadError:
        error = self._all[0].error
        assert error is not None
        return error if self._alone else EngineDeadError(f"none of {len(self)} engines serves now: {error}")

    def _choose(self, request: EngineCoreRequest) -> tuple[Replica, list[bytes]]:
        """Return the engine for a request, and the keys of its prompt."""
        self.check_alive()
        if self._alone:
            return self._all[0], []
        now, tokens = time.monotonic(), request.prompt_token_ids
        alive = [each for each in self._all if each.error is None]
        sound = [each for each in alive if each.problem() is None or now - each.load.last_sent > PROBE_SECONDS] or alive
        keys = chunk_keys(tokens, request.cache_salt)
        return sound[choose([each.load for each in sound], keys, len(tokens), now)], keys

    async def _run(self, replica: Replica) -> None:
        """Hand out what a core sends, until it dies; if there are others, start it again and go on."""
        while True:
            error = await self._receive(replica)
            if self._joined:
                await self._lose_all(replica, error)
                return
            self._lose(replica, error)
            if self._alone:
                return
            await self._restart(replica)

    async def _receive(self, replica: Replica) -> EngineDeadError:
        """Hand out what a core sends; return how it died."""
        try:
            while True:
                self._take(replica, await replica.client.receive())
                # If further steps have arrived meanwhile, writing takes longer than a step.
                for _ in range(MAX_MERGED_STEPS):
                    if (waiting := replica.client.receive_waiting()) is None:
                        break
                    self._take(replica, waiting)
                self._queue.observe()
                await asyncio.sleep(0)  # lets the readers run, even if the core is faster than this loop
        except EngineDeadError as error:
            return error
        except Exception as error:  # a bug on this side must not leave requests waiting for ever
            logger.exception("the engine's front end failed")
            return EngineDeadError(f"the engine's front end failed: {type(error).__name__}: {error}")

    def _take(self, replica: Replica, outputs: EngineCoreOutputs) -> None:
        replica.abort(replica.outputs.process(outputs))
        if not self._alone:
            replica.load.took(outputs.outputs, outputs.stats, time.monotonic())

    def _lose(self, replica: Replica, error: EngineDeadError) -> None:
        """Take out an engine that has died. Requests of which nothing has been read go to others."""
        if self._alone:
            logger.error("%s", error)
            replica.error = error
            replica.outputs.fail_all(error)
            return
        replica.error = EngineDeadError(f"engine {replica.rank}: {error}")
        replica.on_change(False)
        unanswered = replica.outputs.take_unanswered()
        logger.error(
            "%s; %d of its requests go to other engines, %d end", replica.error, len(unanswered),
            replica.outputs.num_requests,
        )  # fmt: skip
        replica.outputs.fail_all(replica.error)
        replica.metrics.forget()
        self._queue.lost(replica.load.sent, replica.load.sent_tokens)
        for request in unanswered:
            self._send_again(request, replica)

    async def _lose_all(self, replica: Replica, error: EngineDeadError) -> None:
        """End all engines, since one has died whose experts they need."""
        first = all(each.error is None for each in self._all)
        replica.error = error
        if not first:
            return
        await asyncio.sleep(BLAME_SECONDS)
        dead = [(each.rank, each.error) for each in self._all if each.error is not None]
        gone = what_ended_all(dead, len(self))
        logger.error("%s", gone)
        for each in self._all:
            each.error = gone
            each.on_change(False)
            each.client.kill()
            each.outputs.fail_all(gone)

    def _send_again(self, request: OpenRequest, lost: Replica) -> None:
        request.num_lost += 1
        if request.num_lost > MOST_LOST:
            why = f"{request.num_lost} engines have died with this request, so it is not sent again: {lost.error}"
            lost.outputs.fail(request, EngineDeadError(why))
            return
        try:
            replica, keys = self._choose(request.core_requests[0])
        except EngineDeadError as error:
            lost.outputs.fail(request, error)
            return
        replica.outputs.begin(request)
        replica.add(request, keys)
        choices = len(request.core_requests)
        self._queue.sent(choices, choices * len(request.prompt_token_ids), None)

    async def _restart(self, replica: Replica) -> None:
        """Start a core again, as often as it takes."""
        pause = RESTART_SECONDS
        while True:
            replica.client = await replica.client.again()
            try:
                facts = await replica.client.ready()
                break
            except HeadraceError as error:
                logger.error("engine %d did not start again: %s; next try in %g s", replica.rank, error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RESTART_SECONDS)
        replica.load = self._load(replica.outputs, facts)
        replica.error = None
        replica.on_change(True)
        logger.warning("engine %d serves again", replica.rank)

    async def _watch(self) -> None:
        """End cores that have been silent for too long, so that they are started again."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for each in self._all:
                if each.error is None and isinstance(why := each.problem(), EngineDeadError):
                    logger.error("engine %d is ended: %s", each.rank, why)
                    each.client.kill()
