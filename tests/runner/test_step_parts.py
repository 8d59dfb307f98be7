"""A step that finds no memory while serving: computed all the same, and later ones are planned smaller."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.errors import OutOfMemoryError
from headrace.request import EngineCoreRequest, FinishReason
from headrace.runner.memory import HostMemory, first_line, is_out_of_memory
from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import FinishedStep, PendingStep, TokenBuffers
from headrace.runner.step_parts import execute_with_less_memory, halves, join
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, Logprobs, NewRow, RunnerOutput, SchedulerOutput
from tests.runner.harness import LIMITS, Answers, InThisProcess, check, make_core, make_runner, serve

SAID = "CUDA out of memory. Tried to allocate 3.00 GiB.\nGPU 0 has ..."


class ShortMemory(HostMemory):
    def __init__(self) -> None:
        self.emptied = 0

    def empty_cache(self) -> None:
        self.emptied += 1


class LessMemory(InThisProcess):
    """As a worker does it."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.memory = ShortMemory()

    def execute(self, step: SchedulerOutput) -> PendingStep | FinishedStep:  # type: ignore[override]
        self.steps.append(step)
        try:
            return self.runner.execute(step)
        except torch.OutOfMemoryError as error:
            said = first_line(error)
        return execute_with_less_memory(self.runner, self.memory, step, said)


