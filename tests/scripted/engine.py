"""A server whose model is a transcript: all of `headrace serve` but the ranks, in threads of this process.

Requests cross real HTTP, AsyncEngine, the core's loop and its sockets, and the scheduler; only the executor is a fake
one, and the core a thread in place of a process, so that a test says in Python what the model will say. A token that a
request's grammar forbids fails the request: a transcript must be what the model could have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import numpy as np
import uvloop
import zmq

from headrace.config import EngineConfig, ServerConfig
from headrace.engine import core_client, core_process
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.build import build_core
from headrace.engine.front_ends import FrontEnds
from headrace.engine.messages import CoreConfig, Failed, Ready
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, crossing_name
from headrace.model_config import ModelConfig
from headrace.server.app import build_app
from headrace.server.http_server import HttpServer
from headrace.server.run import listen_on
from headrace.step import NO_TOKEN_ALLOWED, Masks, RunnerOutput, SchedulerOutput
from tests.engine.fakes import FakeExecutor, FakeStep, fake_logprobs
from tests.scripted.families import Call, Family, Said
from tests.speed import PATIENCE

T = TypeVar("T")
CONNECTIONS = 256


@dataclass(frozen=True)
class Turn:
    """The model says `text`, with the token that ends a turn, once `after` stands in the prompt."""

    after: str
    text: str


@dataclass
class Transcript:
    """What the model says: of all turns whose `after` is in the prompt, the last one. `prompts`: those it was given."""

    family: Family
    tokenizer: Tokenizer
    turns: list[Turn] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    obeys: bool = False
    """Where a grammar forbids what comes next: whether the model says something allowed, or the request fails."""
    executor: ScriptedExecutor = field(init=False)
    _chosen: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __call__(self, prompt: list[int], index: int) -> int:
        """Return an output token: the script of a FakeExecutor."""
        key = tuple(prompt)
        if index == 0:
            self._chosen[key] = self._choose(prompt)
        ids = self._chosen[key]
        return ids[min(index, len(ids) - 1)]

    def _choose(self, prompt: list[int]) -> list[int]:
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        self.prompts.append(text)
        for turn in reversed(self.turns):
            if turn.after in text:
                return self.tokenizer.encode(turn.text, add_special_tokens=False)
        raise HeadraceError(f"the transcript has no turn for a prompt that ends in {text[-200:]!r}")

    def play(self, *turns: tuple[str, Said] | Turn) -> None:
        """Begin a new transcript, of turns as (after, what is said)."""
        self.prompts.clear()
        self.turns.clear()
        before = 0
        for turn in turns:
            if isinstance(turn, Turn):
                self.turns.append(turn)
            else:
                after, said = turn
                self.turns.append(Turn(after, self.family.write(said, before)))
                before += len(said.calls)


TRANSCRIPTS: dict[Path, Transcript] = {}
"""Model folder -> what its model says."""


class ScriptedExecutor(FakeExecutor):
    """Samples a masked step when its masks have come, and heeds them."""

    def __init__(self, transcript: Transcript) -> None:
        super().__init__(script=transcript)
        self._transcript = transcript
        self._waiting: tuple[SchedulerOutput, FakeStep] | None = None
        self._draw = random.Random(0)

    def execute(self, step: SchedulerOutput) -> FakeStep:
        assert self._waiting is None, "a step is executed while a masked one waits for its masks"
        handle = super().execute(step)
        if step.masked:
            self._waiting = step, handle
            handle.ready_at = math.inf
        return handle

    def sample(self, masks: Masks) -> None:
        assert self._waiting is not None
        (step, handle), self._waiting = self._waiting, None
        assert masks.step == step.step
        handle.ready_at = time.monotonic() + self.delay
        if isinstance(handle.result_, Exception) or not masks.first_lines:
            return
        token_ids = handle.result_.token_ids
        rows = [row for row, samples in zip(step.rows, step.samples, strict=True) if samples]
        lines = np.frombuffer(masks.bits, np.uint8).reshape(-1, 4 * masks.num_words)
        for place, row in enumerate(rows):
            line = masks.first_lines.get(row)
            if line is not None:
                allowed = np.unpackbits(lines[line], bitorder="little").nonzero()[0]
                if token_ids[place] not in allowed:
                    token_ids[place] = self._instead(allowed)
                    self._score(handle.result_, place)

    def _score(self, result: RunnerOutput, place: int) -> None:
        """Let logprobs be those of the token that is said."""
        if result.logprobs and (entry := result.logprobs[place]) is not None and result.token_ids[place] >= 0:
            result.logprobs[place] = fake_logprobs(result.token_ids[place], len(entry.token_ids) - 1)

    def _instead(self, allowed: np.ndarray[Any, Any]) -> int:
        """Return what is said in place of a token that is not allowed."""
        if self._transcript.obeys and len(allowed):
            return int(self._draw.choice(allowed))
        return NO_TOKEN_ALLOWED


def make_scripted(config: EngineConfig, folder: Path, model_config: ModelConfig) -> ScriptedExecutor:
    transcript = TRANSCRIPTS[folder]
    transcript.executor = ScriptedExecutor(transcript)
    return transcript.executor


class _CoreThread:
    """Stands in for process.Child: the core's own loop on the core's own sockets, in a thread."""

    pid = 0

    def __init__(self, module: str, payload: bytes, environment: dict[str, str]) -> None:
        assert module == "headrace.engine.core_process"
        self.process = self
        self.asked = False
        self._thread = threading.Thread(target=self._run, args=(payload,), name="scripted-core", daemon=True)
        self._thread.start()

    def _run(self, payload: bytes) -> None:
        core_config = msgspec.msgpack.decode(payload, type=CoreConfig)
        context = zmq.Context()
        front_ends = FrontEnds(context, core_config.requests, core_config.replies)
        core = None
        try:
            core = build_core(core_config.config, Path(core_config.folder), True, core_config.executor)
            front_ends.send(Ready(core.facts, self.pid))
            core_process._loop(core, front_ends, self)  # type: ignore[arg-type]
        except Exception as error:
            front_ends.send(Failed(crossing_name(error), str(error)))
            raise
        finally:
            context.destroy(linger=core_process.LINGER_MS)
            if core is not None:
                core.shutdown()

    def stop(self, timeout: float) -> None:
        self.asked = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def poll(self) -> int | None:
        return None if self.is_alive() else 0

    def kill(self) -> None:
        self.asked = True


@dataclass(frozen=True)
class Scripted:
    """One served model."""

    family: Family
    url: str
    engine: AsyncEngine
    app: Any
    transcript: Transcript
    servers: ScriptedServers

    @property
    def name(self) -> str:
        return self.family.name

    def play(self, *turns: tuple[str, Said] | Turn) -> None:
        self.transcript.play(*turns)

    def say(self, content: str = "", *calls: Call, reasoning: str | None = None, held: bool = False) -> None:
        """Let the model say the same whatever it is asked."""
        self.play(("", Said(content, calls, reasoning, held)))

    def answer(self, content: str = "", *calls: Call) -> None:
        """The same for what is held to a grammar, behind a thought if the family has them."""
        self.say(content, *calls, reasoning="A thought." if self.family.thinks else None, held=True)

    @contextlib.contextmanager
    def pace(self, seconds: float) -> Iterator[None]:
        """Meanwhile each token takes so long; else the model says all it has to say in one breath."""
        self.transcript.executor.delay = seconds
        yield
        self.transcript.executor.delay = 0.0

    @property
    def prompts(self) -> list[str]:
        return self.transcript.prompts


class ScriptedServers:
    """An event loop in a thread, and the servers that run there. They start when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self._servers: dict[Any, Scripted] = {}
        self._stops: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-servers", daemon=True)
        self._thread.start()

    def __call__(self, family: Family, **flags: Any) -> Scripted:
        """Return the server of a family, with these flags of the command line beside the family's own."""
        key = (family.name, family.real, repr(sorted(flags.items())))
        if key not in self._servers:
            self._servers[key] = self.run(self._start(family, family.flags | flags))
        return self._servers[key]

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Run a coroutine on the servers' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _start(self, family: Family, flags: dict[str, Any]) -> Scripted:
        folder = Path(tempfile.mkdtemp(prefix=f"{family.name}-{next(self._numbers)}-", dir=self.folder))
        family.model_folder(folder)
        transcript = TRANSCRIPTS[folder] = Transcript(family, Tokenizer.from_folder(folder))
        for_engine = {name: flags[name] for name in flags if name in EngineConfig.__dataclass_fields__}
        for_server = {name: flags[name] for name in flags if name in ServerConfig.__dataclass_fields__}
        assert len(for_engine | for_server) == len(flags), flags
        config = EngineConfig(
            model=str(folder), device="cpu", num_gpu_blocks_override=8192, served_model_name=[family.name],
            max_num_seqs=64, max_num_batched_tokens=8192, disable_log_stats=True, **for_engine,
        )  # fmt: skip
        server_config = ServerConfig(port=0, max_connections=CONNECTIONS, **for_server)
        with mock.patch.object(core_client, "spawn", _CoreThread):
            engine = await AsyncEngine.start(config, executor=f"{__name__}:make_scripted")
        app = build_app(engine, server_config, [family.name])
        listener = listen_on("127.0.0.1", 0)
        server = HttpServer(app, server_config, 1)
        stop = asyncio.Event()
        self._stops.append(stop)
        self._tasks.append(asyncio.create_task(self._serve(server, listener, engine, stop)))
        while not server.started:
            await asyncio.sleep(0.002)
        port = listener.getsockname()[1]
        return Scripted(family, f"http://127.0.0.1:{port}", engine, app, transcript, self)

    async def _serve(self, server: HttpServer, listener: Any, engine: AsyncEngine, stop: asyncio.Event) -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await stop.wait()
        finally:
            server.should_exit = True
            await serving
            await engine.shutdown()
            listener.close()

    async def _stop(self) -> None:
        for stop in self._stops:
            stop.set()
        await asyncio.gather(*self._tasks)

    def close(self) -> None:
        """Stop all servers and the loop."""
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


@contextlib.contextmanager
def scripted_servers() -> Iterator[ScriptedServers]:
    with tempfile.TemporaryDirectory(prefix="scripted-") as folder:
        servers = ScriptedServers(Path(folder))
        try:
            yield servers
        finally:
            servers.close()
