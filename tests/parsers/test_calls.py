"""What holds for the calls of every format, over one table of example texts."""

from __future__ import annotations

import random
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
from tests.parsers.writing import (
    AROUND,
    QUOTE,
    WRITERS,
    deepseek,
    dsml,
    function,
    gemma,
    kimi,
    kimi_section,
    minimax,
    typed,
    v3,
)  # fmt: skip


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
    """Wherever it is cut: no markup becomes content, and what came of arguments is the beginning of them. So it is
    with what comes character by character, held to at some of the places."""
    format, text = TOOL_FORMATS[example.format], example.text
    whole = read([text], format, None, example.tools).calls
    for at in range(len(text)):
        found = read([text[:at]], format, None, example.tools, cut=True)
        if random.random() < 0.1:
            assert read(list(text[:at]), format, None, example.tools, cut=True) == found
        assert found.content is None or example.format in BARE, text[:at]
        assert len(found.calls) <= len(whole)
        for call, complete in zip(found.calls, whole, strict=False):
            assert (call.name, complete.arguments.startswith(call.arguments)) == (complete.name, True)


STRING = typed(a={"type": "string"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, write("f", {"a": "Hello@@"})) for name, write in WRITERS.items() if name != "minicpm5"),
        *((name, f"{begin}f(a='Hello@@'){end}") for name, (begin, end) in AROUND.items()),
        ("gemma4", gemma("f", f"a:{QUOTE}Hello@@{QUOTE}")),
        ("minimax_m3", elements.section(elements.call(elements.element("a", "Hello@@"), name="f"))),
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


TAGGED: list[tuple[str, str]] = [
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\ny\n</function>\n</tool_call>"),
    ("qwen3_coder", "<function=f><parameter=a>x</parameter><parameter=b>y</parameter></function>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter><parameter=b>y"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\ny\n</function>"),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=a>x</parameter><parameter=b>y</parameter></seed:tool_call>",
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>b</arg_key><arg_value>y</tool_call>",
    ),
    ("minimax_m2", minimax("f", {"a": "x", "b": "y"}).replace("</invoke>\n", "")),
    ("deepseek_v32", dsml("f", {"a": "x", "b": "y"}).replace("</｜DSML｜invoke>\n</｜DSML｜function_calls>", "")),
]
WEATHER = json_calls.WEATHER_TEXT
F = ("f", {"a": "x"})
MISSING: list[tuple[str, str, tuple[str, dict[str, Any]]]] = [
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx </tool_call> y\n</tool_call>\n",
        ("f", {"a": "x </tool_call> y"}),
    ),
    *((name, text, ("f", {"a": "x", "b": "y"})) for name, text in TAGGED),
    *(
        ("gemma4", "<|tool_call>call:f{" + body, F)
        for body in (f"a:{QUOTE}x", f"a:{QUOTE}x{QUOTE}", f"a:{QUOTE}x{QUOTE}}}", f"a:{QUOTE}x<tool_call|>")
    ),
    *(
        (name, begin + text, ("f", {"a": [1, 2]}))
        for name, (begin, end) in AROUND.items()
        for text in ("f(a=[1, 2", "f(a=[1, 2)", f"f(a=[1, 2]{end}")
    ),
    *((name, f"{begin}f(a={{'k': 'v", ("f", {"a": {"k": "v"}})) for name, (begin, _) in AROUND.items()),
    *(
        ("hermes", text, json_calls.WEATHER)
        for text in (
            f"<tool_call>{WEATHER}}}</tool_call>",
            f"<tool_call>{WEATHER[:-1]}</tool_call>",
            f"<tool_call>{WEATHER}",
            f"<tool_call>\n{WEATHER}\n<tool_call>",
        )
    ),
]


@pytest.mark.parametrize(("name", "text", "call"), MISSING)
def test_missing_markup_is_made_up_for(name: str, text: str, call: tuple[str, dict[str, Any]]) -> None:
    """A model that ends without closing its tags still made its call; the next parameter ends an open value too."""
    tools = (typed(a={"type": "string"}, b={"type": "string"}),) if name in WRITERS else ()
    assert called(answer(name, text, *tools)) == [call]


BRACKETS = [
    "Let's try this: [",
    "[1, 2, 3]",
    "[link](https://x.org)",
    "[f]",
    "[f(1)]",
    "[f(a)]",
    "[f(a==1)]",
    "a[i](b=1)",
    "[ ]",
    "[not f(a=1)]",
    "[f (",
    "[f(a=word",
    "x = [" + "f" * 300 + "(a=1)]",
]
"""Text that begins as calls in Python do."""
OBJECTS = ['{"answer": 42, "name": "x"}', '{"name": "Bob", "age": 3}', "[1, 2]", '[{"name": "Bob"}]', "{", "[", "{}",
           '{"name": "Bob"', "{hello world[A(A=\t)", '{"name": "Bob", "arguments": "none"}']  # fmt: skip
"""JSON that is no call."""
BODIES = [
    "", "no JSON", "{}", "[]", "{]", "{'name': 'f'}", '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}',
    '{"name": "f", "arguments": [x]}', '{"name": "f", "arguments": Paris}', '{"name": "f", "arguments": {x: 1}}',
    '{"arguments": {"a": 1}}', '{"name" "f"}', '["f"]', '{"name": "' + "f" * 300 + '", "arguments": {}}', "{{}}",
    '{"name": "f", "arguments": {', '{"name": "\\ud800", "arguments": {}}', '{"name": "f", "arguments": "\\ud800"}',
]  # fmt: skip
"""What stands where a call's object should."""
NO_CALL: list[tuple[str, str]] = [
    *((name, text) for name in ("pythonic", "llama4_pythonic") for text in BRACKETS),
    *((name, text) for name in ("llama3_json", "xlam", "granite") for text in OBJECTS),
    *(("hermes", text) for body in BODIES for text in (f"Hm: <tool_call>{body}</tool_call> so", f"<tool_call>{body}")),
    *(
        ("gemma4", text)
        for text in ("<|tool_call>", "<|tool_call>f{}<tool_call|>", "<|tool_call>call:f<tool_call|>", "call:f{}")
    ),
    *(
        ("minimax_m3", text.replace("@", elements.MARK))
        for text in ("a ]<]minimax b", "a @ b", "@<b>", "@<tool_call>" + "x" * 300)
    ),
    *(
        (name, f"Write {TOOL_FORMATS[name].openers[0]} {inside}")
        for name in WRITERS
        for inside in ("", "no call at all", "\n\n", "x" * 300)
    ),
    ("xlam", 'Like so:\n```json\n{"port": 80}\n```\nThat is all.'),
    ("llama3_json", "<|python_tag|>print({'name': 1})"),
    ("mistral", "The token [TOOL_CALLS] begins a call."),
    ("mistral", "[TOOL_CALLS]two words[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]none"),
    ("mistral", "[TOOL_CALLS]"),
    ("kimi_k2", kimi_section(kimi("functions.f:0", "Paris"))),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0"),
    ("deepseek_v31", deepseek("words")),
    ("deepseek_v3", deepseek(v3("f", "[x]"))),
]


@pytest.mark.parametrize(("name", "text"), NO_CALL)
def test_what_is_no_call_is_content_word_for_word(name: str, text: str) -> None:
    assert answer(name, text) == Answer(None, text)
