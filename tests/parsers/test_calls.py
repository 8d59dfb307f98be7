"""What holds for the calls of every format, over one table of example texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from headrace.parsers.events import Arguments, CallStart
from headrace.parsers.output_parser import Answer, OutputParser
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers import test_elements as elements
from tests.parsers import test_json_calls as json_calls
from tests.parsers import test_named_calls as named_calls
from tests.parsers.reading import answer, called, read
from tests.parsers.test_gemma import QUOTE, function, gemma
from tests.parsers.test_pythonic import AROUND
from tests.parsers.test_tagged import WRITERS, typed


@dataclass(frozen=True)
class Example:
    """An answer that is calls alone, in a format."""

    format: str
    text: str
    calls: list[tuple[str, Any]]
    tools: tuple[FunctionTool, ...] = ()


BARE = ("llama4_json", "xlam")
"""Formats whose calls bear no mark: behind other text, JSON is content, and so is some that was cut short."""

PYTHON = r"""f(a='x, \n\x41 "y"\u00e9', b=[1, 'z', {'k': 'v', 'l': (2, None)}])"""
PYTHON_CALL = ("f", {"a": 'x, \nA "y"é', "b": [1, "z", {"k": "v", "l": [2, None]}]})
GEMMA_CALL = ("f", {"a": "x y", "b": [1, {"c": "z"}], "d": True})
ORDER_TEXT = elements.section(
    elements.call(*(part for name in ("scalars", "an object") for part in elements.ARGUMENTS[name][0]))
)
ORDER_CALL = ("order", elements.ARGUMENTS["scalars"][1] | elements.ARGUMENTS["an object"][1])
NOTE = ' <b>&lt;"\\\n</note></tool_call>] ]< '

EXAMPLES = [
    *(Example(name, text, [json_calls.WEATHER, json_calls.TIME]) for name, text in json_calls.BOTH.items()),
    *(Example(name, text, [named_calls.F, named_calls.G]) for name, text in named_calls.BOTH),
    *(
        Example(name, write("f", {"a": "12", "b": "34"}), [("f", values)], (typed(a={"type": kind}, b={"type": kind}),))
        for name, write in WRITERS.items()
        for kind, values in (("string", {"a": "12", "b": "34"}), ("integer", {"a": 12, "b": 34}))
    ),
    *(
        Example(name, write("f", {"a": "x y"}) + "\n" + write("g.h-i", {}), [("f", {"a": "x y"}), ("g.h-i", {})])
        for name, write in WRITERS.items()
    ),
    *(
        Example(name, begin + PYTHON + end, [PYTHON_CALL], (FunctionTool("f"),))
        for name, (begin, end) in AROUND.items()
    ),
    *(
        Example(name, write("f", f"a:{quote}x y{quote},b:[1,{{c:{quote}z{quote}}}],d:true"), [GEMMA_CALL])
        for name, write, quote in (("gemma4", gemma, QUOTE), ("functiongemma", function, "<escape>"))
    ),
    Example("minimax_m3", ORDER_TEXT, [ORDER_CALL], (elements.ORDER,)),
    Example(
        "minimax_m3",
        elements.section(elements.call(elements.element("note", NOTE))),
        [("order", {"note": NOTE})],
        (elements.ORDER,),
    ),
]
examples = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.format)


@examples
def test_calls_alone(example: Example) -> None:
    found = answer(example.format, example.text, *example.tools)
    assert (found.content, called(found)) == (None, example.calls)


@pytest.mark.parametrize(
    "example", [one for one in EXAMPLES if one.format not in BARE], ids=lambda example: example.format
)
def test_text_before_calls_is_content_and_text_behind_them_by_format(example: Example) -> None:
    before = "I'll look.\n"
    found = answer(example.format, before + example.text + "\nDone.", *example.tools)
    assert called(found) == example.calls
    assert found.content is not None
    assert found.content.startswith(before)
    kept = TOOL_FORMATS[example.format].keeps_text_after
    assert found.content.removeprefix(before).split() == (["Done."] if kept else [])


@pytest.mark.parametrize("name", sorted({example.format for example in EXAMPLES}))
def test_an_answer_without_calls_is_content_word_for_word(name: str) -> None:
    for text in ("Plain words.", "  \n a < b && c[0] > {x}\n", "", " ", "1 <tool 2 [TOOL 3 <|tool"):
        assert answer(name, text) == Answer(None, text or None)


@examples
def test_a_call_that_was_cut_short_leaks_no_markup(example: Example) -> None:
    """Wherever it is cut: no markup becomes content, and what came of arguments is the beginning of them."""
    format, text = TOOL_FORMATS[example.format], example.text
    whole = read([text], format, None, example.tools).calls
    for at in range(len(text)):
        found = read([text[:at]], format, None, example.tools, cut=True)
        assert read(list(text[:at]), format, None, example.tools, cut=True) == found
        assert found.content is None or example.format in BARE, text[:at]
        assert len(found.calls) <= len(whole)
        for call, complete in zip(found.calls, whole, strict=False):
            assert (call.name, complete.arguments.startswith(call.arguments)) == (complete.name, True)


STRING = typed(a={"type": "string"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, write("f", {"a": "Hello @@"})) for name, write in WRITERS.items() if name != "minicpm5"),
        *((name, f"{begin}f(a='Hello @@'){end}") for name, (begin, end) in AROUND.items()),
        ("gemma4", gemma("f", f"a:{QUOTE}Hello @@{QUOTE}")),
        ("minimax_m3", elements.section(elements.call(elements.element("a", "Hello @@"), name="f"))),
    ],
)
def test_a_string_is_handed_on_as_it_comes(name: str, text: str) -> None:
    before, after = text.split("@@")
    parser = OutputParser(TOOL_FORMATS[name], None, [STRING])
    events = [event for char in before for event in parser.feed(char)]
    assert [event for event in events if isinstance(event, CallStart)] == [CallStart(0, "f", None)]
    assert "".join(event.text for event in events if isinstance(event, Arguments)).rstrip() == '{"a": "Hello'
    assert parser.feed("wor") == [Arguments(0, "wor")]
    events = parser.feed(' "ld"' + after) + parser.finish(cut=False)
    assert "".join(event.text for event in events if isinstance(event, Arguments)) == ' \\"ld\\""}'
