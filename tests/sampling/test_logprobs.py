"""Logprobs, alternatives and ranks against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.sampling import logprobs
from headrace.sampling.logprobs import gather_logprobs
from tests.sampled import sampled


def check(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> None:
    result = gather_logprobs(logits, token_ids, k)
    assert result.token_ids.shape == result.logprobs.shape == (logits.shape[0], 1 + min(k, logits.shape[1]))
    for i, (row, token) in enumerate(zip(logits.double().numpy(), token_ids.tolist(), strict=True)):
        best = np.argsort(-row, kind="stable")[:k].tolist()  # stable: of equals the lowest id first
        assert result.token_ids[i].tolist() == [token, *best]
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        np.testing.assert_allclose(result.logprobs[i].numpy(), expected[[token, *best]], rtol=1e-5, atol=2e-6)
        assert result.ranks[i].item() == 1 + sum(value > row[token] for value in row)


@sampled(("dtype", "k"), [torch.float32, torch.bfloat16, torch.float16], [0, 1, 5, 20])
def test_random_logits(dtype: torch.dtype, k: int) -> None:
    logits = (torch.randn(9, 203) * 3).to(dtype)
    check(logits, torch.randint(203, (9,)), k)


def test_ties_are_listed_by_id_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, -1.0, -1.0, 2.0]])
    check(logits, torch.tensor([2]), 7)
    assert gather_logprobs(logits, torch.tensor([7]), 2).token_ids.tolist() == [[7, 1, 2]]
    assert gather_logprobs(logits, torch.tensor([7]), 2).ranks.tolist() == [1]
    check(torch.zeros(2, 50), torch.tensor([49, 0]), 20)


def test_impossible_tokens_have_minus_infinity() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    result = gather_logprobs(logits, torch.tensor([1]), 3)
    assert result.token_ids.tolist() == [[1, 0, 2, 1]]
    torch.testing.assert_close(result.logprobs, torch.tensor([[-np.inf, -np.log(2), -np.log(2), -np.inf]]).float())
    assert result.ranks.tolist() == [3]


@pytest.mark.parametrize("chunk", [1, 130, 1 << 20])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    logits = torch.randn(7, 61)
    check(logits, torch.randint(61, (7,)), 4)


def test_prompt_logprobs_scores_the_tokens_that_follow() -> None:
    logits, targets = torch.randn(5, 40), torch.randint(40, (5,))
    result = gather_logprobs(logits, targets, 3)
    expected = logits.log_softmax(dim=1).gather(1, targets[:, None])
    torch.testing.assert_close(result.logprobs[:, :1], expected)
    assert result.token_ids[:, 0].tolist() == targets.tolist()
    empty = gather_logprobs(logits[:0], targets[:0], 3)
    assert empty.token_ids.shape == empty.logprobs.shape == (0, 4)


def test_k_beyond_the_vocabulary_is_cut() -> None:
    check(torch.randn(2, 3), torch.tensor([0, 2]), 20)
