"""Starting with too little memory: what the ranks report makes the plan smaller until it fits, or one clear error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.errors import OutOfMemoryError
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.step import WorkerFacts
from tests.engine.fakes import FakeExecutor, model_folder

BLOCK = 1 << 10
LAYOUT = same_layout(16, BLOCK)
SAID = "CUDA out of memory. Tried to allocate 1.00 GiB."


@dataclass
class TightExecutor(FakeExecutor):
    """Two ranks, of which the second has room for steps of `step_tokens` tokens and for `num_blocks_free` blocks."""

    config: EngineConfig = field(default_factory=EngineConfig)
    step_tokens: int = 10**6
    blocks_reported: int = 10**4
    num_blocks_free: int = 10**6
    plans: list[tuple[int | None, int | None, int | None]] = field(default_factory=list)
    caches: list[int] = field(default_factory=list)

    def load(self) -> list[WorkerFacts]:
        return self.profile(self.config)

    def profile(self, config: EngineConfig) -> list[WorkerFacts]:
        tokens = config.max_num_batched_tokens or 0
        self.plans.append((tokens, config.max_num_seqs, config.max_model_len))
        roomy = WorkerFacts(
            "cuda", "a GPU", 2**30, 10**5 * BLOCK, LAYOUT, 0, "FAKE", ["a note"], step_bytes=tokens * 100
        )
        tight = msgspec.structs.replace(roomy, available_kv_memory=self.blocks_reported * BLOCK)
        if tokens > self.step_tokens:
            return [msgspec.structs.replace(tight, shortfall=SAID)]
        return [roomy, tight]

    def initialize_cache(self, num_pages: int) -> list[WorkerFacts]:
        self.caches.append(num_pages)
        facts = WorkerFacts("cuda", "a GPU", 2**30, self.num_blocks_free * BLOCK, LAYOUT, 0, "FAKE")
        if num_pages <= self.num_blocks_free:
            return [facts, facts]
        return [facts, msgspec.structs.replace(facts, shortfall=SAID)]


Start = Callable[..., tuple[Any, TightExecutor]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def run(tight: dict[str, int], **given: Any) -> tuple[Any, TightExecutor]:
        executor = TightExecutor(**tight)  # type: ignore[arg-type]

        def make(config: EngineConfig, *_: object) -> TightExecutor:
            executor.config = config
            return executor

        monkeypatch.setattr("tests.engine.fakes.make_echo", make)
        config = EngineConfig(device="cuda", **given)
        try:
            return build_core(config, model_folder(tmp_path), False, "tests.engine.fakes:make_echo"), executor
        except OutOfMemoryError as error:
            return error, executor

    return run


def answer(core: Any) -> list[int]:
    params = SamplingParams(max_tokens=4)
    core.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[5, 6], params=params, max_tokens=4, seed=0))
    tokens: list[int] = []
    while core.has_work():
        tokens += [token for output in core.step().outputs for token in output.new_token_ids]
    return tokens


def test_enough_memory_is_one_plan(start: Start) -> None:
    core, executor = start({})
    assert len(executor.plans) == len(executor.caches) == 1
    assert answer(core) == [5, 6, 5, 6]


def test_a_step_that_does_not_fit_becomes_smaller(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headrace"):
        core, executor = start({"step_tokens": 300})
    assert [plan[0] for plan in executor.plans] == [8192, 4096, 2048, 1024, 512, 256]
    assert [plan[1] for plan in executor.plans] == [1024] * 4 + [512, 256]
    config = core.facts.config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (256, 256)
    limits = core.scheduler.config
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (256, 256)
    lines = [record.message for record in caplog.records if record.message.startswith("max_num_batched_tokens")]
    why = f"a step of 8192 tokens in up to 1024 sequences did not fit: {SAID} (instead of 8192)"
    assert lines[1] == f"max_num_batched_tokens = 4096: {why}"
    assert {"max_num_batched_tokens", "max_num_seqs"} <= {
        d.field for d in core.facts.decisions if d.source == "measured"
    }
    assert answer(core) == [5, 6, 5, 6]


def test_a_value_that_the_user_gave_gives_way_too(start: Start) -> None:
    core, _ = start({"step_tokens": 300}, max_num_batched_tokens=400, max_num_seqs=10)
    assert core.scheduler.config.max_num_batched_tokens == 200


def test_no_step_fits(start: Start) -> None:
    error, executor = start({"step_tokens": 10})
    assert isinstance(error, OutOfMemoryError)
    assert str(error).count("\n") == 0
    assert SAID in str(error)
    assert executor.closed


def test_a_cache_that_does_not_fit_becomes_smaller(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headrace"):
        core, executor = start({"num_blocks_free": 100})
    assert executor.caches == [10**4, 100]
    assert core.facts.num_pages == core.scheduler.config.num_pages == 100
    assert f"num_gpu_blocks = 100: 10000 did not fit: {SAID} (instead of 10000)" in caplog.text
    assert answer(core) == [5, 6, 5, 6]


def test_no_cache_fits(start: Start) -> None:
    error, executor = start({"num_blocks_free": 3})
    assert isinstance(error, OutOfMemoryError)
    assert "room for 48 tokens, fewer than max_model_len (256)" in str(error)
    assert executor.closed


def test_a_context_that_nobody_gave_shrinks(start: Start) -> None:
    core, executor = start({"blocks_reported": 10})
    assert core.facts.config.max_model_len == core.scheduler.config.max_model_len == 160
    assert executor.plans[-1][2] == 160
    assert core.facts.num_pages == 10


def test_a_context_that_was_given_is_kept_or_refused(start: Start) -> None:
    error, executor = start({"blocks_reported": 10}, max_model_len=256)
    assert isinstance(error, OutOfMemoryError)
    assert "lower --max-model-len to 160" in str(error)
    assert executor.closed
