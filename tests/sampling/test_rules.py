"""logit_bias, min_tokens and bad_words: flat tables that touch only the rows and moments they are meant for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.sampling import rules

from .oracle import Bench, Case, SamplingParams, processed_logits, random_case


def apply(bench: Bench, rows: list[int], logits: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    num_tokens = torch.tensor([len(bench.cases[row].tokens) for row in rows])
    num_outputs = torch.tensor([len(bench.cases[row].output) for row in rows])
    bench.state.rules.apply_(result, torch.tensor(rows), num_tokens, num_outputs, bench.token_table)
    return result


def banned(bench: Bench, row: int) -> list[int]:
    result = apply(bench, [row], torch.zeros(1, bench.vocab_size))[0]
    return [token for token, value in enumerate(result.tolist()) if value == -math.inf]


def test_bad_words_forbid_the_last_token_after_their_prefix() -> None:
    bench = Bench(vocab_size=16)
    words = [[9], [1, 2, 3], [2, 5], [7, 1, 2, 6], [1, 2, 900], [900, 2, 8], [1, 1, 11]]
    bench.add({0: Case(SamplingParams(), [1], [], bad_words=words)})
    assert banned(bench, 0) == [9], "a single token is always forbidden; a prefix longer than the text never matches"
    bench.append([0], [2])
    assert banned(bench, 0) == [3, 5, 9], "the prefix may begin in the prompt"
    bench.append([0], [7])
    assert banned(bench, 0) == [9]
    bench.append([0], [1])
    bench.append([0], [2])
    assert banned(bench, 0) == [3, 5, 6, 9]


def test_what_an_earlier_owner_left_in_the_row_is_no_prefix() -> None:
    bench = Bench(vocab_size=16)
    bench.token_table[0, :4] = torch.tensor([5, 6, 7, 8])
    bench.add({0: Case(SamplingParams(), [5, 6], [], bad_words=[[7, 8, 1], [8, 2], [6, 3], [0, 5, 6, 4]])})
    assert banned(bench, 0) == [3]


def test_a_ban_beats_infinite_logits_and_biases() -> None:
    bench = Bench(vocab_size=4)
    params = SamplingParams(logit_bias={1: 100.0, 2: 1.0}, min_tokens=1)
    bench.add({0: Case(params, [0], [], stop_token_ids=[1], bad_words=[[1], [0, 1]])})
    result = apply(bench, [0], torch.tensor([[0.0, math.inf, math.inf, -math.inf]]))
    assert result.tolist() == [[0, -math.inf, math.inf, -math.inf]]


def test_rules_go_with_their_request() -> None:
    bench = Bench(vocab_size=8)
    bench.add({0: Case(SamplingParams(logit_bias={1: 3.0}), [0], [], bad_words=[[2], [0, 3]])})
    bench.add({1: Case(SamplingParams(), [0], [], bad_words=[[4]])})
    apply(bench, [0, 1], torch.zeros(2, 8))
    bench.remove([0])
    bench.add({0: Case(SamplingParams(), [0])})
    assert apply(bench, [1, 0], torch.zeros(2, 8))[1].tolist() == [0] * 8
    assert banned(bench, 1) == [4]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_random_batches_equal_the_oracle(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "CHUNK_ELEMENTS", chunk)
    rng = np.random.default_rng(chunk)
    bench = Bench(vocab_size=45)
    for row in range(16):
        case = random_case(rng, 45)
        kept = {name: getattr(case.params, name) for name in ("logit_bias", "min_tokens")}
        case.params = SamplingParams(**kept, max_tokens=64)
        bench.add({row: case})
    rows = rng.permutation(16)[:12].tolist()
    logits = torch.randn(12, 45)
    result = apply(bench, rows, logits)
    for i, row in enumerate(rows):
        expected = processed_logits(bench.cases[row], logits[i].numpy())
        np.testing.assert_allclose(result[i].numpy(), expected, rtol=1e-6, atol=1e-6)
