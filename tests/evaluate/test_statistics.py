"""Standard errors and paired tests, against textbooks and Python's own statistics."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from headrace.evaluate.statistics import (
    interval_of_proportions,
    mcnemar,
    mean_stderr,
    pooled_stderr,
    ratio_stderr,
)


def test_mcnemar_of_agresti() -> None:
    """Approval of a president in two surveys of the same 1,600 people (Agresti, Categorical Data Analysis, 1990, p.
    350): 150 approved in the first alone, 86 in the second alone. R's mcnemar.test(correct=FALSE) gives the p."""
    test = mcnemar(150, 86)
    assert (test.first_only, test.second_only) == (150, 86)
    assert test.chi_square == pytest.approx(17.3559, abs=5e-5)
    assert test.chi_square_p == pytest.approx(3.099e-05, rel=2e-4)
    assert test.corrected_chi_square == pytest.approx(63**2 / 236)
    low, high = interval_of_proportions(150, 86, 1600)
    assert (round(low, 2), round(high, 2)) == (-0.06, -0.02)  # Agresti's interval of the same change


@pytest.mark.parametrize(
    ("flips", "exact", "plain", "plain_p", "corrected", "corrected_p"),
    [
        ((1, 7), 0.070, 4.50, 0.034, 3.12, 0.077),
        ((6, 16), 0.052, 4.55, 0.033, 3.68, 0.055),
    ],
)
def test_mcnemar_of_few_flips(
    flips: tuple[int, int], exact: float, plain: float, plain_p: float, corrected: float, corrected_p: float
) -> None:
    """The children with airways that react too much, before and after a transplantation, of Fagerland, Lydersen and
    Laake (BMC Med. Res. Methodol. 13:91, 2013), and the second example of Wikipedia's "McNemar's test"."""
    test = mcnemar(*flips)
    assert round(test.exact_p, 3) == exact
    assert (round(test.chi_square, 2), round(test.chi_square_p, 3)) == (plain, plain_p)
    assert (round(test.corrected_chi_square, 2), round(test.corrected_p, 3)) == (corrected, corrected_p)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 1), (7, 7), (0, 400), (520, 480)])
def test_exact_p_is_the_binomial_distributions(first: int, second: int) -> None:
    flips, fewer = first + second, min(first, second)
    tail = sum(math.comb(flips, k) for k in range(fewer + 1))
    assert mcnemar(first, second).exact_p == pytest.approx(min(1.0, tail / 2 ** (flips - 1)) if flips else 1.0)
    assert mcnemar(first, second).exact_p == mcnemar(second, first).exact_p


def test_interval_without_flips_is_not_empty() -> None:
    low, high = interval_of_proportions(0, 0, 98)
    assert low == -high
    assert high == pytest.approx(1.96 * math.sqrt(0.02 / 100), rel=1e-3)
    assert interval_of_proportions(0, 1, 1)[1] == 1.0  # never beyond what is possible


def test_mean_and_its_error() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean, stderr = mean_stderr(values)
    assert mean == 0.6
    assert stderr == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert mean_stderr([1.0]) == (1.0, None)


def test_pooled_error_is_that_of_groups_of_equal_means() -> None:
    groups = [[1.0, 0.0] * 10, [1.0, 1.0, 0.0, 0.0] * 10]
    stderrs = [mean_stderr(group)[1] for group in groups]
    variance = (19 * statistics.variance(groups[0]) + 39 * statistics.variance(groups[1])) / 58
    assert pooled_stderr(stderrs, [20, 40]) == pytest.approx(math.sqrt(variance / 60))
    assert pooled_stderr([None, None], [1, 1]) is None


def test_ratio_of_items_of_equal_size_is_a_mean() -> None:
    values = [random.Random(0).gauss(0, 1) for _ in range(40)]
    ratio, stderr = ratio_stderr([4 * value for value in values], [4] * 40)
    mean, expected = mean_stderr(values)
    assert (ratio, stderr) == (pytest.approx(mean), pytest.approx(expected))
    assert ratio_stderr([3.0], [2.0]) == (1.5, None)


def test_ratio_error_is_what_many_draws_show() -> None:
    """Items of unlike size: the mean of the estimated errors is near the spread of the estimates."""
    rng = random.Random(1)
    ratios, errors = [], []
    for _ in range(120):
        sizes = [rng.randint(5, 50) for _ in range(60)]
        ratio, stderr = ratio_stderr([sum(rng.gauss(2, 1) for _ in range(size)) for size in sizes], sizes)
        assert stderr is not None
        ratios.append(ratio)
        errors.append(stderr)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(ratios), rel=0.2)  # of one seed
