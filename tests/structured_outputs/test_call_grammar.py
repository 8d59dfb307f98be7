"""What a grammar of calls lets a model write, the parser of the same format reads: calls of the tools that there are,
with arguments that fit their schemas."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest

from headrace.engine.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.parsers.formats import ToolFormat
from headrace.parsers.output_parser import Answer, OutputParser, join, parse
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from headrace.parsers.written import WRITTEN, Literals, Markup, Maybe, Tagged, Written
from headrace.structured_outputs.call_grammar import calls_grammar
from headrace.structured_outputs.vocabulary import marks, vocabulary
from tests.published import SHARED, tokenizer_folder
from tests.speed import PATIENCE
from tests.structured_outputs.walks import Vocabulary, fits, of_bytes, random_tools, walk

FORMATS = sorted({format.name for format in TOOL_FORMATS.values()})
WEATHER = FunctionTool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
    },
    strict=True,
)
CLOCK = FunctionTool("clock", {"type": "object", "properties": {}}, strict=True)
EXAMPLES = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}',
    "pythonic": "[get_weather(city='Rome', days=2)]",
    "llama4_pythonic": "<|python_start|>[get_weather(city='Rome', days=2)]<|python_end|>",
    "olmo3": "<function_calls>get_weather(city='Rome', days=2)</function_calls>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Rome", days=2)]<|tool_call_end|>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 2}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Rome</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Rome'
    "]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "hy_v3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n</tool_calls>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2"
    "</parameter>\n</function>\n</seed:tool_call>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
    '<steptml:parameter name="city">Rome</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city":"Rome","days":2}<|call|>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}'
    "<|action_end|>",
    "jamba": '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n]</tool_calls>',
    "xlam": '[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
    "hunyuan_a13b": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]</tool_calls>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    '{"city": "Rome", "days": 2}}\n]<|END_ACTION|>',
    "longcat": '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n'
    "</longcat_tool_call>",
}
"""A call as each family's chat template writes it."""


def markup_of(format: ToolFormat) -> list[str]:
    """The pieces of markup of a format."""
    found: list[Markup | None] = [*format.openers, *format.silent]
    written: Written | None = WRITTEN[format.name]
    while written:
        found += [
            written.mark,
            written.begin,
            written.before,
            written.middle,
            written.after,
            written.between,
            written.end,
        ]
        if isinstance(written.arguments, Tagged):
            tags = written.arguments
            found += [tags.before, tags.middle, tags.middle_json, tags.after]
        elif isinstance(written.arguments, Literals):
            found.append(written.arguments.quote)
        written = written.instead
    return list(dict.fromkeys(piece for markup in found for text in texts(markup or "") for piece in text.split()))


def texts(markup: Markup) -> list[str]:
    if isinstance(markup, str):
        return re.findall(r"\]<\]minimax\[>\[|<[^<>]*>|[^\s<]+", markup)
    return [
        text
        for part in markup
        for text in texts(part.parts if isinstance(part, Maybe) else part)
        if isinstance(text, str)
    ]


def in_quotes(format: ToolFormat) -> bool:
    """Whether markup within a string of JSON is surely text, as where only the end of JSON ends the arguments."""
    return not format.whole_answer and not isinstance(WRITTEN[format.name].arguments, Tagged)


def with_marks(format: ToolFormat) -> Vocabulary:
    """A vocabulary in which each tag of a format is one token."""
    return of_bytes(piece for piece in markup_of(format) if re.fullmatch(r"<.*>|\[[A-Z_]+\]|\].*\[", piece))


def read_in_pieces(text: str, format: ToolFormat, tools: list[FunctionTool], rng: random.Random) -> Answer:
    parser, events, at = OutputParser(format, None, tools), [], 0
    while at < len(text):
        end = at + rng.randint(1, 9)
        events += parser.feed(text[at:end])
        at = end
    return join([*events, *parser.finish(cut=False)])


def check_calls(answer: Answer, tools: list[FunctionTool], *, all_strict: bool) -> None:
    by_name = {tool.name: tool for tool in tools}
    for call in answer.calls:
        arguments = json.loads(call.arguments)
        tool = by_name[call.name]
        if all_strict or tool.strict:
            jsonschema.validate(arguments, tool.parameters or {"type": "object", "maxProperties": 0})


walks = pytest.mark.parametrize("walks", [1, pytest.param(20, marks=pytest.mark.slow)])


