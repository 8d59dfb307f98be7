"""Cuts a text's tokens into windows, so that each token is scored once, and sums what a model says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Holds what a model is shown at once: `ids`, of which the last `num_scored` count."""

    ids: list[int]
    num_scored: int


def windows(ids: Sequence[int], prefix: int, length: int) -> Iterator[Window]:
    """Yield the windows of a text, of at most `length` scored tokens and one before them, as lm_eval's rolling
    likelihood does: `prefix` (BOS, else EOS) stands before the first token. The last window reaches back, so that its
    few tokens have as much context as others."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    whole = [prefix, *ids]
    for start in range(0, len(ids), length):
        end = min(start + length, len(ids))
        yield Window(whole[max(0, end - length) : end + 1], end - start)


@dataclass(frozen=True)
class Likelihood:
    """Holds the log-likelihood (natural logarithm) of a text, and its size in three units."""

    loglikelihood: float
    tokens: int
    words: int
    bytes: int

    @classmethod
    def of(cls, text: str, logprobs: Sequence[float]) -> Likelihood:
        """Sum the log-probabilities of all tokens of `text`."""
        return cls(sum(logprobs), len(logprobs), len(re.split(r"\s+", text)), len(text.encode()))
