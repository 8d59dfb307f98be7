"""A rank that finds no memory says so as a fact, or in one line, and goes on with what it is told next."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.errors import OutOfMemoryError
from headrace.graph_sizes import LAYER_BYTES, PIECE_BYTES, WORKSPACE_BYTES
from headrace.model_config import ModelConfig
from headrace.models.llama import LlamaForCausalLM
from headrace.planner.decisions import decide_before_load
from headrace.runner import model_runner
from headrace.runner import worker as worker_module
from headrace.runner.model_runner import Forward, ModelRunner
from headrace.runner.pending import PendingStep
from headrace.runner.profile import MARGIN, MOST_OUTSIDE, measure_memory
from headrace.runner.worker import Worker
from headrace.step import BlockUpdate, Masks, NewRow, SchedulerOutput
from tests.runner.harness import make_runner

DEMO = Path(headrace.__file__).parent / "demo_model"
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
MIB = 1 << 20


class FakeMemory:
    """A GPU of `total` bytes. Steps take `bytes_per_token`; what the cache asks for is never counted."""

    name = "a fake GPU"

    def __init__(self, total: int, standing: int, bytes_per_token: int, outside: int = 0, others: int = 0) -> None:
        self.total = total
        self._standing, self._outside, self._others = standing, outside, others
        self._bytes_per_token = bytes_per_token
        self._peak = standing

    def ran(self, tokens: int) -> None:
        self._peak = max(self._peak, self._standing + tokens * self._bytes_per_token)

    def free(self) -> int:
        return self.total - self._standing - self._outside - self._others

    def reserved(self) -> int:
        return self._standing

    def allocated(self) -> int:
        return self._standing

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._standing

    def empty_cache(self) -> None:
        pass

    def drop_workspaces(self) -> None:
        pass


def watched(mode: str, memory: FakeMemory) -> ModelRunner:
    runner = make_runner("llama", mode)
    execute = runner.execute

    def run(step: SchedulerOutput) -> Any:
        memory.ran(step.num_tokens)
        return execute(step)

    runner.execute = run  # type: ignore[method-assign]
    return runner


def test_what_is_left_is_our_share_less_all_that_we_take() -> None:
    memory = FakeMemory(1000 * MIB, standing=100 * MIB, bytes_per_token=MIB, outside=30 * MIB)
    use = measure_memory(watched("NONE", memory), memory, 0.9, 1000 * MIB)
    assert (use.standing, use.step, use.outside, use.graphs) == (100 * MIB, 24 * MIB, 30 * MIB, 0)
    assert use.left == 900 * MIB - 100 * MIB - 24 * MIB - 30 * MIB
    assert str(use).startswith("weights and tables 0.10, the largest step 0.02, CUDA graphs 0.00, libraries 0.03, left")


@pytest.mark.parametrize(
    ("mode", "pieces", "whole"),
    [("PIECEWISE", {1, 2, 4, 16, 6}, []), ("FULL_AND_PIECEWISE", {1, 2, 4, 16}, [1, 2, 6, "alone 4", "alone 16"])],
)
def test_graphs_take_what_their_largest_step_takes_and_a_little_each(
    mode: str, pieces: set[int], whole: list[object]
) -> None:
    memory = FakeMemory(1000 * MIB, standing=0, bytes_per_token=MIB)
    runner = watched(mode, memory)
    settings = runner.graph_settings
    assert settings is not None
    runner.graph_settings = replace(settings, other_sizes=(1, 2, 4, 16), decode_sizes=(1, 2, 6))
    use = measure_memory(runner, memory, 0.9, 1000 * MIB)
    driver = len(pieces) * 4 * PIECE_BYTES + len(whole) * 3 * LAYER_BYTES  # three layers
    assert use.graphs == 16 * MIB + driver + WORKSPACE_BYTES
    assert use.left == 900 * MIB - 24 * MIB - use.graphs


def test_a_second_instance_sees_what_the_first_one_took() -> None:
    first = FakeMemory(1000 * MIB, standing=100 * MIB, bytes_per_token=MIB)
    alone = measure_memory(watched("NONE", first), first, 0.45, 1000 * MIB)
    taken = 100 * MIB + alone.left
    assert taken < 450 * MIB
    second = FakeMemory(1000 * MIB, standing=100 * MIB, bytes_per_token=MIB, others=taken)
    assert measure_memory(watched("NONE", second), second, 0.45, 1000 * MIB - taken).left == alone.left
    greedy = measure_memory(watched("NONE", second), second, 0.9, 1000 * MIB - taken)
    assert greedy.left == 1000 * MIB - taken - 100 * MIB - 24 * MIB - int(1000 * MIB * MARGIN), (
        "bounded by what is free"
    )


def test_what_others_take_while_this_one_starts_is_not_counted_as_libraries() -> None:
    total = 100 << 30
    memory = FakeMemory(total, standing=10 << 30, bytes_per_token=MIB, outside=1 << 30, others=45 << 30)
    use = measure_memory(watched("NONE", memory), memory, 0.45, free_at_start=total)
    assert use.outside == MOST_OUTSIDE
    assert use.left == int(total * 0.45) - (10 << 30) - 24 * MIB - MOST_OUTSIDE


def test_too_small_a_share_says_how_much_is_missing() -> None:
    memory = FakeMemory(1000 * MIB, standing=100 * MIB, bytes_per_token=MIB)
    assert measure_memory(watched("NONE", memory), memory, 0.05, 1000 * MIB).left == -74 * MIB


@pytest.fixture
def worker() -> Worker:
    given = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, dtype="float32")
    model_config = ModelConfig.from_folder(DEMO)
    config, _ = decide_before_load(given, model_config, "cpu")
    return Worker(config, DEMO, model_config)


def fail(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(SAID + "\nmore words")


def test_other_failures_of_loading_are_raised_as_they_are(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a size does not match")

    monkeypatch.setattr(worker_module, "load_model", broken)
    with pytest.raises(RuntimeError, match="does not match"):
        worker.load()


def test_what_a_masked_step_has_computed_is_freed_before_it_is_computed_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its logits would take the memory that is missing."""
    worker.load()
    worker.initialize_cache(8)
    begun: list[weakref.ref[Forward]] = []

    class Short(ModelRunner):
        def finish(self, forward: Forward, masks: Masks | None) -> PendingStep:
            if not begun:
                begun.append(weakref.ref(forward))
                fail()
            assert begun[0]() is None
            return super().finish(forward, masks)

    assert worker.runner is not None
    worker.runner.__class__ = Short
    row = NewRow(0, [1, 2, 3], SamplingParams(), [])
    step = SchedulerOutput(0, [row], [], [BlockUpdate(0, 0, [3])], [0], [0], [3], [True], masked=True)
    handle = worker.execute(step)
    only_seven = np.zeros(-(-worker.model_config.vocab_size // 32), dtype="<u4")
    only_seven[0] = 1 << 7
    worker.sample(Masks(0, {0: 0}, len(only_seven), memoryview(only_seven.tobytes())))
    assert handle.result().token_ids == [7]
    assert handle.result().short_of_memory


SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True
}  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    outputs = llm.generate([[5, 6, 7] * 20, [9, 8], [4] * 30], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What is answered with memory for all; the rank names its backend as guides look for it."""
    with LLM("demo", **SETTINGS) as llm:
        assert llm._core.facts.workers[0].notes[0].startswith("Using TORCH_SDPA backend: ")
        return answers(llm)


@pytest.mark.parametrize("plant", ["weights", "step", "cache", "serving", "everything that serves"])
def test_the_whole_engine_with_memory_that_ends(
    plant: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Real model, scheduler and core: the same tokens whatever did not fit, and a line that says so."""
    failures = []

    def planted(name: str, function: Any, when: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            if when(*arguments):
                failures.append(name)
                fail()
            return function(*arguments, **keywords)

        return run

    if plant == "weights":
        monkeypatch.setattr(worker_module, "load_model", fail)
        with pytest.raises(OutOfMemoryError, match="the weights do not fit on cpu"):
            LLM("demo", **SETTINGS)
        return
    if plant == "step":
        big = planted(plant, ModelRunner, lambda *a: a[3].max_num_batched_tokens > 20)
        monkeypatch.setattr(worker_module, "ModelRunner", big)
    if plant == "cache":
        big = planted(plant, model_runner.allocate_kv_cache, lambda shape, blocks, device: blocks > 60)
        monkeypatch.setattr(model_runner, "allocate_kv_cache", big)
    if plant == "serving":
        once = planted(plant, LlamaForCausalLM.forward, lambda *a: len(a[1]) > 20)
        monkeypatch.setattr(LlamaForCausalLM, "forward", once)
    with LLM("demo", **SETTINGS) as llm:
        if plant == "everything that serves":
            monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
            with pytest.raises(headrace.errors.HeadraceError, match="no memory for a step of one token"):
                answers(llm)
            monkeypatch.undo()
        assert answers(llm) == expected
    assert SAID in caplog.text
    assert bool(failures) == (plant != "everything that serves")