@walks
@pytest.mark.parametrize("name", FORMATS)
def test_what_may_be_written_are_calls_of_the_tools(name: str, walks: int) -> None:
    """Markup is written as text and as marks in turn; with which it begins is chance."""
    format, seed = TOOL_FORMATS[name], random.randrange(10**9)
    for place in range(walks):
        words = with_marks(format) if (place + seed) % 2 else of_bytes()
        rng = random.Random(f"{seed} {place}")
        tools = random_tools(rng)
        only = rng.choice([None, None, rng.choice(tools).name])
        at_most = rng.choice([1, None])
        grammar = calls_grammar(format, tools, at_least=1, at_most=at_most, only=only, special=words.marks)
        ids = walk(grammar, words, markup_of(format), rng, in_strings=in_quotes(format))
        if ids is None:
            continue
        text = words.tokenizer.decode_str(ids)
        answer = parse(text, format, None, tools)
        assert answer.calls, (seed, text)
        assert answer.content is None, (seed, text)
        assert not only or {call.name for call in answer.calls} == {only}, (seed, text)
        assert at_most is None or len(answer.calls) == 1, (seed, text)
        check_calls(answer, tools, all_strict=True)
        assert read_in_pieces(text, format, tools, rng) == answer, (seed, text)


@walks
@pytest.mark.parametrize("name", FORMATS)
def test_in_free_text_calls_of_strict_tools_fit(name: str, walks: int) -> None:
    format, seed = TOOL_FORMATS[name], random.randrange(10**9)
    for place in range(walks):
        rng = random.Random(f"{seed} {place}")
        tools, words = random_tools(rng), rng.choice([of_bytes(), with_marks(format)])
        grammar = calls_grammar(format, tools, at_least=0, at_most=None, strict=False, special=words.marks)
        words_and_names = [*markup_of(format), *(tool.name for tool in tools)]
        ids = walk(grammar, words, words_and_names, rng, in_strings=in_quotes(format))
        if ids is None:
            continue
        text = words.tokenizer.decode_str(ids)
        answer = parse(text, format, None, tools)
        check_calls(answer, tools, all_strict=False)
        assert read_in_pieces(text, format, tools, rng) == answer, (seed, text)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_call_as_the_family_writes_it(name: str) -> None:
    format, call = TOOL_FORMATS[name], EXAMPLES[name]
    words = of_bytes([mark for mark in WRITTEN[name].needs if mark in call])
    required = calls_grammar(format, [CLOCK, WEATHER], at_least=1, at_most=None, special=words.marks)
    named = calls_grammar(format, [CLOCK, WEATHER], at_least=1, at_most=1, only="clock", special=words.marks)
    free = calls_grammar(format, [CLOCK, WEATHER], at_least=0, at_most=None, strict=False, special=words.marks)
    assert fits(required, call, words)
    assert fits(required, "\n\n" + call, words) == (name != "openai")
    assert not fits(required, "\n\n\n" + call, words)  # a model could go on so until max_tokens
    assert fits(free, call, words)
    assert not fits(required, "Hello", words)
    assert not fits(named, call, words)
    for grammar in (required, free):
        for wrong in (call.replace("get_weather", "get_whether"), call.replace("2", '"x"')):
            assert not (fits(grammar, wrong, words) and parse(wrong, format, None, [CLOCK, WEATHER]).calls), wrong
    answer = parse(call, format, None, [CLOCK, WEATHER])
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("get_weather", {"city": "Rome", "days": 2})
    ]


def test_every_format_has_an_example_or_writes_as_another_does() -> None:
    examples = [WRITTEN[name] for name in EXAMPLES]
    alike = {"granite-20b-fc", "ernie45", "gigachat3", "minimax", "apertus", "deepseek_v4", "minicpm5"}
    assert {name for name in FORMATS if WRITTEN[name] not in examples} <= alike


@pytest.mark.parametrize("at_least", [0, 1])
def test_a_mark_may_stand_within_a_tag(at_least: int) -> None:
    """As DeepSeek's does; it is a token of its own, and never part of a text."""
    format, words = TOOL_FORMATS["deepseek_v32"], of_bytes(["｜DSML｜"])
    grammar = calls_grammar(format, [CLOCK, WEATHER], at_least=at_least, at_most=None, special=words.marks)
    call = EXAMPLES["deepseek_v32"]
    assert fits(grammar, call, words)
    assert fits(grammar, "a < b\n\n" + call, words) == (not at_least)
    for wrong in (call.replace("get_weather", "get_whether"), call.replace("2", '"x"'), call.replace("</｜", "｜")):
        assert not fits(grammar, wrong, words)
    assert fits(grammar, call.replace("Rome", "a </b> <"), words)


def test_free_text_stays_free() -> None:
    for name in FORMATS:
        text = (
            "<|channel|>final<|message|>Hi, a < b."
            if TOOL_FORMATS[name].whole_answer
            else "Hi, a < b [1] {x}: <b>é</b>"
        )
        free = calls_grammar(TOOL_FORMATS[name], [WEATHER], at_least=0, at_most=None, strict=False, special={})
        assert fits(free, text), name


