"""Long sweeps, of which `make test` runs a few cases."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

RNG = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
"""Processes that share the tests make the same choice."""


def drawn(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """As many combinations of places on axes of these sizes as the longest has, in which every place comes up."""
    orders = [RNG.sample(range(size), size) for size in sizes]
    return {tuple(order[place % len(order)] for order in orders) for place in range(max(sizes))}


def cases(*axes: Collection[Any], say: Callable[[Any], str] = str) -> list[Any]:
    """All combinations of `axes`, of which as many run as the longest axis has values: every value comes up, in other
    company each time. The others are slow. `say`: what a value is called in the test's name."""
    chosen = drawn([len(axis) for axis in axes])

    def case(combination: tuple[tuple[int, Any], ...]) -> Any:
        places, values = zip(*combination, strict=True)
        marks = [] if places in chosen else [pytest.mark.slow]
        names = [say(value).removeprefix("torch.")[:40] for value in values]
        return pytest.param(*values, id="-".join(names), marks=marks)

    return [case(one) for one in itertools.product(*map(enumerate, axes))]


def sampled(names: Sequence[str], *axes: Collection[Any], say: Callable[[Any], str] = str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, cases(*axes, say=say))


def some_of(values: Collection[Any], count: int, say: Callable[[Any], str] = str) -> list[Any]:
    """All values, of which so many run, others each time. The rest are slow."""
    chosen = RNG.sample(range(len(values)), min(count, len(values)))
    return [
        pytest.param(value, id=say(value), marks=() if place in chosen else pytest.mark.slow)
        for place, value in enumerate(values)
    ]


def slow_but_for_a_sample(items: Sequence[pytest.Function]) -> None:
    """Have so many cases of each test run that every value of its parameters and of its fixtures' comes up, as
    `sampled` does of a test's own. The others are slow, as those that were so already stay."""
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            groups[item.nodeid.split("[")[0]].append(item)
    for group in groups.values():
        columns = [[repr(one.callspec.params[name]) for one in group] for name in group[0].callspec.params]
        axes = dict.fromkeys(tuple(map(list(dict.fromkeys(column)).index, column)) for column in columns)
        chosen = drawn([max(axis) + 1 for axis in axes])  # values that always come together are one axis
        for one, places in zip(group, zip(*axes, strict=True), strict=True):
            if places not in chosen:
                one.add_marker(pytest.mark.slow)
