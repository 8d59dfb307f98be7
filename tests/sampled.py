"""Long sweeps, of which `make test` runs a few cases."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

RNG = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
"""Processes that share the tests make the same choice."""


def cases(*axes: Collection[Any], say: Callable[[Any], str] = str) -> list[Any]:
    """All combinations of `axes`, of which as many run as the longest axis has values: every value comes up, in other
    company each time. The others are slow. `say`: what a value is called in the test's name."""
    drawn = [RNG.sample(range(len(axis)), len(axis)) for axis in axes]
    chosen = {tuple(order[place % len(order)] for order in drawn) for place in range(max(map(len, axes)))}

    def case(combination: tuple[tuple[int, Any], ...]) -> Any:
        places, values = zip(*combination, strict=True)
        marks = [] if places in chosen else [pytest.mark.slow]
        names = [say(value).removeprefix("torch.")[:40] for value in values]
        return pytest.param(*values, id="-".join(names), marks=marks)

    return [case(one) for one in itertools.product(*map(enumerate, axes))]


def sampled(names: Sequence[str], *axes: Collection[Any], say: Callable[[Any], str] = str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, cases(*axes, say=say))