def test_one_call_where_calls_may_not_be_parallel() -> None:
    for at_least in (0, 1):
        one = calls_grammar(TOOL_FORMATS["hermes"], [WEATHER], at_least=at_least, at_most=1, special={})
        assert fits(one, EXAMPLES["hermes"])
        assert not fits(one, EXAMPLES["hermes"] + "\n" + EXAMPLES["hermes"])


def test_reasoning_and_words_to_the_user_are_messages_of_their_own_in_channels() -> None:
    grammar = calls_grammar(TOOL_FORMATS["openai"], [WEATHER], at_least=1, at_most=1, special={})
    thought = "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant"
    assert fits(grammar, thought + EXAMPLES["openai"])
    assert fits(
        grammar, thought + ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    )
    assert not fits(grammar, thought + "<|channel|>final<|message|>It rains.")
    free = calls_grammar(TOOL_FORMATS["openai"], [WEATHER], at_least=0, at_most=1, strict=False, special={})
    assert fits(free, thought + "<|channel|>final<|message|>It rains.")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gemma4"])
def test_128_tools_compile(name: str, record_property: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "array", "items": {"enum": ["a", "b"]}},
    ]
    tools = [
        FunctionTool(f"tool_{tool}", {"type": "object", "required": [f"p{tool}_0", f"p{tool}_5"],
                                      "properties": {f"p{tool}_{one}": kinds[one % 3] for one in range(15)}})
        for tool in range(128)
    ]  # fmt: skip
    begun = time.perf_counter()
    grammar = calls_grammar(TOOL_FORMATS[name], tools, at_least=1, at_most=None, special={})
    assert grammar.to_text()
    fits(grammar, "")
    record_property("seconds", time.perf_counter() - begun)
    assert time.perf_counter() - begun < 3 * PATIENCE


def test_tools_too_large_for_a_grammar_are_refused_by_name() -> None:
    tools = [
        FunctionTool(f"f{tool}", {"properties": {f"p{tool}_{one}": {"type": ["string", "null"]} for one in range(150)}})
        for tool in range(128)
    ]
    with pytest.raises(RequestError, match=r"tools have schemas of \d+ characters"):
        calls_grammar(TOOL_FORMATS["hermes"], tools, at_least=1, at_most=None, special={})


def test_null_among_strings_is_null_only_without_white_space() -> None:
    """With white space around it a parser reads the text "null " there, which is none of the values."""
    tool = FunctionTool("f", {"type": "object", "properties": {"x": {"enum": ["12", None]}}, "required": ["x"]})
    format, words = TOOL_FORMATS["qwen3_coder"], of_bytes(WRITTEN["qwen3_coder"].needs)
    grammar = calls_grammar(format, [tool], at_least=1, at_most=1, special=words.marks)
    call = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
    for value in ("null", "12"):
        assert fits(grammar, call.format(value), words)
        [found] = parse(call.format(value), format, None, [tool]).calls
        assert json.loads(found.arguments) == {"x": None if value == "null" else value}
    assert not fits(grammar, call.format("null "), words)
    assert not fits(grammar, call.format("\tnull"), words)


