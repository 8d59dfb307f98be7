"""Patterns with anchors anywhere: they are found in the same texts when the anchors stand around the whole."""

import itertools
import random
import re

import pytest

from headrace.structured_outputs.pattern import anchored

TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length)]


def random_pattern(rng: random.Random, depth: int = 4) -> str:
    kind = rng.randint(0, 9)
    if depth == 0 or kind < 3:
        return rng.choice(["a", "b", "[ab]", "", "^", "$"])
    inner = random_pattern(rng, depth - 1)
    if kind < 6:
        return inner + random_pattern(rng, depth - 1)
    if kind < 8:
        return f"({inner}|{random_pattern(rng, depth - 1)})"
    return f"(?:{inner}){rng.choice('*+?')}"


def test_anchors_move_to_the_ends_of_a_pattern() -> None:
    seed = random.randrange(2**32)
    rng, moved = random.Random(seed), 0
    for _ in range(1500):
        pattern = f"{random_pattern(rng)}|{random_pattern(rng)}"
        found = anchored(pattern)
        if found != pattern:
            moved += 1
            assert not re.search(r"[$^]", found[1:-1]), (pattern, found, seed)
            for text in TEXTS:
                assert bool(re.search(pattern, text)) == bool(re.search(found, text)), (pattern, found, text, seed)
    assert moved > 300, seed


@pytest.mark.parametrize(
    "pattern", ["^a$", "a", r"[$^]\$\^", "a^b", "(?i)a$|b", "(a$){2}", "(" * 70 + "a$|b" + ")" * 70]
)
def test_what_has_none_within_or_is_not_read_stays(pattern: str) -> None:
    assert anchored(pattern) == pattern


def test_a_pattern_does_not_grow_without_bound() -> None:
    deep = "(^|a$)"
    for _ in range(30):
        deep = f"(?:^a|{deep}|b$)*"
    assert anchored(deep) == deep
