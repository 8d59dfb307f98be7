"""Tools whose parameters exclude each other, in formats that are no JSON: what may be written are calls that fit."""

import random
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.parsers.output_parser import parse
from headrace.parsers.table import TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from headrace.structured_outputs.call_grammar import calls_grammar
from tests.structured_outputs.test_call_grammar import check_calls, in_quotes, markup_of
from tests.structured_outputs.walks import of_bytes, walk

SHORT = {"type": "string", "pattern": "^[a-c]{1,3}$"}
PAIR = {"type": "object", "properties": {"a": SHORT, "b": SHORT}, "additionalProperties": False}
PARAMETERS: dict[str, dict[str, Any]] = {
    "one of two": {**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "not both": {**PAIR, "not": {"required": ["a", "b"]}},
    "one brings the other": {**PAIR, "dependentRequired": {"a": ["b"]}},
    "a kind and what goes with it": {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["kind"],
        "oneOf": [
            {"properties": {"kind": {"const": "x"}}, "required": ["n"]},
            {"properties": {"kind": {"const": "y"}, "n": False}},
        ],
    },
    "two patterns of one text": {
        "type": "object",
        "properties": {"code": {"allOf": [SHORT, {"pattern": "^a"}]}},
        "required": ["code"],
    },
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v32", "pythonic", "functiongemma"])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_what_may_be_written_fits(kind: str, name: str) -> None:
    format, seed = TOOL_FORMATS[name], random.randrange(10**9)
    rng, tools = random.Random(seed), [FunctionTool("f", PARAMETERS[kind], True)]
    grammar = calls_grammar(format, tools, at_least=1, at_most=1, special={})
    words, written = of_bytes(), 0
    for _ in range(4):
        ids = walk(grammar, words, markup_of(format), rng, in_strings=in_quotes(format))
        if ids is not None:
            answer = parse(words.tokenizer.decode_str(ids), format, None, tools)
            assert len(answer.calls) == 1, (seed, answer)
            check_calls(answer, tools, all_strict=True)
            written += 1
    assert written, seed


PATTERNED = {"patternProperties": {"^a": {"type": "integer"}}, "type": "object"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**PATTERNED, "properties": {"x": {}}}, "patternProperties"),
    ({"allOf": [PATTERNED, {"properties": {"a": {}}}]}, "additionalProperties or patternProperties or properties"),
    ({"properties": {"x": {"allOf": [{"prefixItems": [{}]}, {"items": {}}]}}}, "items or prefixItems"),
    ({"properties": {"x": {"const": {"a": 1}}}}, "lists or objects in an enum"),
]


@pytest.mark.parametrize(("parameters", "why"), REFUSED)
def test_what_is_hardly_ever_sent_is_refused_by_name(parameters: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=rf"tools\[0\]\.function\.parameters has .*{why}"):
        calls_grammar(TOOL_FORMATS["gemma4"], [FunctionTool("f", parameters)], at_least=1, at_most=1, special={})
