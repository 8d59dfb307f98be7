"""Patterns with look-around and word boundaries: what is written in their place is found in the same texts."""

import itertools
import random
import re

import pytest

from headrace.structured_outputs.difference import as_python
from headrace.structured_outputs.look_around import LOOKS, without_look_around
from headrace.structured_outputs.pattern import TOKEN
from tests.structured_outputs.test_difference import finds

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("a-", repeat=length)]


def random_pattern(rng: random.Random, depth: int = 4) -> str:
    kind = rng.randint(0, 13)
    if depth == 0 or kind < 3:
        return rng.choice(["a", "-", "[a-]", "", "^", "$", r"\b", r"\B"])
    inner = random_pattern(rng, depth - 1)
    if kind < 6:
        return inner + random_pattern(rng, depth - 1)
    if kind < 8:
        return f"({inner}|{random_pattern(rng, depth - 1)})"
    if kind < 10:
        return f"(?:{inner}){rng.choice('*+?')}"
    if kind < 12:
        return f"(?{rng.choice('=!')}{inner})"
    return f"(?<{rng.choice('=!')}{rng.choice(['a', '-', 'a-', '[a-]a'])})"


def test_what_is_written_in_its_place_is_found_in_the_same_texts() -> None:
    seed = random.randrange(2**32)
    rng, read = random.Random(seed), 0
    for _ in range(150):
        pattern = random_pattern(rng) + random_pattern(rng)
        found = without_look_around(pattern)
        if found != pattern:
            read += 1
            assert not LOOKS & {*TOKEN.findall(found)}, (pattern, found)
            for text in TEXTS["\\B" in pattern :]:  # which Python, unlike others, does not find in an empty text
                assert (re.search(pattern, text) is not None) == finds(found, text), (pattern, found, text, seed)
    assert read > 30, seed


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        # pydantic's, of decimals
        (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)", ["12.30", "123", "-1"], ["", "-."]),
        # zod's, of durations and host names
        (
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            ["P1W", "P1DT2H", "PT5.5S"],
            ["P", "P1DT", "P1D2W", "PT"],
        ),
        (r"^(?!.*\bfoo\b).*$", ["bar", "food", "a_foo"], ["foo", "a foo b"]),
        (r"^.*(?<!\.tmp)$", ["a.txt", "tmp"], ["a.tmp", ".tmp"]),
        (r"(?<=^|,)\d+(?=,|$)", ["1", "a,12", "1,a"], ["a1", "1a", ""]),
        (r"^a(?=b)[a-z]+(?<!z)$", ["ab", "abc"], ["ac", "abz", "a"]),
        (r"\bcat\b", ["cat", "a cat.", "cat-"], ["cats", "a_cat", ""]),
    ],
)
def test_patterns_of_users(pattern: str, taken: list[str], refused: list[str]) -> None:
    found = without_look_around(pattern)
    assert found != pattern
    assert [text for text in taken + refused if finds(found, text)] == taken


def test_a_letter_that_only_some_dialects_have_in_words_is_at_no_boundary() -> None:
    assert [text for text in ("a-", "aé", "é-", "é", "a") if finds(without_look_around(r"a\b|\b-"), text)] == [
        "a-",
        "a",
    ]


@pytest.mark.parametrize("pattern", ["a", r"(a)\1(?=b)", "(?=a", "(?i)a(?=b)", "(?<=(?=a))b", "(?=a)*", "(?=a)(?!a)"])
def test_what_has_none_or_is_not_read_stays(pattern: str) -> None:
    assert without_look_around(pattern) == pattern


def test_the_time_is_bounded() -> None:
    hard = "(?=(a|b)*a(a|b){9})(?!(a|b)*b(a|b){8})" * 3 + "(a?){40}"
    assert without_look_around(hard) == hard
    assert as_python(without_look_around("a(?=b)"))
