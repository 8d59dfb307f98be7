"""The whole step: mixed, ragged batches against per-request oracles; rows that come and go; neighbours that must not
matter; logits that no token can be drawn from."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headrace.sampling.sampler import Sampler, SampleResult
from headrace.sampling.state import Feature
from tests.sampled import sampled

from .oracle import Bench, Case, SamplingParams, forbidden_tokens, invalid, kept_tokens, processed_logits, random_case

GREEDY = SamplingParams(temperature=0.0)


def check(bench: Bench, rows: list[int], logits: torch.Tensor, result: SampleResult) -> int:
    """Every row's token is the oracle's (greedy) or one that the oracle keeps (random). Returns how many rows had a
    single possible token."""
    certain = 0
    assert not invalid(result).any()
    for i, row in enumerate(rows):
        case, token = bench.cases[row], result.token_ids[i].item()
        expected = processed_logits(case, logits[i].float().numpy())
        if case.params.is_greedy:
            assert expected[token] == pytest.approx(expected.max(), rel=1e-5, abs=1e-5)
            certain += 1
        else:
            kept, close = kept_tokens(case.params, expected)
            assert token in kept | close
            certain += len(kept | close) == 1
    return certain


@sampled(("seed", "vocab_size"), range(4), [33, 64])
def test_ragged_batches_of_mixed_requests_equal_the_oracle(seed: int, vocab_size: int) -> None:
    """Requests come, run a few steps in batches of changing order, and go; rows are reused."""
    rng = np.random.default_rng(seed)
    bench = Bench(vocab_size, max_rows=24)
    certain = 0
    for _ in range(6):
        free = [row for row in range(24) if row not in bench.cases]
        bench.add({row: random_case(rng, vocab_size) for row in free if rng.random() < 0.7})
        for _ in range(2):
            rows = [int(row) for row in rng.permutation(list(bench.cases)) if rng.random() < 0.8]
            logits = torch.from_numpy(rng.normal(size=(len(rows), vocab_size)) * 3).float()
            result = bench.sample(logits, rows)
            certain += check(bench, rows, logits, result)
            bench.append(rows, result.token_ids.tolist())
        bench.remove([row for row in list(bench.cases) if rng.random() < 0.4 or len(bench.cases[row].output) > 30])
    assert certain > 20


def alone_and_among(
    case: Case, neighbours: list[Case], logits: torch.Tensor, place: int, row: int
) -> tuple[int, int, SampleResult, SampleResult]:
    """Token of `case` alone in row 0 of a fresh engine, and in `row` of another at `place` of a batch."""
    vocab_size = logits.shape[1]
    alone, among = Bench(vocab_size), Bench(vocab_size)
    alone.add({0: case})
    others = [r for r in range(32) if r != row]
    among.add({row: case, **dict(zip(others, neighbours, strict=False))})
    rows = others[: len(neighbours)]
    rows.insert(place, row)
    by_itself = alone.sample(logits[place : place + 1], [0])
    together = among.sample(logits, rows)
    return by_itself.token_ids[0].item(), together.token_ids[place].item(), by_itself, together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gives_the_same_token_alone_and_among_31_others(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(7)
    for attempt in range(16):
        case = random_case(rng, 50)
        if attempt % 4 == 0:  # a request that asks for nothing, whose neighbours ask for everything
            case = replace(case, params=GREEDY if attempt % 8 else SamplingParams(), bad_words=[], stop_token_ids=[])
        neighbours = [random_case(rng, 50) for _ in range(31)]
        logits = (torch.randn(32, 50) * 2).to(dtype)
        place, row = int(rng.integers(32)), int(rng.integers(32))
        a, b, by_itself, together = alone_and_among(case, neighbours, logits, place, row)
        assert a == b
        if case.params.logprobs is not None:
            assert by_itself.logprobs is not None
            assert together.logprobs is not None
            count = 1 + case.params.logprobs
            for mine, ours in zip(by_itself.logprobs[:2], together.logprobs[:2], strict=True):
                assert torch.equal(mine[0, :count], ours[place, :count])


def test_greedy_takes_the_lowest_of_equal_tokens_whoever_is_beside_it() -> None:
    logits = torch.zeros(3, 70)
    logits[:, [11, 12, 69]] = 5.0
    for neighbour in (GREEDY, SamplingParams(), SamplingParams(top_p=0.5, top_k=2), SamplingParams(min_tokens=1)):
        bench = Bench(vocab_size=70)
        bench.add({0: Case(GREEDY, [1]), 1: Case(neighbour, [1], [], [2]), 2: Case(GREEDY, [1])})
        ids = bench.sample(logits, [0, 1, 2]).token_ids.tolist()
        assert ids[0] == ids[2] == 11


def test_a_reused_row_keeps_nothing_of_its_last_owner() -> None:
    everything = SamplingParams(
        temperature=0.0,
        presence_penalty=2.0,
        repetition_penalty=5.0,
        logit_bias={3: 50.0},
        allowed_token_ids=[1, 2, 3],
        min_tokens=5,
        logprobs=4,
        max_tokens=9,
    )
    bench = Bench(vocab_size=10)
    bench.add({0: Case(everything, [9, 9], [3], [7], [[9], [3, 8]])})
    logits = torch.arange(10.0)[None]
    assert bench.sample(logits, [0]).token_ids.tolist() == [3]
    bench.remove([0])
    assert bench.state.features == Feature.NONE
    # A neighbour keeps every stage running, so that stale entries of row 0 would show.
    bench.add({0: Case(GREEDY, [9, 9]), 1: Case(everything, [9, 9], [3], [7], [[9], [3, 8]])})
    logits = logits.repeat(2, 1)
    assert bench.sample(logits, [0, 1]).token_ids.tolist() == [9, 3]
    bench.add({1: Case(GREEDY, [9])})  # a row that is filled anew without having been removed
    assert bench.state.features == Feature.NONE
    assert bench.state.max_logprobs is None
    assert bench.sample(logits, [1, 0]).token_ids.tolist() == [9, 9]


def test_features_count_live_rows_and_ignore_settings_without_effect() -> None:
    bench = Bench(vocab_size=10)
    idle = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.0, min_tokens=3)
    bench.add({0: Case(idle, [1])})
    assert bench.state.features == Feature.NONE, "greedy needs no filters; min_tokens forbids nothing without stop ids"
    bench.add({1: Case(SamplingParams(top_k=10), [1]), 2: Case(SamplingParams(logprobs=2), [1])})
    assert bench.state.features == Feature.RANDOM | Feature.LOGPROBS
    bench.add({3: Case(SamplingParams(min_p=0.1, logprobs=5), [1])})
    assert (bench.state.features, bench.state.max_logprobs) == (
        Feature.RANDOM | Feature.LOGPROBS | Feature.FILTERS,
        5,
    )
    bench.remove([3])
    assert (bench.state.features, bench.state.max_logprobs) == (Feature.RANDOM | Feature.LOGPROBS, 2)
    bench.state.remove([1, 2, 9])
    assert bench.state.features == Feature.NONE


def test_logprobs_are_of_the_raw_distribution_and_logits_stay_untouched() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=1, logprobs=3, logit_bias={2: 100.0}, presence_penalty=1.0, allowed_token_ids=[2, 3]
    )
    bench = Bench(vocab_size=12)
    bench.add({0: Case(params, [1], [2]), 1: Case(GREEDY, [1])})
    logits = torch.randn(2, 12)
    before = logits.clone()
    result = bench.sample(logits, [0, 1])
    assert torch.equal(logits, before)
    assert result.token_ids[0] == 2
    assert result.logprobs is not None
    raw = before.log_softmax(dim=1)
    torch.testing.assert_close(result.logprobs.logprobs[0, 0], raw[0, 2])
    assert result.logprobs.token_ids[0, 1:].tolist() == raw[0].topk(3).indices.tolist()
    assert result.logprobs.ranks[0] == 1 + int((raw[0] > raw[0, 2]).sum())
    bench.remove([0])
    assert bench.sample(logits[:1], [1]).logprobs is None


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, top_k=3, min_p=0.1)])
@pytest.mark.parametrize("bad", ["one NaN", "all NaN", "nothing allowed"])
def test_rows_without_usable_logits_are_told_and_harm_nobody(params: SamplingParams, bad: str) -> None:
    bench = Bench(vocab_size=20)
    logits = torch.randn(3, 20)
    victim = msgspec.structs.replace(params, logprobs=2)
    if bad == "nothing allowed":
        victim = msgspec.structs.replace(victim, allowed_token_ids=[4], min_tokens=1)
    else:
        logits[1, 5 if bad == "one NaN" else slice(None)] = math.nan
    good = {0: Case(params, [1], [], [], seed=3), 2: Case(params, [1], [], [], seed=4)}
    bench.add({**good, 1: Case(victim, [1], [], [4])})
    result = bench.sample(logits, [0, 1, 2])
    assert invalid(result).tolist() == [False, True, False]
    assert result.raw_best.isfinite().tolist() == [True, bad == "nothing allowed", True]
    assert 0 <= result.token_ids[1].item() < 20
    healthy = Bench(vocab_size=20)
    healthy.add(good)
    assert healthy.sample(logits[[0, 2]], [0, 2]).token_ids.tolist() == result.token_ids[[0, 2]].tolist()


def test_an_invalid_row_gets_a_valid_id_whatever_the_draw_makes_of_it() -> None:
    bench = Bench(vocab_size=20)
    bench.add({0: Case(SamplingParams(), [1]), 1: Case(SamplingParams(), [1])})
    logits = torch.randn(2, 20)
    logits[0, 3] = math.nan
    kernels = replace(bench.sampler.kernels, gumbel_argmax=lambda scores, *_: torch.tensor([1023, 7]))
    ids = (
        Sampler(bench.state, kernels)
        .sample(logits, torch.tensor([0, 1]), torch.tensor([1, 1]), bench.token_table)
        .token_ids
    )
    assert 0 <= ids[0] < 20
    assert ids[1] == 7


def test_infinite_logits_win_and_are_told() -> None:
    bench = Bench(vocab_size=6)
    penalized = SamplingParams(presence_penalty=1.0, repetition_penalty=2.0, min_tokens=1)
    params = [GREEDY, SamplingParams(), penalized, SamplingParams(top_p=0.5, top_k=3, min_p=0.2)]
    bench.add({row: Case(p, [4], [4], [5]) for row, p in enumerate(params)})
    logits = torch.randn(4, 6)
    logits[:, 4] = math.inf
    result = bench.sample(logits, [0, 1, 2, 3])
    assert result.token_ids.tolist() == [4] * 4
    assert invalid(result).all()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 2e-5}])
def test_the_narrowest_settings_choose_the_best_token(params: dict[str, float]) -> None:
    bench = Bench(vocab_size=40)
    bench.add({row: Case(SamplingParams(**params), [1], seed=row) for row in range(32)})
    logits = torch.stack([torch.randperm(40) for _ in range(32)]).float()
    assert bench.sample(logits, list(range(32))).token_ids.tolist() == logits.argmax(dim=1).tolist()


def test_penalties_need_no_more_of_the_token_table_than_the_host_says() -> None:
    rng = np.random.default_rng(3)
    bench = Bench(vocab_size=30)
    bench.add({row: random_case(rng, 30, greedy=True) for row in range(20)})
    logits, rows = torch.randn(20, 30), list(range(20))
    longest = max(len(case.tokens) for case in bench.cases.values())
    bounded = bench.sample(logits, rows, max_num_tokens=longest)
    assert bounded.token_ids.tolist() == bench.sample(logits, rows).token_ids.tolist()


def test_a_vocabulary_of_real_size() -> None:
    vocab_size = 128256
    bench = Bench(vocab_size, max_rows=4)
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=50, presence_penalty=0.5, logprobs=20, allowed_token_ids=[5, 128255, 70000]
    )
    bench.add(
        {
            0: Case(GREEDY, [1], [2]),
            1: Case(params, [1, 128255], [2], seed=9),
            2: Case(SamplingParams(top_p=0.8, logit_bias={128255: 80.0}), [1]),
            3: Case(SamplingParams(min_tokens=2, bad_words=["x"]), [1], [], [128255], [[128254], [1, 77]]),
        }
    )
    logits = torch.randn(4, vocab_size, dtype=torch.bfloat16)
    result = bench.sample(logits, [0, 1, 2, 3])
    assert result.token_ids[0] == logits[0].float().argmax()
    assert result.token_ids[1] in (5, 128255, 70000)
    assert result.token_ids[2] == 128255
    assert result.token_ids[3].item() not in forbidden_tokens(bench.cases[3], vocab_size)
    assert result.logprobs is not None
    assert result.logprobs.token_ids.shape == (4, 21)
