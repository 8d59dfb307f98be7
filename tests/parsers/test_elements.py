"""Calls of MiniMax-M3: elements named like the parameters, each tag behind a mark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.parsers.elements import MAX_DEPTH
from headrace.parsers.output_parser import Answer
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import answer, called, read

MARK = "]<]minimax[>["
FORMAT = TOOL_FORMATS["minimax_m3"]
ORDER = FunctionTool(
    "order",
    {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "note": {"type": "string"},
            "urgent": {"type": "boolean"},
            "to": {"$ref": "#/$defs/place"},
            "items": {"type": "array", "items": {"properties": {"sku": {"type": "string"}, "n": {"type": "integer"}}}},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
            "scores": {"type": "object", "additionalProperties": {"type": "number"}},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "free": {},
        },
        "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}}},
    },
)


def element(name: str, *inner: str) -> str:
    return f"{MARK}<{name}>{''.join(inner)}{MARK}</{name}>"


def call(*arguments: str, name: str = "order") -> str:
    return f'{MARK}<invoke name="{name}">{"".join(arguments)}{MARK}</invoke>\n'


def section(*calls: str) -> str:
    return f"{MARK}<tool_call>\n{''.join(calls)}{MARK}</tool_call>"


def order(text: str) -> Answer:
    return answer("minimax_m3", text, ORDER)


ARGUMENTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "scalars": (
        [element("id", "018"), element("note", "18"), element("urgent", "true")],
        {"id": 18, "note": "18", "urgent": True},
    ),
    "an object": ([element("to", element("city", "Rome"), element("zip", "7"))], {"to": {"city": "Rome", "zip": 7}}),
    "an array": (
        [element("items", *(element("item", element("sku", str(n)), "\n", element("n", str(n))) for n in (1, 2)))],
        {"items": [{"sku": "1", "n": 1}, {"sku": "2", "n": 2}]},
    ),
    "an array of one, by another name": (
        [element("items", element("entry", element("n", "5")))],
        {"items": [{"n": 5}]},
    ),
    "items of their own": ([element("pair", element("item", "1"), element("item", "1"))], {"pair": ["1", 1]}),
    "any names": ([element("scores", element("a", "1.5"), element("b", "2"))], {"scores": {"a": 1.5, "b": 2}}),
    "a name again": ([element("to", element("city", "A"), element("city", "B"))], {"to": {"city": ["A", "B"]}}),
    "JSON in place of elements": (
        [element("to", '{"zip": 1}'), element("items", "[]")],
        {"to": {"zip": 1}, "items": []},
    ),
    "nothing": ([element("to"), element("items"), element("note")], {"to": {}, "items": [], "note": ""}),
    "null": ([element("maybe", "null"), element("note", "null")], {"maybe": None, "note": "null"}),
    "without a schema": (
        [element("list", element("item", "1"), element("item", "b")), element("other", "1")],
        {"list": ["1", "b"], "other": "1"},
    ),
    "a schema that says nothing": ([element("free", "5")], {"free": 5}),
    "text beside elements": (
        [element("to", "to ", element("city", "Rome"), "now")],
        {"to": {"city": "Rome", "$text": "to now"}},
    ),
    "text as it stands": (
        [element("note", ' <b>&lt;"\\\n</note></tool_call>] ]< '), element("id", "1")],
        {"note": ' <b>&lt;"\\\n</note></tool_call>] ]< ', "id": 1},
    ),
    "a mark in a string": ([element("note", f"a{MARK}b{MARK} <c>d")], {"note": f"a{MARK}b{MARK} <c>d"}),
    "a closing tag that is missing": (
        [f"{MARK}<to>{MARK}<city>Rome{MARK}</to>", f"{MARK}<note>x"],
        {"to": {"city": "Rome"}, "note": "x"},
    ),
    "one too many": ([element("id", "1"), f"{MARK}</id>", element("note", "x")], {"id": 1, "note": "x"}),
    "a name within itself": ([element("to", element("to", element("to", "x")))], {"to": {"to": {"to": "x"}}}),
    "line breaks between": (["\n", element("id", "1"), "\n", element("note", "x"), "\n"], {"id": 1, "note": "x"}),
    "none": ([], {}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    written, expected = ARGUMENTS[name]
    assert called(order(section(call(*written)))) == [("order", expected)]


def test_sections_and_text_around() -> None:
    one, two = call(element("id", "1")), call(name="other")
    found = [("order", {"id": 1}), ("other", {})]
    for text in (section(one, two), section(one) + " and " + section(two), one + two, section(one[:-1] + two)):
        assert called(order(text)) == found
        assert order(f"I order.\n{text} Done.").content == "I order.\n"
    unclosed = section(one).removesuffix(f"{MARK}</invoke>\n{MARK}</tool_call>")
    assert called(order(unclosed)) == called(order(unclosed + f"{MARK}</tool_call>")) == found[:1]


def test_the_end_of_a_section_says_nothing() -> None:
    assert order(f"Done.{MARK}</tool_call>") == Answer(content="Done.")


def test_elements_nest_only_so_deep() -> None:
    levels = 3 * MAX_DEPTH
    text = section(call(f"{MARK}<a>" * levels + "x" + f"{MARK}</a>" * levels))
    [(_, arguments)] = called(read([text], FORMAT, None, [ORDER]))
    assert json.dumps(arguments).count('"a"') == MAX_DEPTH


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<mm:think>why</mm:think>Hi", False, Answer("why", "Hi")),
        ("why</mm:think>Hi", True, Answer("why", "Hi")),
        ("</mm:think>Hi", False, Answer(None, "Hi")),
        ("Hi", None, Answer(None, "Hi")),
        ("<mm:think>why", False, Answer("why")),
    ],
)
def test_its_reasoning(text: str, is_open: bool | None, expected: Answer) -> None:
    assert answer("minimax_m3", text, reasoning="minimax_m3", opened=is_open) == expected
