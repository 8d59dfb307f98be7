"""Steps that carry parts of prompts beside running decodes: what they take on the device and of the host.

    python bench/mixed_steps.py                        8B bf16, 8 and 26 decodes, 512 to 1152 tokens a step
    python bench/mixed_steps.py --decodes 64 --tokens 512,2048 --model moe --cudagraph-mode FULL
    python bench/mixed_steps.py --smoke                toy sizes on the CPU: proves that the code runs, no more

The real scheduler and engine core in this process, pipelined as a server runs them. A step's time is from the result
before it to its own, the host's the time to submit it: where both are alike, the step waits for the host. Decodes have
read 1024 tokens each; prompts of 1024 go by beside them. Medians over the steps of full size, after two rounds that
load kernels and capture graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from h200_parts.models import MODELS
from h200_parts.settings import SEED, Settings

from headrace.config import GRAPH_MODES, EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.messages import Abort
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams

PROMPT = 1024
"""tokens"""
ROUNDS = (8, 4, 24)
"""prompts of the rounds: two that warm up, and the one that counts"""
ENDLESS = 4000
"""tokens that a decode may make"""


@dataclasses.dataclass
class Times:
    """Of steps, in the order in which they were submitted and finished."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    submitting: list[float] = dataclasses.field(default_factory=list)
    """seconds of the host"""
    finished: list[float] = dataclasses.field(default_factory=list)
    """time.perf_counter()"""

    def of_size(self, tokens: int) -> tuple[list[float], list[float]]:
        """(seconds of steps, seconds of their submission), of those of so many tokens but the first."""
        steps = [i for i in range(1, len(self.finished)) if self.tokens[i] == tokens]
        return [self.finished[i] - self.finished[i - 1] for i in steps], [self.submitting[i] for i in steps]


class TimedExecutor:
    """An executor whose steps are timed."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.times = Times()

    def execute(self, plan: Any) -> Any:
        begin = time.perf_counter()
        handle = TimedHandle(self._executor.execute(plan), self.times)
        self.times.tokens.append(plan.num_tokens)
        self.times.submitting.append(time.perf_counter() - begin)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class TimedHandle:
    def __init__(self, handle: Any, times: Times) -> None:
        self._handle, self._times = handle, times

    def done(self) -> bool:
        return bool(self._handle.done())

    def result(self) -> Any:
        result = self._handle.result()
        self._times.finished.append(time.perf_counter())
        return result


@contextmanager
def timed_core(settings: Settings, model: str) -> Iterator[tuple[EngineCore, TimedExecutor]]:
    knobs = settings.engine_knobs(MODELS[model])
    core = build_core(EngineConfig(**knobs), Path(knobs["model"]), beside_server=True)
    core._executor = executor = TimedExecutor(core._executor)
    try:
        yield core, executor
    finally:
        core.shutdown()


def run_round(core: EngineCore, executor: TimedExecutor, decodes: int, tokens: int, prompts: int, length: int) -> Times:
    """`prompts` of `length` tokens beside `decodes` requests that decode, in steps of `tokens` at most."""
    core.scheduler.config = dataclasses.replace(core.scheduler.config, mixed_step_tokens=tokens)
    rng = random.Random(SEED)

    def add(kind: str, count: int, output_len: int) -> list[str]:
        names = [f"{kind} {i}" for i in range(count)]
        for name in names:
            ids = [rng.randrange(5, 200) for _ in range(length)]
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            core.add_request(
                EngineCoreRequest(
                    request_id=name, prompt_token_ids=ids, params=params, max_tokens=output_len, seed=0
                )
            )  # fmt: skip
        return names

    with patch("headrace.scheduler.config.BACKLOG_STEPS", sys.maxsize):  # however much waits
        held = add("decode", decodes, min(ENDLESS, core.scheduler.config.max_model_len - length))
        while len(core.scheduler.waiting) or any(
            one.num_computed_tokens < length for one in core.scheduler.running.items
        ):
            core.step()
        times = executor.times = Times()  # steps under way finish into those before
        add("prompt", prompts, 1)
        while len(core.scheduler.running) > decodes or len(core.scheduler.waiting):
            core.step()
        core.abort([Abort(name, 0) for name in held])
        while core.has_work():
            core.step()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="bf16")
    parser.add_argument("--decodes", default="8,26")
    parser.add_argument("--tokens", default="512,544,640,768,1024,1152", help="sizes of steps")
    parser.add_argument("--cudagraph-mode", choices=tuple(GRAPH_MODES), default="FULL_AND_PIECEWISE")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    print("decodes  tokens   step, ms    longest   host, ms   prompt tokens/s")
    with tempfile.TemporaryDirectory(prefix="headrace-mixed-") as work:
        mode = {"compilation_config": {"cudagraph_mode": options.cudagraph_mode}}
        settings = Settings(Path(work), smoke=options.smoke, engine={} if options.smoke else mode)
        with timed_core(settings, options.model) as (core, executor):
            for decodes in map(int, options.decodes.split(",")):
                for tokens in map(int, options.tokens.split(",")):
                    for prompts in ROUNDS:
                        times = run_round(core, executor, decodes, tokens, prompts, settings.tokens(PROMPT))
                    steps, host = times.of_size(tokens)
                    if not steps:
                        print(f"{decodes:7}{tokens:8}   no step was of that size")
                        continue
                    step = statistics.median(steps)
                    print(
                        f"{decodes:7}{tokens:8}{1000 * step:11.2f}{1000 * max(steps):11.2f}"
                        f"{1000 * statistics.median(host):11.2f}{(tokens - decodes) / step:18,.0f}",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