@dataclass
class Shortage:
    """Makes a model fail: where `when(number of tokens, how often it failed)` is true."""

    runner: ModelRunner
    when: Callable[[int, int], bool]
    failed: int = 0

    def __post_init__(self) -> None:
        self.model: Any = self.runner.model
        self.runner.model = self  # type: ignore[assignment]

    def __call__(self, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self.when(len(input_ids), self.failed):
            self.failed += 1
            raise torch.OutOfMemoryError(SAID)
        hidden: torch.Tensor = self.model(input_ids, *rest)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits


@pytest.fixture(scope="module")
def expected() -> Answers:
    """What is served with memory for all."""
    return serve(make_core(make_runner("llama", "NONE"), num_blocks=26), grammars=False)


@pytest.mark.parametrize(
    ("mode", "most"),
    [
        ("NONE", 7),
        ("FULL_AND_PIECEWISE", 20),
        *(pytest.param("NONE", most, marks=pytest.mark.slow) for most in (20, 1)),
        *(pytest.param("FULL_AND_PIECEWISE", most, marks=pytest.mark.slow) for most in (7, 1)),
    ],
)
def test_the_same_tokens_from_parts_of_steps(mode: str, most: int, expected: Answers) -> None:
    runner = make_runner("llama", mode)
    shortage = Shortage(runner, lambda tokens, failed: tokens > most)
    core = make_core(runner, num_blocks=26, executor=LessMemory)
    check(serve(core, grammars=False), expected)
    assert shortage.failed > 0


class Unread(LessMemory):
    """A device whose results are never there before they are waited for, so that two steps are always queued."""

    def execute(self, step: SchedulerOutput) -> Any:
        return SimpleNamespace(done=lambda: False, result=super().execute(step).result)


def test_parts_of_a_step_leave_alone_what_the_step_before_has_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_results(runner: ModelRunner) -> None:
        """As on a GPU: buffers that take turns."""
        runner._token_buffers = TokenBuffers(LIMITS.max_num_seqs, torch.device("cpu"))
        runner._token_buffers._buffers = [torch.empty(LIMITS.max_num_seqs, dtype=torch.int64) for _ in range(4)]

    monkeypatch.setattr(ModelRunner, "keep_results", keep_results)

    def tokens(most: int) -> dict[str, list[int]]:
        runner = make_runner("llama", "NONE")
        Shortage(runner, lambda tokens, failed: tokens > most)
        core = make_core(runner, num_blocks=26)
        core._executor = Unread(runner)  # type: ignore[assignment]
        found: dict[str, list[int]] = {}
        upcoming = [request(f"r{i}", [7 + i, 8, 9, 10 + i]) for i in range(5)]
        core.add_request(request("first", [1, 2, 3]))
        for turn in itertools.count():
            if turn == 2:
                for one in upcoming:
                    core.add_request(one)
            if turn > 2 and not core.has_work():
                return found
            stepped = core.step()
            for output in stepped.outputs if stepped is not None else ():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        raise AssertionError

    assert tokens(most=4) == tokens(most=1000)


def test_what_is_said_and_done_about_it(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner("llama", "NONE")
    Shortage(runner, lambda tokens, failed: tokens == 24 and failed == 0)
    core = make_core(runner, num_blocks=26)
    executor = LessMemory(runner)
    core._executor = executor  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        serve(core, grammars=False)
    assert executor.memory.emptied == 1
    assert core.snapshot([]).stats.num_short_steps == 1
    said, decided = (record.message for record in caplog.records)
    assert "tokens found no memory, and was computed once cached memory was freed" in said
    assert said.endswith("Tried to allocate 3.00 GiB.")
    assert decided.startswith("max_num_batched_tokens = 16: a step of 24 tokens found no memory")
    first = next(i for i, step in enumerate(executor.steps) if step.num_tokens == 24)
    assert max(step.num_tokens for step in executor.steps[first + 2 :]) <= 16, "but for the one that was under way"


def request(name: str, prompt: list[int]) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, params=params, max_tokens=4, seed=0)


def test_no_memory_for_a_single_token_fails_that_step_alone() -> None:
    runner = make_runner("llama", "NONE")
    shortage = Shortage(runner, lambda tokens, failed: True)
    core = make_core(runner, num_blocks=26)
    core._executor = LessMemory(runner)  # type: ignore[assignment]
    core.add_request(request("a", [1, 2, 3]))
    outputs = []
    while core.has_work():
        outputs += core.step().outputs  # type: ignore[union-attr]
    (output,) = outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "no memory for a step of one token" in (output.error or "")
    shortage.when = lambda tokens, failed: False
    core.add_request(request("b", [1, 2, 3]))
    tokens = []
    while core.has_work():
        tokens += [token for output in core.step().outputs for token in output.new_token_ids]  # type: ignore[union-attr]
    assert len(tokens) == 4


def test_other_errors_are_not_tried_again() -> None:
    runner = make_runner("llama", "NONE")
    calls = []

    def fail(tokens: int, failed: int) -> bool:
        calls.append(tokens)
        raise RuntimeError("a size does not match")

    Shortage(runner, fail)
    runner.allocate(8)
    step = SchedulerOutput(0, [], [], [], [0], [0], [1], [True])
    with pytest.raises(RuntimeError, match="does not match"):
        execute_with_less_memory(runner, ShortMemory(), step, SAID)
    assert calls == [1]


def test_a_step_over_recurrent_states_is_not_computed_twice() -> None:
    """The attempt that failed may have updated them."""
    runner = make_runner("llama", "NONE")
    runner.allocate(8)
    layout = runner.shape.layout
    states = replace(layout, groups=(*layout.groups, replace(layout.groups[0], kind="state")))
    runner.shape = replace(runner.shape, layout=states)
    asked: list[int] = []
    Shortage(runner, lambda tokens, failed: bool(asked.append(tokens)))  # type: ignore[func-returns-value]
    step = SchedulerOutput(0, [], [], [], [0], [0], [1], [True])
    with pytest.raises(OutOfMemoryError, match=r"no memory for a step of 1 tokens over recurrent states: CUDA out of"):
        execute_with_less_memory(runner, ShortMemory(), step, SAID)
    assert not asked


def test_which_errors_mean_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(OutOfMemoryError("out of memory"))
    assert first_line(RuntimeError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def step(counts: list[int], samples: list[bool]) -> SchedulerOutput:
    rows = list(range(len(counts)))
    new = [NewRow(row, [1], SamplingParams(), []) for row in rows]
    return SchedulerOutput(7, new, [9], [BlockUpdate(0, 0, [1])], rows, [3] * len(rows), counts, samples)


@pytest.mark.parametrize(
    ("counts", "samples"),
    [
        ([1, 1, 1, 1, 1], [True] * 5),
        ([1, 1, 30], [True, True, False]),
        ([3, 20], [False, True]),
        ([9], [True]),
        ([2], [False]),
    ],
)
def test_halves_do_what_the_step_does(counts: list[int], samples: list[bool]) -> None:
    whole = step(counts, samples)
    first, second = halves(whole) or (whole, whole)
    assert (first.new_rows, first.freed_rows, first.block_updates) == (whole.new_rows, [9], whole.block_updates)
    assert (second.new_rows, second.freed_rows, second.block_updates) == ([], [], [])
    assert 0 < first.num_tokens < whole.num_tokens
    done: dict[int, int] = dict.fromkeys(whole.rows, 3)
    sampled = []
    for part in (first, second):
        for row, computed, count, samples_now in zip(
            part.rows, part.num_computed_tokens, part.num_scheduled_tokens, part.samples, strict=True
        ):
            assert computed == done[row]
            done[row] += count
            sampled += [row] if samples_now else []
    assert done == {row: 3 + count for row, count in zip(whole.rows, counts, strict=True)}
    assert sampled == [row for row, samples_now in zip(whole.rows, samples, strict=True) if samples_now]


def test_one_token_has_no_halves() -> None:
    assert halves(step([1], [True])) is None


def test_results_of_parts_are_joined() -> None:
    entry = Logprobs([4], [-1.0], 1)
    parts = [RunnerOutput(7, [4], [entry], {0: [entry]}, ["a"]), RunnerOutput(7, [5, 6], [], {0: [entry], 1: [entry]})]
    joined = join(SchedulerOutput(7), parts)
    assert joined == RunnerOutput(7, [4, 5, 6], [entry, None, None], {0: [entry, entry], 1: [entry]}, ["a"])
