"""On a CPU a small step runs on one thread, a large one on as many as torch has, and torch has as many afterwards."""

from __future__ import annotations

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.runner import worker as worker_module
from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import PendingStep
from headrace.step import SchedulerOutput


@pytest.mark.parametrize(
    ("batch_invariant", "expected"),
    [(False, [(40, 2), (1, 1), (1, 1)]), (True, [(1, 1)] * 42)],
    ids=["steps as they are", "token by token"],
)
def test_small_steps_run_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool, expected: list[tuple[int, int]]
) -> None:
    seen: list[tuple[int, int]] = []
    execute = ModelRunner.execute

    def watched(runner: ModelRunner, step: SchedulerOutput, masks: None = None) -> PendingStep:
        if step.rows:
            seen.append((step.num_tokens, torch.get_num_threads()))
        return execute(runner, step)

    monkeypatch.setattr(ModelRunner, "execute", watched)
    before = torch.get_num_threads()
    with LLM("demo", cpu_threads=2, batch_invariant=batch_invariant) as llm:
        weights = llm._core._executor._worker.num_weights  # type: ignore[union-attr, attr-defined]
        monkeypatch.setattr(worker_module, "ONE_THREAD", 4 * weights)
        seen.clear()
        llm.generate([[5] * 40], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert seen == expected
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
