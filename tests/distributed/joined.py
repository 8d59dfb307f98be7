"""Engines that share their experts as threads of this process, which takes no time to start: each steps its core, which
has one rank, until all requests of all engines have ended."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.messages import Abort
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams


@dataclass
class Asked:
    """A request of one engine."""

    prompt: list[int]
    params: SamplingParams
    after: int = 0
    """It comes after so many of the engine's steps."""
    abort_after: int | None = None
    """It is aborted once it has so many tokens."""
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


class Joined:
    """The engines of a model."""

    def __init__(
        self, folder: Path, meeting: Path, engines: int = 2, executor: str | None = None, **settings: Any
    ) -> None:
        config = EngineConfig(
            model=str(folder), data_parallel_size=engines, enable_expert_parallel=True, skip_tokenizer_init=True,
            dtype="float32", device="cpu", cpu_threads=1, **settings,
        )  # fmt: skip
        meeting.mkdir()
        self.threads = ThreadPoolExecutor(engines)

        def build(rank: int) -> EngineCore:
            return build_core(config.for_engine(rank), folder, False, executor, meeting=str(meeting))

        self.cores = list(self.threads.map(build, range(engines)))
        self.num_steps = [0] * engines
        self._at_rest = [False] * engines

    def run(self, asked: list[list[Asked]]) -> None:
        """Answer each engine's requests."""
        self._at_rest = [False] * len(self.cores)
        failed = threading.Event()
        list(self.threads.map(lambda rank: self._serve(rank, asked[rank], failed), range(len(self.cores))))

    def _serve(self, rank: int, asked: list[Asked], failed: threading.Event) -> None:
        core, begun = self.cores[rank], self.num_steps[rank]
        waiting = list(enumerate(asked))
        try:
            while not all(self._at_rest) and not failed.is_set():
                while waiting and self.num_steps[rank] - begun >= waiting[0][1].after:
                    number, one = waiting.pop(0)
                    core.add_request(
                        EngineCoreRequest(
                            request_id=str(number), prompt_token_ids=one.prompt, params=one.params,
                            max_tokens=one.params.max_tokens or 1, seed=number,
                            stop_token_ids=one.params.stop_token_ids,
                        )
                    )  # fmt: skip
                stepped = core.step()
                self.num_steps[rank] += 1
                if stepped is None and not core.busy:
                    time.sleep(0.0005)
                for output in () if stepped is None else stepped.outputs:
                    one = asked[int(output.request_id)]
                    assert output.error is None, output.error
                    one.tokens += output.new_token_ids
                    one.ended |= output.finish_reason is not None
                    if one.abort_after is not None and len(one.tokens) >= one.abort_after and not one.ended:
                        core.abort([Abort(output.request_id)])
                        one.ended = True
                # Whoever is at rest stays so: nothing begins but by a request.
                self._at_rest[rank] = not core.busy and all(one.ended for one in asked)
        except BaseException:
            failed.set()
            raise

    def shutdown(self) -> None:
        list(self.threads.map(EngineCore.shutdown, self.cores))
        self.threads.shutdown()
