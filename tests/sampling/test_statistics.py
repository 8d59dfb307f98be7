"""Random numbers come from (seed, position, token id) alone; drawn tokens follow the distribution and are independent
from seed to seed and from position to position. Everything is seeded: these tests give the same answer every time."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.sampled import sampled

from .oracle import Bench, Case, SamplingParams, softmax

DEVIATIONS = 4.5
"""Chance of a sound generator to fail one check: about 1 in 300,000."""


def draw(logits: torch.Tensor, seeds: list[int], positions: int, params: SamplingParams | None = None) -> np.ndarray:
    """# [len(seeds), positions]: the token of each seed at each position, all from the same logits"""
    bench = Bench(logits.shape[0], max_rows=len(seeds))
    bench.add({row: Case(params or SamplingParams(), [0], seed=seed) for row, seed in enumerate(seeds)})
    rows = torch.arange(len(seeds)).repeat_interleave(positions)
    where = torch.arange(1, positions + 1).repeat(len(seeds))
    result = bench.sampler.sample(logits.expand(len(rows), -1), rows, where, bench.token_table)
    return result.token_ids.view(len(seeds), positions).numpy()


def surprise(observed: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which a chi-square statistic exceeds its mean (Wilson-Hilferty)."""
    freedom = observed.size - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


UNIFORM = torch.zeros(16)
SKEWED = torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
SEEDS = {
    "consecutive": range(200),
    "around 2^32": range(2**32 - 100, 2**32 + 100),
    "multiples of 2^32": range(0, 200 << 32, 1 << 32),
    "negative": range(-(2**63), -(2**63) + 200),
}


@sampled(("name", "logits"), SEEDS, [UNIFORM, SKEWED])
def test_tokens_follow_the_distribution(name: str, logits: torch.Tensor) -> None:
    tokens = draw(logits, list(SEEDS[name]), 250)
    expected = softmax(logits.numpy()) * tokens.size
    observed = np.bincount(tokens.reshape(-1), minlength=len(logits))
    assert surprise(observed, expected) < DEVIATIONS


@sampled(("name", "shift"), SEEDS, [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (0, 64), (3, 7)])
def test_draws_are_independent_across_seeds_and_positions(name: str, shift: tuple[int, int]) -> None:
    """shift (s, p): pairs of tokens at (seed, position) and (seed + s, position + p)."""
    logits = torch.tensor([1.0, 0.5, 0.0, 0.0, -0.5])
    tokens = draw(logits, list(SEEDS[name]), 250)
    s, p = shift
    first = tokens[: tokens.shape[0] - s, max(0, -p) : tokens.shape[1] - max(0, p)]
    second = tokens[s:, max(0, p) : tokens.shape[1] - max(0, -p)]
    pairs = np.bincount((first * 5 + second).reshape(-1), minlength=25)
    probs = softmax(logits.numpy())
    assert surprise(pairs, np.outer(probs, probs).reshape(-1) * first.size) < DEVIATIONS


def test_filtered_draws_follow_the_renormalized_distribution() -> None:
    params = SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05)
    tokens = draw(SKEWED, list(range(200)), 250, params)
    probs = softmax(SKEWED.numpy() / 1.5)
    kept = probs[:6] / probs[:6].sum()
    kept = kept[: int((np.cumsum(kept) < 0.9).sum()) + 1]
    observed = np.bincount(tokens.reshape(-1), minlength=9)
    assert observed[len(kept) :].sum() == 0
    assert surprise(observed[: len(kept)], kept / kept.sum() * tokens.size) < DEVIATIONS


def test_rare_tokens_come_as_often_as_they_should() -> None:
    """The tail of the noise: one token of probability about 2^-13 among many draws."""
    logits = torch.tensor([9.0, 0.0])
    tokens = draw(logits, list(range(1000)), 1000)
    expected = softmax(logits.numpy())[1] * tokens.size
    assert abs(int(tokens.sum()) - expected) < DEVIATIONS * math.sqrt(expected)


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    logits = torch.zeros(1000)
    tokens = draw(logits, [5, 5, 6, 5 - 2**63], 40)
    assert (tokens[0] == tokens[1]).all()
    assert (tokens[0] == tokens[2]).sum() <= 2
    assert (tokens[0] == tokens[3]).sum() <= 2, "all 64 bits of the seed count"
    assert len(set(tokens[0].tolist())) >= 36, "and so does the position"


def test_what_a_token_draws_does_not_depend_on_the_vocabulary_beyond_it() -> None:
    short = draw(torch.zeros(50), list(range(20)), 20)
    long = draw(torch.cat([torch.zeros(50), torch.full((77,), -1e9)]), list(range(20)), 20)
    assert (short == long).all()
