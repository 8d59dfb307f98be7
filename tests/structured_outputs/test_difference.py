"""Patterns of the texts in which one pattern is found and another is not."""

import random
import re

import pytest

from headrace.structured_outputs.difference import as_python, difference, intersection, regions, without_look_ahead
from headrace.structured_outputs.pattern import Unreadable
from tests.structured_outputs.test_pattern import TEXTS, random_pattern


def finds(pattern: str, text: str) -> bool:
    """Whether a pattern of whole texts, with characters as `\\u{61}`, takes a text."""
    return re.fullmatch(as_python(pattern).removeprefix("^").removesuffix("$"), text) is not None


def test_differences_and_intersections_are_exact() -> None:
    seed = random.randrange(2**32)
    rng, read = random.Random(seed), 0
    for _ in range(250):
        found, other = random_pattern(rng), random_pattern(rng, 3)
        try:
            pattern, both = difference(found, other), intersection(found, other)
        except Unreadable:
            continue
        read += 1
        for text in TEXTS:
            taken, shared = re.search(found, text) is not None, re.search(other, text) is not None
            told = (found, other, pattern, both, text, seed)
            assert (taken and not shared) == (pattern is not None and finds(pattern, text)), told
            assert (taken and shared) == (both is not None and finds(both, text)), told
    assert read > 50, seed


def test_each_text_is_in_the_region_of_the_patterns_that_find_it() -> None:
    patterns = ["^a", "b$", "^[ab]{2}$"]
    found = regions(patterns)
    for text in TEXTS:
        wanted = tuple(place for place, pattern in enumerate(patterns) if re.search(pattern, text))
        assert [places for region, places in found if re.search(as_python(region), text)] == [wanted] * bool(wanted)


@pytest.mark.parametrize("unfound", [r"\d", r"\w", r"\W", r"\s", r"\S", r"[^\d]", r"[^\W_]", ".", "^a$", r"[\s,]", "é"])
def test_what_dialects_read_in_two_ways_is_left_out(unfound: str) -> None:
    pattern = difference("", unfound)
    assert pattern is not None
    for text in (*"aZ_0 .-\n\té١\xa0\u2028\x1c\x85日", "", "a\n", "a a"):
        for flags in (0, re.ASCII)[: 1 if "S" in unfound else 2]:  # white space is no matter of ASCII in JSON schemas
            assert not (finds(pattern, text) and re.search(unfound, text, flags)), (text, pattern)


@pytest.mark.parametrize("pattern", ["(?!x)y", "^(?!x)y|z", "^a(?=x)y", "^a(?!x)y", r"^(?!(a)\1)y", "^(?!x", "^(?!)y"])
def test_other_look_ahead_stays(pattern: str) -> None:
    assert without_look_ahead(pattern) == [pattern]


@pytest.mark.parametrize("unfound", [r"\b", "(?i)a", "[a&&b]", "a{500}", "(a|b)*a(a|b){9}", "(", "[z-a]"])
def test_what_is_not_read_or_too_long_is_told(unfound: str) -> None:
    with pytest.raises(Unreadable):
        difference("", unfound)
