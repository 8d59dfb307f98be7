"""Allowed-token masks and penalties against one-token-at-a-time oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.runner.step_parts import halves
from headrace.sampling import processors
from headrace.sampling.masks import StepMasks, step_masks
from headrace.sampling.processors import apply_penalties_
from headrace.step import Masks, SchedulerOutput

from .oracle import Bench, Case, SamplingParams, forbidden_tokens, processed_logits


def penalty(repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> SamplingParams:
    return SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)


def penalized(bench: Bench, rows: list[int], logits: torch.Tensor) -> torch.Tensor:
    params = bench.state.gather(torch.tensor(rows))
    result = logits.clone()
    apply_penalties_(
        result,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        bench.token_table,
        torch.tensor(rows),
        torch.tensor([len(bench.cases[row].tokens) for row in rows]),
        params.num_prompt_tokens,
    )
    return result


@pytest.mark.parametrize("chunk", [1, 150, 1 << 20])
def test_penalties_equal_the_oracle_in_ragged_batches(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "CHUNK_ELEMENTS", chunk)
    rng = np.random.default_rng(1)
    bench = Bench(vocab_size=37)
    settings = [penalty(1.7), penalty(0.5), penalty(frequency=0.9), penalty(presence=-1.1), penalty(1.3, 0.4, 0.8)]
    for row in range(15):
        prompt = rng.integers(37, size=rng.integers(1, 20)).tolist()
        output = rng.integers(37, size=rng.integers(0, 30)).tolist()
        bench.add({row: Case(settings[row % 5], prompt, output)})
    rows = rng.permutation(15).tolist()
    logits = torch.randn(15, 37) * 4
    result = penalized(bench, rows, logits)
    for i, row in enumerate(rows):
        expected = processed_logits(bench.cases[row], logits[i].numpy())
        np.testing.assert_allclose(result[i].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_without_penalties_keeps_its_logits_bit_for_bit() -> None:
    bench = Bench(vocab_size=16)
    bench.add({0: Case(penalty(1.5, 1.0, 1.0), [1, 2], [3]), 1: Case(penalty(), [1, 2], [3, 3])})
    logits = torch.randn(2, 16) * 1e4
    logits[1, 0], logits[1, 3], logits[1, 5] = float("inf"), float("-inf"), -0.0
    result = penalized(bench, [0, 1], logits)
    assert torch.equal(result[1], logits[1])
    assert not torch.equal(result[0], logits[0])


def test_token_ids_beyond_the_vocabulary_are_passed_over() -> None:
    bench = Bench(vocab_size=8)
    bench.add({0: Case(penalty(2.0), [1, 8, 100], [7])})
    assert penalized(bench, [0], torch.ones(1, 8))[0].tolist() == [1, 0.5, 1, 1, 1, 1, 1, 0.5]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_allowed_token_ids_and_grammars_leave_what_both_allow(vocab_size: int) -> None:
    rng = np.random.default_rng()
    bench = Bench(vocab_size)
    for row in range(6):
        allowed = None if row % 3 == 2 else rng.integers(vocab_size, size=rng.integers(1, 40)).tolist()
        bench.add({row: Case(SamplingParams(allowed_token_ids=allowed, temperature=0.0), [0])})
    rows = [4, 2, 0, 5, 1, 3]
    logits = torch.randn(6, vocab_size)
    bits = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    lines = torch.tensor([0, -1, 2, 1, -1, 0])
    result = bench.sampler.sample(
        logits, torch.tensor(rows), torch.ones(6, dtype=torch.int64), bench.token_table,
        masks=StepMasks(torch.from_numpy(bits), lines),
    )  # fmt: skip
    for i, (row, line) in enumerate(zip(rows, lines.tolist(), strict=True)):
        left = set(range(vocab_size)) - forbidden_tokens(bench.cases[row], vocab_size)
        left = {t for t in left if line < 0 or bits[line, t // 32] >> (t % 32) & 1}
        assert result.best[i] == max((logits[i, t].item() for t in left), default=float("-inf"))
        assert not left or result.token_ids[i].item() in left


def test_masks_alone_leave_the_logits_in_their_type() -> None:
    bench = Bench(64)
    bench.add({row: Case(SamplingParams(temperature=0.0), [0]) for row in range(2)})
    logits = torch.randn(2, 64).bfloat16()
    masks = StepMasks(torch.tensor([[1 << 7, 1 << 3]], dtype=torch.int32), torch.tensor([-1, 0]))
    args = torch.arange(2), torch.ones(2, dtype=torch.int64), bench.token_table
    before = logits.clone()
    result = bench.sampler.sample(logits, *args, masks=masks)
    assert torch.equal(logits, before)
    assert result.best.dtype == torch.bfloat16
    assert result.token_ids[0] == logits[0].float().argmax()
    assert result.token_ids[1] == max((7, 35), key=lambda token: logits[1, token].item())


def test_lines_of_a_step_and_of_its_parts() -> None:
    step = SchedulerOutput(
        3, rows=[4, 7, 2, 9], num_computed_tokens=[5, 6, 0, 0], num_scheduled_tokens=[3, 3, 4, 1],
        samples=[True, True, False, True], num_drafts=[2, 2, 0, 0], masked=True,
    )  # fmt: skip
    masks = Masks(3, {7: 0, 9: 3}, 2, memoryview(bytes(range(32))))
    found = step_masks(step, masks, torch.device("cpu"))
    assert found is not None
    assert found.lines.tolist() == [-1, -1, -1, 0, 1, 2, 3]
    assert found.bits.numpy().tobytes() == masks.bits
    without = step_masks(step.without_drafts(), masks, torch.device("cpu"))
    assert without is not None
    assert without.lines.tolist() == [-1, 0, 3]
    lines: list[int] = []
    for part in halves(step.without_drafts()) or ():
        of_part = step_masks(part, masks, torch.device("cpu"))
        lines += [-1] * sum(part.samples) if of_part is None else of_part.lines.tolist()
    assert lines == [-1, 0, 3]
    assert step_masks(step, Masks(3), torch.device("cpu")) is None


def test_masks_take_no_memory_until_one_is_asked_for() -> None:
    bench = Bench(vocab_size=64)
    bench.add({0: Case(SamplingParams(), [0])})
    assert bench.state.allowed_masks is None
    bench.add({1: Case(SamplingParams(allowed_token_ids=[3, 64, 999]), [0])})
    assert bench.state.allowed_masks is not None
    assert bench.state.allowed_masks[1].tolist() == [8, 0]
