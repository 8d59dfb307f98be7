"""Python literals as JSON."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

import pytest

from headrace.parsers.literals import whole_literal


def random_literal(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return rng.choice([True, False, None, rng.randint(-(10**12), 10**12), rng.uniform(-10, 10)])
    if kind < 5:
        return "".join(rng.choices("ab \n\t\r'\"\\{}[](),:=\0é🎉\x07", k=rng.randrange(12)))
    items = [random_literal(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice([f"k{place}", place]): item for place, item in enumerate(items)}
    return items if kind == 5 else tuple(items)


def test_what_python_writes_is_read() -> None:
    rng = random.Random()
    for _ in range(600):
        value = random_literal(rng)
        written = whole_literal(repr(value))
        assert written is not None
        assert json.loads(written) == json.loads(json.dumps(value)), value


@pytest.mark.parametrize(
    "text",
    [
        r"'\n\t\\\'\"\x41\u00e9\101\0 \q'",
        r"r'\d+\n'",
        "u'x'",
        "'''a 'b' c'''",
        '"""a\n"b" c"""',
        "''",
        '""',
        "[]",
        "{}",
        "( )",
        "(1)",
        "(1,)",
        "[1, 2,]",
        "{'a': 1,}",
        "[[], {}, ()]",
        "{1: 2, None: 3}",
        "{'a', 'b'}",
        "1_000",
        "-5",
        "+5",
        "1e5",
        ".5",
        "5.",
        "'a\\\nb'",
        " [ 1 , 'x' ] ",
        "{'a': {'b': [True, False, None]}}",
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_literals_are_read_as_python_reads_them(text: str) -> None:
    expected = ast.literal_eval(text.strip())
    expected = sorted(expected) if isinstance(expected, set) else expected
    assert json.loads(whole_literal(text) or "") == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "f(1)",
        "1 + 2",
        "b'x'",
        "f'{x}'",
        "[1, x]",
        "{'a': x}",
        "[1",
        "{'a': 1",
        "('a'",
        "[1)",
        "[1] 2",
        "{'a': 1, 2}",
        "{1: 2, 3}",
        "lambda: 0",
        "__import__('os')",
        "nan",
        "1e999",
        "[1] * 10**9",
        "...",
    ],
)
def test_what_is_no_literal(text: str) -> None:
    assert whole_literal(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['it's', 'a \"b\" c']", ["it's", 'a "b" c']),
        ("{'k': 'sed -n '1,5p' f'}", {"k": "sed -n '1,5p' f"}),
        ("'a\nb'", "a\nb"),
        ("'\\ud83d\\ude00'", "😀"),
        ("[true, false, null]", [True, False, None]),
        ("007", 7),
        ('"he said "no" twice"', 'he said "no" twice'),
    ],
)
def test_what_models_write_in_python_and_python_refuses(text: str, value: Any) -> None:
    assert json.loads(whole_literal(text) or "") == value
