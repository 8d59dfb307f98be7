"""Patterns of the texts in which one pattern is found and another is not."""

import random
import re

import pytest

from headrace.structured_outputs.difference import difference, without_look_ahead
from headrace.structured_outputs.pattern import Unreadable
from tests.structured_outputs.test_pattern import TEXTS, random_pattern


def finds(pattern: str, text: str) -> bool:
    """Whether a pattern of whole texts, with characters as `\\u{61}`, takes a text."""
    written = re.sub(r"\\u\{(\w+)\}", lambda match: f"\\U{int(match[1], 16):08x}", pattern)
    return re.fullmatch(written.removeprefix("^").removesuffix("$"), text) is not None


def test_differences_are_exact() -> None:
    seed = random.randrange(2**32)
    rng, read = random.Random(seed), 0
    for _ in range(400):
        found, unfound = random_pattern(rng), random_pattern(rng, 3)
        try:
            pattern = difference(found, unfound)
        except Unreadable:
            continue
        read += 1
        for text in TEXTS:
            wanted = re.search(found, text) is not None and re.search(unfound, text) is None
            assert wanted == (pattern is not None and finds(pattern, text)), (found, unfound, pattern, text, seed)
    assert read > 80, seed


@pytest.mark.parametrize("unfound", [r"\d", r"\w", r"\W", r"\s", r"\S", r"[^\d]", r"[^\W_]", ".", "^a$", r"[\s,]", "é"])
def test_what_dialects_read_in_two_ways_is_left_out(unfound: str) -> None:
    pattern = difference("", unfound)
    assert pattern is not None
    for text in (*"aZ_0 .-\n\té١\xa0\u2028\x1c\x85日", "", "a\n", "a a"):
        for flags in (0, re.ASCII)[: 1 if "S" in unfound else 2]:  # white space is no matter of ASCII in JSON schemas
            assert not (finds(pattern, text) and re.search(unfound, text, flags)), (text, pattern)


@pytest.mark.parametrize("pattern", ["(?!x)y", "^(?!x)y|z", "^(?=x)y", "^a(?!x)y", r"^(?!(a)\1)y", "^(?!x", "^(?!)y"])
def test_other_look_ahead_stays(pattern: str) -> None:
    assert without_look_ahead(pattern) == pattern


@pytest.mark.parametrize("unfound", [r"\b", "(?i)a", "[a&&b]", "a{500}", "(a|b)*a(a|b){9}", "(", "[z-a]"])
def test_what_is_not_read_or_too_long_is_told(unfound: str) -> None:
    with pytest.raises(Unreadable):
        difference("", unfound)
