"""Structural tags in both forms: texts that fit and texts that do not."""

import json
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_params, of_response_format
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": OBJECT}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=get>", "schema": OBJECT, "end": "</function>"},
        {"begin": "<function=put>", "schema": {"type": "null"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
TAG = {"type": "tag", "begin": "<f=x>", "content": JSON, "end": "</f>"}
YES = {"type": "tag", "begin": "<f=y>", "content": {"type": "grammar", "grammar": 'root ::= "yes"'}, "end": "</f>"}
XML = {
    "type": "qwen_xml_parameter",
    "json_schema": {
        "type": "object",
        "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "e": {"type": "string", "enum": ["p", "q"]}},
        "required": ["s", "n"],
    },
}


def formatted(**form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        OLD,
        ["", "hi", 'x<function=get>{"a": 1}</function>y<function=put>null</function>'],
        ["<function=got>", "<function="],
    ),
    (formatted(type="const_string", value="a<b"), ["a<b"], ["a", "a<bc"]),
    (formatted(**JSON), ['{"a":1}'], ["{}"]),
    (formatted(type="regex", pattern="[ab]+"), ["abba"], ["", "c"]),
    (formatted(type="any_text", excludes=["no"]), ["", "yes"], ["a no b"]),
    (formatted(type="any_text", max_chars=3), ["", "日本語"], ["abcd"]),
    (
        formatted(type="sequence", elements=[{"type": "const_string", "value": "A: "}, JSON]),
        ['A: {"a":1}'],
        ['{"a":1}', "A: "],
    ),
    (
        formatted(type="sequence", elements=[{"type": "any_text"}, {"type": "const_string", "value": "END"}]),
        ["END", "some text END"],
        ["some text", "END of END"],
    ),
    (formatted(type="or", elements=[JSON, {"type": "const_string", "value": "none"}]), ["none", '{"a":2}'], ["some"]),
    (formatted(type="optional", content={"type": "const_string", "value": "x"}), ["", "x"], ["xx"]),
    (formatted(type="plus", content={"type": "const_string", "value": "x"}), ["x", "xxx"], [""]),
    (formatted(type="star", content={"type": "const_string", "value": "x"}), ["", "xxx"], ["y"]),
    (formatted(type="repeat", min=2, max=3, content={"type": "const_string", "value": "x"}), ["xx", "xxx"], ["x"]),
    (
        formatted(type="tag", begin="<r>", content={"type": "any_text"}, end=["</r>", "</s>"]),
        ["<r>text</r>", "<r></s>"],
        ["<r>text", "<r>a</r>b"],
    ),
    (
        formatted(type="triggered_tags", triggers=["<f="], tags=[TAG, YES]),
        ["", "hi", 'a <f=x>{"a":1}</f> b <f=y>yes</f> c'],
        ["<f=z>", "<f=y>no</f>", '<f=x>{"a":"1"}</f>'],
    ),
    (
        formatted(type="triggered_tags", triggers=["<f="], tags=[TAG, YES], at_least_one=True),
        ["<f=y>yes</f>", "<f=y>yes</f> and more <f=y>yes</f>"],
        ["", "hi", "hi <f=y>yes</f>"],
    ),
    (
        formatted(type="triggered_tags", triggers=["<f="], tags=[YES], stop_after_first=True),
        ["hi", "hi <f=y>yes</f>"],
        ["<f=y>yes</f>.", "<f="],
    ),
    (
        formatted(type="tags_with_separator", tags=[YES, TAG], separator=", ", at_least_one=True),
        ["<f=y>yes</f>", '<f=y>yes</f>, <f=x>{"a":1}</f>'],
        ["", "<f=y>yes</f>,"],
    ),
    (formatted(type="tags_with_separator", tags=[YES], stop_after_first=True), ["", "<f=y>yes</f>"], ["x"]),
    (
        formatted(type="tag", begin="<c>", content=XML, end="</c>"),
        [
            "<c><parameter=s>\nfree < text\n</parameter>\n<parameter=n>\n5\n</parameter>\n</c>",
            "<c><parameter=s></parameter><parameter=n>5</parameter><parameter=e>\nq\n</parameter></c>",
        ],
        ["<c><parameter=s>x</parameter></c>", "<c><parameter=s></parameter><parameter=n>five</parameter></c>"],
    ),
    (
        formatted(
            type="sequence",
            elements=[
                {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                {"type": "triggered_tags", "triggers": ["<f="], "tags": [YES]},
            ],
        ),
        ["<think>hm</think>", "<think>hm</think>so <f=y>yes</f>"],
        ["so", "<think>hm", "<think>hm</think><f=z"],
    ),
    (
        formatted(
            type="tag",
            begin="<o>",
            content={"type": "triggered_tags", "triggers": ["<f="], "tags": [YES]},
            end="</o>",
        ),
        ["<o></o>", "<o>hi <f=y>yes</f> there</o>"],
        ["<o>hi", "<o></o>more"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "fit", "unfit"), CASES, ids=range(len(CASES)))
def test_tags_take_what_they_should(tag: dict[str, Any], fit: list[str], unfit: list[str]) -> None:
    grammar = of_response_format(tag, {})
    assert grammar is not None
    matcher = matcher_of(grammar)
    assert [text for text in fit if not accepts(matcher, text)] == []
    assert [text for text in unfit if accepts(matcher, text)] == []
    as_text = of_params(StructuredOutputsParams(structural_tag=json.dumps(tag)), {})
    assert as_text == grammar


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"type": "structural_tag"}, "response_format must have `format`"),
        (formatted(type="poem"), "response_format.format.type"),
        (formatted(type="const_string"), "response_format.format.value"),
        (formatted(type="sequence", elements=[{"type": "regex", "pattern": "(?=a)"}]), r"elements\[0\].pattern"),
        (formatted(type="tag", begin="<a>", content={"type": "json_schema"}, end=""), "format.content.json_schema"),
        (formatted(type="tag", begin="<a>", content=JSON, end=5), "format.end must be a list"),
        (formatted(type="or", elements=[]), "elements must not be empty"),
        (formatted(type="any_text", max_tokens=5), "max_tokens"),
        (formatted(type="repeat", min=3, max=2, content=JSON), "min must be"),
        (formatted(type="triggered_tags", triggers=["<g"], tags=[YES]), r"tags\[0\].begin"),
        (formatted(type="triggered_tags", triggers=[], tags=[YES]), "at least one tag and one trigger"),
        (OLD | {"structures": [{"begin": 5, "schema": {}, "end": ""}]}, "begin"),
        (
            formatted(type="json_schema", json_schema={"type": "object", "properties": {"x": {"extends": {}}}}),
            "format.json_schema.properties.x.extends is not supported",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_path(form: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError, match=path) as caught:
        of_response_format(form, {})
    assert caught.value.param == "response_format"


def test_nesting_is_bounded() -> None:
    form: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(200):
        form = {"type": "optional", "content": form}
    with pytest.raises(RequestError, match="deep"):
        of_response_format(formatted(**form), {})
