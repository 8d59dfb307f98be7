"""Computes standard errors, and compares two runs on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""The normal distribution has 95% of its mass within so many standard deviations."""


def mean_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error, from the sample's standard deviation; None for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def pooled_stderr(stderrs: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    """Return the standard error of a mean over groups, each weighted by its size: lm_eval's for groups of tasks."""
    freedom = sum(sizes) - len(sizes)
    if freedom < 1:
        return None
    squares = math.fsum((size - 1) * size * (error or 0.0) ** 2 for error, size in zip(stderrs, sizes, strict=True))
    return math.sqrt(squares / freedom / sum(sizes))


def ratio_stderr(sums: Sequence[float], sizes: Sequence[float]) -> tuple[float, float | None]:
    """Return the ratio of two totals and its standard error, for items of unlike size (the delta method)."""
    total = math.fsum(sizes)
    ratio = math.fsum(sums) / total
    count = len(sums)
    if count < 2:
        return ratio, None
    squares = math.fsum((one - ratio * size) ** 2 for one, size in zip(sums, sizes, strict=True))
    return ratio, math.sqrt(squares * count / (count - 1)) / total


@dataclass(frozen=True)
class McNemar:
    """Holds McNemar's test of two runs, which looks only at the items that one of them alone has right."""

    first_only: int
    second_only: int
    exact_p: float
    """Two-sided, of the binomial distribution."""
    chi_square: float
    """Without continuity correction, one degree of freedom."""
    chi_square_p: float
    corrected_chi_square: float
    corrected_p: float


def mcnemar(first_only: int, second_only: int) -> McNemar:
    """Test whether two runs are equally often right (McNemar, Psychometrika 1947; with Edwards's correction)."""
    flips, fewer = first_only + second_only, min(first_only, second_only)
    if flips == 0:
        return McNemar(0, 0, 1.0, 0.0, 1.0, 0.0, 1.0)
    whole = math.lgamma(flips + 1) - flips * math.log(2)
    terms = (math.exp(whole - math.lgamma(k + 1) - math.lgamma(flips - k + 1)) for k in range(fewer + 1))
    exact = min(1.0, 2 * math.fsum(terms))
    gap = abs(first_only - second_only)
    plain, corrected = gap**2 / flips, max(0, gap - 1) ** 2 / flips
    return McNemar(first_only, second_only, exact, plain, _tail(plain), corrected, _tail(corrected))


def _tail(chi_square: float) -> float:
    """Return how likely a chi-square of one degree of freedom is to be as large."""
    return math.erfc(math.sqrt(chi_square / 2))


def interval_of_proportions(first_only: int, second_only: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of how much more often the second run is right than the first: Wald's with one flip
    added each way (Bonett and Price, J. Educ. Behav. Stat. 2012), which is not empty where nothing flipped."""
    up, down = (second_only + 1) / (count + 2), (first_only + 1) / (count + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)
