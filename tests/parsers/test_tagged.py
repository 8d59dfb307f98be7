"""Calls written as tags: Qwen, GLM, MiniMax, DeepSeek's DSML, Step, Seed, MiniCPM."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.parsers.output_parser import Answer
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import answer, called, read
from tests.parsers.writing import WRITERS, dsml, glm, minicpm, minimax, random_value, step, type_of, typed

GUESSING = ("glm45", "deepseek_v32", "minicpm5")
"""Formats in which a value without a schema is JSON if it looks like it."""
TRIMMING = ("step3", "minicpm5")
"""Formats in which white space around a value is markup."""


formats = pytest.mark.parametrize("name", sorted(WRITERS))


@formats
def test_typed_values_come_back_as_they_were_written(name: str) -> None:
    """Strings stand as they are, anything else as JSON; the schema tells them apart."""
    rng = random.Random()
    for _ in range(15):
        values = {f"p{place}": random_value(rng) for place in range(rng.randrange(1, 5))}
        if name in TRIMMING:
            values = {key: value.strip() if isinstance(value, str) else value for key, value in values.items()}
        written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        tool = typed(**{key: {"type": type_of(value)} for key, value in values.items()})
        text = WRITERS[name]("f", written)
        for pieces in ([text], list(text)):
            assert called(read(pieces, TOOL_FORMATS[name], None, [tool])) == [("f", values)], text


@formats
@pytest.mark.parametrize(
    "value",
    [
        "<div class='a'>a < b && c > d</div>",
        "&lt;tag> & &#60;",
        "a </ b",
        "</",
        "<parameter",
        "use </tool_call> so",
        "x </function> y",
        "<think>no</think>",
        '"quoted"',
        "{not json",
        "\\n is two characters",
        "日本 🎉",
    ],
)
def test_markup_and_entities_in_a_value_are_text(name: str, value: str) -> None:
    found = answer(name, WRITERS[name]("f", {"a": value, "b": "2"}), typed(a={"type": "string"}, b={"type": "integer"}))
    assert called(found) == [("f", {"a": value, "b": 2})]


@formats
def test_a_value_may_speak_of_its_own_closing_tag(name: str) -> None:
    _, close = WRITERS[name]("f", {"a": "@@"}).split("@@")
    close = close[: close.index(">") + 1].strip()
    for value in (f"use {close} in docs", f"{close} x", f"a {close}\n b {close} c"):
        text = WRITERS[name]("f", {"a": value, "b": "y"})
        assert called(answer(name, text, typed(a={"type": "string"}, b={"type": "string"}))) == [
            ("f", {"a": value, "b": "y"})
        ]


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss"])
@pytest.mark.parametrize(
    ("written", "value"),
    [("x", "x"), ("\nx\n", "x"), ("\n\n x\n\n", "\n x\n"), ("", ""), ("\n", ""), ("\n\n", ""), ("  ", "  ")],
)
def test_one_line_break_on_each_side_of_a_value_is_markup(name: str, written: str, value: str) -> None:
    text = WRITERS[name]("f", {"a": "@"}).replace("\n@\n", written)
    assert called(answer(name, text)) == [("f", {"a": value})]


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "deepseek_v32", *TRIMMING])
def test_elsewhere_white_space_belongs_to_a_string_or_to_the_markup(name: str) -> None:
    found = answer(
        name,
        WRITERS[name]("f", {"a": "\n  if x:\n\n y\n", "n": " 4\n"}),
        typed(a={"type": "string"}, n={"type": "integer"}),
    )
    assert called(found) == [("f", {"a": "if x:\n\n y" if name in TRIMMING else "\n  if x:\n\n y\n", "n": 4})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("&lt;b&gt; &amp;amp; &#233;&#xe9;", "<b> &amp; éé"),
        ("a & b &lt;", "a & b &lt;"),
        ("<b>&lt;</b>", "<b>&lt;</b>"),
        ("<![CDATA[ &lt; ]]>", "&lt;"),
    ],
)
def test_entities_of_minicpm_are_read_where_a_value_is_xml(written: str, value: str) -> None:
    assert called(answer("minicpm5", minicpm("f", {"a": written}), typed(a={"type": "string"}))) == [
        ("f", {"a": value})
    ]


@pytest.mark.parametrize("between", ["", "\n", "\n</parameter>\n"])
def test_a_parameter_ends_where_another_begins_that_the_tool_has(between: str) -> None:
    written = f"<parameter=a>\nuse <parameter=c>{between}<parameter=b>\n2\n</parameter>"
    text = f"<tool_call>\n<function=f>\n{written}\n</function>"
    tool = typed(a={"type": "string"}, b={"type": "integer"})
    assert called(answer("qwen3_coder", text, tool)) == [("f", {"a": "use <parameter=c>", "b": 2})]


@formats
def test_a_value_without_a_schema(name: str) -> None:
    """It is a string, or in some families JSON if it looks like it."""
    values = {"a": "5", "b": '{"x": [1]}', "c": "plain", "d": "2025-01-02", "e": "true"}
    expected = {"a": 5, "b": {"x": [1]}, "c": "plain", "d": "2025-01-02", "e": True}
    found = answer(name, WRITERS[name]("f", values))
    assert called(found) == [("f", expected if name in GUESSING else values)]


def test_glm_may_escape_quotes_or_write_python() -> None:
    values = {"a": '[{\\"k\\": \\"v\\"}]', "b": "{'k': None, 'l': (1, 2)}", "c": "(555) 123", "d": "None"}
    assert called(answer("glm45", glm("f", values))) == [
        ("f", {"a": [{"k": "v"}], "b": {"k": None, "l": [1, 2]}, "c": "(555) 123", "d": None})
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>",
        "<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>x</arg_value>\\n</tool_call>",
        "<tool_call>\n f \n\n<arg_key> a </arg_key> <arg_value>x</arg_value>",
    ],
)
def test_white_space_of_glm(text: str) -> None:
    assert called(answer("glm45", text)) == [("f", {"a": "x"})]


def test_dsml_says_what_is_a_string() -> None:
    call = dsml("f", {"a": "42", "b": "42", "c": "null", "d": "x"})
    text = call.replace('"a" string="false"', '"a" string="true"')
    tool = typed(a={"type": "integer"}, b={"type": "string"}, c={"type": ["integer", "null"]})
    assert called(answer("deepseek_v32", text, tool)) == [("f", {"a": "42", "b": "42", "c": None, "d": "x"})]


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"minicpm5"}))
def test_of_a_parameter_written_twice_the_last_counts(name: str) -> None:
    text = WRITERS[name]("f", {"key": "one", "yek": "two"}).replace("yek", "key")
    assert called(answer(name, text)) == [("f", {"key": "two"})]


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "deepseek_v32"])
def test_arguments_may_be_json(name: str) -> None:
    text = WRITERS[name]("f", {}).replace('f">', 'f">{"a": [1, "</x>"]}').replace("=f>", '=f>\n{"a": [1, "</x>"]}')
    assert called(answer(name, text)) == [("f", {"a": [1, "</x>"]})]


LOOKUP = FunctionTool(
    "look", {"properties": {"key": {"type": "string"}, "max": {"type": "integer"}, "by": {}}, "required": ["key"]}
)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (minicpm("look", {"key": "x", "other": "y"}), {"key": "x"}),
        (minicpm("look", {"key": "x", "max": "2"}), {"key": "x", "max": 2}),
        (minicpm("look", {"arguments": '{"key": "x", "max": 2, "other": 3}'}), {"key": "x", "max": 2}),
        (minicpm("look", {"properties": "{'key': 7, 'max': '2', 'by': [1]}"}), {"key": "7", "max": 2, "by": [1]}),
        (minicpm("look", {"properties": "key"}), None),
        (minicpm("look", {"properties": '{"other": "x"}'}), None),
        (minicpm("look", {"max": "2"}), None),
        (minicpm("look", {"Key": "x"}), None),
        (minicpm("find", {"key": "x"}), None),
        (minicpm("look", {"key": "x", "yek": "y"}).replace("yek", "key"), None),
        (minicpm("look", {"key": "x", "max": "2"}).replace('<param name="max">', "<param>"), None),
        (minicpm("look", {"key": "x"}).replace("</function>", ""), None),
        (minicpm("look", {"key": "x"}).replace("</param></function>", ""), None),
    ],
)
def test_minicpm_calls_a_tool_that_there_is_with_its_parameters(text: str, arguments: dict[str, Any] | None) -> None:
    """Each once, all that are required, and no others; or in one object. What is no call is content."""
    found = answer("minicpm5", f"Before {text} after", LOOKUP)
    assert called(found) == ([] if arguments is None else [("look", arguments)])
    assert found.content == f"Before {text if arguments is None else ''} after"


STEP = step("f", {"a": "x"})


@pytest.mark.parametrize(
    "text",
    [
        STEP.replace("<｜tool_calls_begin｜>", ""),
        STEP.replace("function<｜tool_sep｜>", ""),
        STEP.replace("function<｜tool_sep｜>", "action<｜tool_sep｜>"),
    ],
)
def test_step_calls_functions_within_a_section(text: str) -> None:
    assert answer("step3", text) == Answer(content=text)
    assert called(answer("step3", STEP.replace("sep｜>", "sep｜>f\n"))) == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    "text",
    [
        '<functionname="f"><paramname="a">x\n<y></param></function>',
        "<function name='f'><param name='a'><![CDATA[x\n<y>]]></param></function>",
        '<function\u0120name="f"><param\u0120name="a">x\n<y></param></function>',
    ],
)
def test_spellings_of_minicpm(text: str) -> None:
    assert called(answer("minicpm5", text, typed(a={"type": "string"}))) == [("f", {"a": "x\n<y>"})]
    assert called(answer("minicpm5", '<function name="f"/>')) == [("f", {})]


def test_a_nullable_string_waits_until_it_cannot_be_null() -> None:
    tool = typed(a={"anyOf": [{"type": "string"}, {"type": "null"}]})
    for written, value in (("null", None), ("nullable", "nullable"), ("", ""), ("none", "none"), ("nul", "nul")):
        assert called(answer("minimax_m2", minimax("f", {"a": written}), tool)) == [("f", {"a": value})]
