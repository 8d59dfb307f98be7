"""Allowed-token masks and penalties against one-token-at-a-time oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.sampling import processors
from headrace.sampling.processors import apply_allowed_mask_, apply_penalties_

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


def test_repetition_sees_the_prompt_and_the_others_only_the_output() -> None:
    bench = Bench(vocab_size=8)
    bench.add({0: Case(penalty(2.0), [1], [2]), 1: Case(penalty(1.0, 0.5, 0.25), [1], [2, 2])})
    result = penalized(bench, [0, 1], torch.ones(2, 8))
    assert result[0].tolist() == [1, 0.5, 0.5, 1, 1, 1, 1, 1]
    assert result[1].tolist() == [1, 1, -0.25, 1, 1, 1, 1, 1]


def test_token_ids_beyond_the_vocabulary_are_passed_over() -> None:
    bench = Bench(vocab_size=8)
    bench.add({0: Case(penalty(2.0), [1, 8, 100], [7])})
    assert penalized(bench, [0], torch.ones(1, 8))[0].tolist() == [1, 0.5, 1, 1, 1, 1, 1, 0.5]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_allowed_mask_forbids_exactly_the_rest(vocab_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "CHUNK_ELEMENTS", chunk)
    rng = np.random.default_rng(2)
    bench = Bench(vocab_size)
    for row in range(6):
        allowed = None if row % 3 == 2 else rng.integers(vocab_size, size=rng.integers(1, 40)).tolist()
        bench.add({row: Case(SamplingParams(allowed_token_ids=allowed), [0])})
    rows = [4, 2, 0, 5, 1, 3]
    logits = torch.randn(6, vocab_size)
    result = logits.clone()
    params = bench.state.gather(torch.tensor(rows))
    assert bench.state.allowed_masks is not None
    apply_allowed_mask_(result, bench.state.allowed_masks, params.has_allowed_mask, torch.tensor(rows))
    for i, row in enumerate(rows):
        forbidden = forbidden_tokens(bench.cases[row], vocab_size)
        expected = [float("-inf") if t in forbidden else logits[i, t].item() for t in range(vocab_size)]
        assert result[i].tolist() == expected


def test_masks_take_no_memory_until_one_is_asked_for() -> None:
    bench = Bench(vocab_size=64)
    bench.add({0: Case(SamplingParams(), [0])})
    assert bench.state.allowed_masks is None
    bench.add({1: Case(SamplingParams(allowed_token_ids=[3, 64, 999]), [0])})
    assert bench.state.allowed_masks is not None
    assert bench.state.allowed_masks[1].tolist() == [8, 0]
