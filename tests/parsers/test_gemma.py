"""Calls as Gemma 4 and FunctionGemma write them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import answer, called, read
from tests.parsers.writing import QUOTE, function, gemma, gemma_value, random_value, type_of


def test_values_come_back_as_they_were_written() -> None:
    rng = random.Random()
    for _ in range(60):
        values = {f"p{place}": random_value(rng) for place in range(rng.randrange(5))}
        text = gemma("f", gemma_value(values)[1:-1])
        for pieces in ([text], list(text)):
            assert called(read(pieces, TOOL_FORMATS["gemma4"])) == [("f", values)], text


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("", {}),
        (" ", {}),
        ("a:1,b:2.5,c:-3", {"a": 1, "b": 2.5, "c": -3}),
        ("a:true,b:none", {"a": True, "b": None}),
        (f" a : {QUOTE}x, y}}{QUOTE} , b : [ ] ", {"a": "x, y}", "b": []}),
        ("a:celsius", {"a": "celsius"}),
        (f"m:{{{QUOTE}3{QUOTE}:{QUOTE}x{QUOTE}}}", {"m": {"3": "x"}}),
        ("a:108.", {"a": 108}),
        ("a:", {"a": ""}),
        ('a:"x, y"', {"a": "x, y"}),
        (f"a:[{QUOTE}]{QUOTE},[{QUOTE}b{QUOTE}]]", {"a": ["]", ["b"]]}),
    ],
)
def test_arguments(body: str, values: dict[str, Any]) -> None:
    assert called(answer("gemma4", gemma("a.f-g", body))) == [("a.f-g", values)]


def schema_of(value: Any) -> dict[str, Any]:
    """The schema of a value and of all within it."""
    found: dict[str, Any] = {"type": type_of(value)}
    if isinstance(value, list):
        found["prefixItems"] = list(map(schema_of, value))
    if isinstance(value, dict):
        found["properties"] = {key: schema_of(item) for key, item in value.items()}
    return found


def looking_like_more(value: Any, rng: random.Random) -> Any:
    """A value in which some strings read like other values."""
    if isinstance(value, list):
        return [looking_like_more(item, rng) for item in value]
    if isinstance(value, dict):
        return {key: looking_like_more(item, rng) for key, item in value.items()}
    return rng.choice(["null", "42", "true", "[1]", "", value]) if isinstance(value, str) else value


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_strings_that_read_like_other_values_stay_strings(name: str) -> None:
    """Of the schema's types, and within an argument even if no schema says more."""
    rng = random.Random()
    for _ in range(40):
        values = {f"p{place}": looking_like_more(random_value(rng), rng) for place in range(rng.randrange(5))}
        schemas = rng.choice(
            [schema_of(values), {"properties": {key: {"type": type_of(values[key])} for key in values}}]
        )
        text = gemma("f", gemma_value(values)[1:-1])
        if name == "functiongemma":
            text = function("f", gemma_value(values)[1:-1].replace(QUOTE, "<escape>"))
        for pieces in ([text], list(text)):
            assert called(read(pieces, TOOL_FORMATS[name], None, [FunctionTool("f", schemas)])) == [("f", values)], text


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    ("schema", "body", "value"),
    [
        ({"items": {"type": "string"}}, "[`null`,`42`,null]", ["null", "42", None]),
        ({"items": {"type": "integer"}}, "[`42`,42,`many`]", [42, 42, "many"]),
        ({"items": {"type": ["string", "null"]}}, "[`null`,null]", ["null", None]),
        ({"items": {"enum": ["none", "some"]}}, "[none,`none`]", ["none", "none"]),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "boolean"}}, "[1,`true`]", ["1", True]),
        ({"properties": {"a": {"type": "string"}}}, "{a:`true`,b:`true`}", {"a": "true", "b": "true"}),
        ({"properties": {"a": {"type": "string"}}}, "{a:00501}", {"a": "00501"}),
        ({"additionalProperties": {"type": "number"}}, "{a:`1.5`,b:[`1.5`]}", {"a": 1.5, "b": ["1.5"]}),
        ({"type": "array", "items": {"items": {"type": "boolean"}}}, "[[`true`],[false]]", [[True], [False]]),
        ({"type": "object"}, "{a:[`null`,{b:`42`}]}", {"a": ["null", {"b": "42"}]}),
        ({"type": "object"}, '`{"a": [1]}`', {"a": [1]}),
    ],
)
def test_the_schema_says_what_is_a_string_at_every_depth(
    name: str, schema: dict[str, Any], body: str, value: Any
) -> None:
    text = gemma("f", "x:" + body.replace("`", QUOTE))
    if name == "functiongemma":
        text = function("f", "x:" + body.replace("`", "<escape>"))
    tool = FunctionTool("f", {"properties": {"x": schema}})
    assert called(answer(name, text, tool)) == [("f", {"x": value})]


def test_text_and_several_calls() -> None:
    text = f"I look. {gemma('f', 'a:1')} more {gemma('g', '')} text"
    found = answer("gemma4", text)
    assert called(found) == [("f", {"a": 1}), ("g", {})]
    assert found.content == "I look. "


def test_function_gemma_quotes_every_argument() -> None:
    """The schema says what is a string; without one, an argument that looks like JSON is that."""
    body = ",".join(f"{key}:<escape>{value}<escape>" for key, value in {"a": "42", "b": "true", "c": "x, y"}.items())
    assert called(answer("functiongemma", function("f", body))) == [("f", {"a": 42, "b": True, "c": "x, y"})]
    tool = FunctionTool("f", {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}})
    assert called(answer("functiongemma", function("f", body), tool)) == [("f", {"a": "42", "b": True, "c": "x, y"})]
    assert called(answer("functiongemma", function("f", "a:5,b:[1]"))) == [("f", {"a": 5, "b": [1]})]


def test_a_thought_beside_calls() -> None:
    """A reasoning format reads it; where there is none, a thought that ended is left out."""
    text = "<|channel>thought\nI think.<channel|>" + gemma("f", "a:1")
    assert answer("gemma4", text).content is None
    found = read([text], TOOL_FORMATS["gemma4"], REASONING_FORMATS["gemma4"])
    assert found.reasoning == "I think."
    assert called(found) == [("f", {"a": 1})]


def test_nesting_is_bounded() -> None:
    found = read([gemma("f", "a:" + "[" * 10_000 + "]" * 10_000)], TOOL_FORMATS["gemma4"])
    assert called(found)[0][0] == "f"
