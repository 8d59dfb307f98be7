"""Calls written as Python: Llama, OLMo, LFM."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.parsers.events import Arguments, CallStart
from headrace.parsers.output_parser import Answer, OutputParser
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import answer, called, read
from tests.parsers.writing import AROUND, random_value

formats = pytest.mark.parametrize("name", sorted(AROUND))


def call(text: str) -> list[tuple[str, Any]]:
    """The calls of a text, the same in each format."""
    found = {name: called(answer(name, begin + text + end)) for name, (begin, end) in AROUND.items()}
    assert len(set(map(str, found.values()))) == 1, found
    return found["pythonic"]


def test_arguments_come_back_as_python_writes_them() -> None:
    rng = random.Random()
    for _ in range(25):
        values = {f"p{place}": random_value(rng) for place in range(rng.randrange(5))}
        text = "f(" + ", ".join(f"{key}={value!r}" for key, value in values.items()) + ")"
        for name, (begin, end) in AROUND.items():
            for pieces in ([begin + text + end], list(begin + text + end)):
                assert called(read(pieces, TOOL_FORMATS[name])) == [("f", values)], text


@pytest.mark.parametrize("between", [", ", ",", ",\n  ", "\n", "; "])
def test_several_calls(between: str) -> None:
    text = f"f(){between}a.b-c.g(x='1, 2)', y=[]){between} h( z = {{'k': None}} )"
    assert call(text) == [("f", {}), ("a.b-c.g", {"x": "1, 2)", "y": []}), ("h", {"z": {"k": None}})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'Martha\'s'", "Martha's"),
        ('"It\'s \\"so\\""', 'It\'s "so"'),
        ("'sed -n '1,5p' file'", "sed -n '1,5p' file"),
        ("'python3 -c \"f(x='\\,'))\"'", "python3 -c \"f(x='\\,'))\""),
        ("'a\nb'", "a\nb"),
        ("'a\0b'", "a\0b"),
        ("'grep \"]\" f'", 'grep "]" f'),
        ("null", None),
        ("true", True),
        ("07", 7),
        ("{'a', 'b'}", ["a", "b"]),
        ("(1, 2)", [1, 2]),
        ('{"k": [{"l": 1}]}', {"k": [{"l": 1}]}),
        ("''", ""),
        ("'''a'b'''", "a'b"),
        (r"'\u00e9\x41'", "éA"),
        (r"r'\d'", r"\d"),
    ],
)
def test_values(written: str, value: Any) -> None:
    """Also what Python would refuse: quotes and line breaks that are not escaped, leading zeros, JSON's words."""
    assert call(f"f(a={written}, b=1), g(a={written})") == [("f", {"a": value, "b": 1}), ("g", {"a": value})]


@pytest.mark.parametrize(
    "written", ["x + 1", "b'z'", "f'{x}'", "g(1, [2])", "LA", "1e999", "-x", "open('/etc/passwd').read()", ""]
)
def test_an_expression_is_not_evaluated(written: str) -> None:
    """A call that begins with one is none, and those beside it are; behind a literal it is handed on as its text."""
    assert call(f"f(a={written}), g(b=2)") == [("g", {"b": 2})]
    assert call(f"f(b=2, a={written}), g(b=2)") == [("f", {"b": 2, "a": written}), ("g", {"b": 2})]
    for name, (begin, end) in AROUND.items():
        text = f"{begin}f(a={written}){end}"
        assert answer(name, text).content in (
            text,
            text.removesuffix("<|python_end|>").removesuffix("<|tool_call_end|>"),
        )


@formats
def test_names_may_begin_as_openai_allows(name: str) -> None:
    begin, end = AROUND[name]
    for function in ("3d", "-f", "_f", "a-b.c"):
        assert called(answer(name, f"{begin}{function}(a=1){end}", FunctionTool(function))) == [(function, {"a": 1})]


def test_llama_4_may_put_markup_around_a_list() -> None:
    text = "I look. <|python_start|>[f(a=1)]<|python_end|> Done."
    assert called(answer("pythonic", text)) == [("f", {"a": 1})]
    assert answer("pythonic", text).content == "I look.  Done."


def test_a_bare_list_calls_only_tools_that_there_are() -> None:
    text = "x = [Point(x=1, y=2)]"
    assert answer("pythonic", text, FunctionTool("f")) == Answer(content=text)
    assert called(answer("llama4_pythonic", "<|python_start|>[g(a=1)]", FunctionTool("f"))) == [("g", {"a": 1})]


def test_a_string_is_handed_on_as_it_comes() -> None:
    parser = OutputParser(TOOL_FORMATS["lfm2"], None)
    assert parser.feed("<|tool_call_start|>[f(a='Hello")[0] == CallStart(0, "f", None)
    assert parser.feed(" wor") == [Arguments(0, " wor")]
    assert parser.feed("ld'") == [Arguments(0, "ld")]
    assert parser.feed("s, b=2") == [Arguments(0, "'"), Arguments(0, "s, b=2")]


@pytest.mark.parametrize(
    "text",
    ['[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', ' {"name": "f", "arguments": {"a": 1}}'],
)
def test_lfm_may_write_json(text: str) -> None:
    found = called(answer("lfm2", f"<|tool_call_start|>{text}<|tool_call_end|> Done."))
    assert found == [("f", {"a": 1}), ("g", {})][: len(found)]


def test_a_list_of_no_calls_says_nothing() -> None:
    assert answer("lfm2", "<|tool_call_start|>[ ]<|tool_call_end|>") == Answer()
    assert call("f(),") == [("f", {})]
    assert answer("pythonic", "[f(),]").content is None


def test_arguments_without_a_name_are_left_out() -> None:
    assert call("f(a=1, 'x', b=2, *y)") == [("f", {"a": 1, "b": 2})]


def test_nesting_is_bounded() -> None:
    depth = 10_000
    found = read([f"[f(a={'[' * depth}{']' * depth})]"], TOOL_FORMATS["pythonic"])
    ((name, arguments),) = called(found)
    assert name == "f"
    assert str(arguments).count("[") == depth


@pytest.mark.parametrize(
    "template",
    [
        "[f(a='x'@, b=1)]",
        "[f(a='x',@b=1)]",
        "[f(a='x'@)]",
        "[f(a='x')@]",
        "[f(@a=1)]",
        "[f@(a='x')]",
        "[f(a='x'),@g(b=1)]",
        "[f(a=['x'@, 'y'])]",
        "[f(a={'x'@: 1})]",
        "[f(a@=1)]",
    ],
)
def test_as_much_is_looked_at_however_the_text_is_cut(template: str) -> None:
    """Very long white space is where a stream might decide otherwise than the whole text."""
    for length in (*range(244, 260), 2000):
        text = template.replace("@", " " * length)
        whole = read([text], TOOL_FORMATS["pythonic"])
        for pieces in (list(text), [text[:-3], text[-3:]], [text[:255], text[255:]], [text[:262], text[262:]]):
            assert read(pieces, TOOL_FORMATS["pythonic"]) == whole