def test_what_cannot_be_held_is_refused_by_name_and_path() -> None:
    unknown = FunctionTool("f", {"type": "object", "properties": {"x": {"type": "array", "extends": {}}}})
    unique = FunctionTool("f", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
    odd = FunctionTool("f", {"type": "object", "properties": {"a\nb": {"type": "string"}}, "required": ["a\nb"]})
    for name in ("hermes", "qwen3_coder", "pythonic"):
        with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.properties\.x\.extends"):
            calls_grammar(TOOL_FORMATS[name], [unknown], at_least=1, at_most=None, special={})
    for name in ("pythonic", "gemma4"):
        with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.properties\.x\.uniqueItems is not"):
            calls_grammar(TOOL_FORMATS[name], [unique], at_least=1, at_most=None, special={})
    for name in ("qwen3_coder", "pythonic", "gemma4"):
        with pytest.raises(RequestError, match=r"tools\[0\].*a\\nb"):
            calls_grammar(TOOL_FORMATS[name], [odd], at_least=1, at_most=None, special={})
    few = FunctionTool("f", {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2})
    nested = FunctionTool("f", {"type": "object", "properties": {"a": {"type": "object", "maxProperties": 3}}})
    for name in ("qwen3_coder", "pythonic", "gemma4"):
        with pytest.raises(RequestError, match=r"tools\[0\].*minProperties"):
            calls_grammar(TOOL_FORMATS[name], [few], at_least=1, at_most=None, special={})
    with pytest.raises(RequestError, match=r"tools\[0\].*maxProperties"):
        calls_grammar(TOOL_FORMATS["gemma4"], [nested], at_least=1, at_most=None, special={})
    for name in ("qwen3_coder", "pythonic"):
        calls_grammar(TOOL_FORMATS[name], [nested], at_least=1, at_most=None, special={})
    listed = FunctionTool("f", {"type": ["array", "null"]})
    for name in ("hermes", "qwen3_coder", "pythonic"):
        with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.type must be 'object'"):
            calls_grammar(TOOL_FORMATS[name], [listed], at_least=1, at_most=None, special={})
    with pytest.raises(RequestError, match="nothing"):
        calls_grammar(TOOL_FORMATS["hermes"], [WEATHER], at_least=1, at_most=1, only="nothing", special={})


def test_a_schema_that_refers_to_itself() -> None:
    tree = {"type": "object", "properties": {"value": {"type": "integer"}, "more": {"$ref": "#/$defs/tree"}}}
    parameters = {"type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    tool = FunctionTool("grow", parameters)
    for name, text in {
        "hermes": '<tool_call>{"name": "grow", "arguments": {"tree": {"value": 1, "more": {"value": 2}}}}</tool_call>',
        "glm45": '<tool_call>grow<arg_key>tree</arg_key><arg_value>{"value": 1, "more": {"value": 2}}</arg_value>'
        "</tool_call>",
        "pythonic": '[grow(tree={"value": 1, "more": {"value": 2}})]',
        "gemma4": "<|tool_call>call:grow{tree:{value:1,more:{value:2}}}<tool_call|>",
    }.items():
        grammar = calls_grammar(TOOL_FORMATS[name], [tool], at_least=1, at_most=1, special={})
        assert fits(grammar, text), name
        assert not fits(grammar, text.replace("2", "true")), name


@pytest.mark.parametrize(
    ("name", "folder"), [("qwen3_coder", "qwen3"), ("hermes", "minimind"), ("mistral", "mistral-v3")]
)
def test_with_the_tokens_of_a_model(name: str, folder: str) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder(folder))
    tokens = vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    words, format, seed = Vocabulary(tokens, marks(tokenizer)), TOOL_FORMATS[name], random.randrange(10**9)
    for place in range(2):
        rng = random.Random(f"{seed} {place}")
        tools = random_tools(rng)
        grammar = calls_grammar(format, tools, at_least=1, at_most=None, special=words.marks)
        ids = walk(grammar, words, markup_of(format), rng, in_strings=in_quotes(format))
        if ids is not None:
            text = tokenizer.backend.decode(ids, skip_special_tokens=False)
            answer = parse(text, format, None, tools)
            assert answer.calls, (seed, text)
            assert answer.content is None, (seed, text)
            check_calls(answer, tools, all_strict=True)


STEERED = {
    "the arguments before the name, or under another key": [
        "pre_v11",
        "with_python_tag",
        "without_python_tag",
        "then_tool_call",
    ],
    "more than eight blanks between two tokens of JSON": ["multiline_param_", "detect_and_parse_xml_format"],
    "another way of writing than the family's own": [
        "json_simple",
        "json_multiple",
        "eot_token_filtering",
        "incremental_sing",
        "collapsed_tags",
        "zero_arg_tool",
    ],
    "a value that its schema does not allow": [
        "multi_typed_schema",
        "string_attr_true",
        "escaped_json",
        "nested_array",
    ],
    "a type that JSON Schema does not have": ["single_quote", "type_conversion"],
    "a function that is no tool": ["dotted_function_name"],
}
"""Samples that no grammar here takes, by what is special about them."""


def test_documented_calls_are_taken() -> None:
    path = SHARED / "data" / "parser-texts" / "tool_calls.jsonl"
    if not path.is_file():
        pytest.skip("no folder ../shared/data/parser-texts beside the repository")
    refused = []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["expected"]["tool_calls"]]
    for row in rows:
        format, text = TOOL_FORMATS[row["parser"]], row["text"].strip()
        functions = [tool.get("function", tool) for tool in row["tools"]]
        tools = {one["name"]: one.get("parameters") or {} for one in functions}
        tools |= {call["name"]: {} for call in row["expected"]["tool_calls"] if call["name"] not in tools}
        words = of_bytes(mark for mark in WRITTEN[format.name].needs if mark in text)
        held = [FunctionTool(name, schema, strict=bool(schema.get("properties"))) for name, schema in tools.items()]
        try:
            grammar = calls_grammar(format, held, at_least=0, at_most=None, strict=False, special=words.marks)
            taken = fits(grammar, text, words)
        except RequestError:
            taken = False
        if not taken and not any(part in row["name"] for parts in STEERED.values() for part in parts):
            refused.append((row["parser"], row["name"]))
    assert not refused
