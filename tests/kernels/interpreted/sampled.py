"""Long sweeps, of which `make test` runs a third."""

import itertools

import pytest


def sampled(names, *axes):
    """All combinations of `axes` as cases, of which those are slow whose places do not add up to a multiple of 3: every
    value comes up, and with three long axes every pair of values does."""

    def case(combination):
        places, values = zip(*combination, strict=True)
        marks = [pytest.mark.slow] if sum(places) % 3 else []
        return pytest.param(*values, id="-".join(str(value).removeprefix("torch.") for value in values), marks=marks)

    return pytest.mark.parametrize(names, [case(one) for one in itertools.product(*map(enumerate, axes))])
