"""Every spelling of a constraint reaches the engine as one grammar, in completions and chat; conflicts are refused."""

import json
from typing import Any

import pytest

from headrace.structured_outputs.conversion import of_params, of_response_format
from headrace.structured_outputs.grammar import Grammar
from headrace.structured_params import StructuredOutputsParams
from tests.server.fake_engine import FakeEngine, chat, complete, error_of, make_app

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= "yes" | "no"'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def of(**fields: Any) -> Grammar:
    return of_params(StructuredOutputsParams(**fields), {})


def of_form(**form: Any) -> Grammar:
    grammar = of_response_format(form, {})
    assert grammar is not None
    return grammar


SPELLINGS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, of(json_object=True)),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, of(json=SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        of(json=SCHEMA),
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, of(json=SCHEMA)),
    ({"response_format": TAG}, of_form(**TAG)),
    ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}}}, of(regex="a+")),
    ({"response_format": {"type": "regex", "regex": "a+"}}, of(regex="a+")),
    ({"response_format": {"type": "ebnf", "ebnf": GBNF}}, of(grammar=GBNF)),
    ({"structured_outputs": {"json": SCHEMA}}, of(json=SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, of(json=SCHEMA)),
    ({"structured_outputs": {"regex": "a+", "json": None}}, of(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, of(choice=["a", "b"])),
    ({"structured_outputs": {"grammar": GBNF}}, of(grammar=GBNF)),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, of_form(**TAG)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        of(json=SCHEMA, disable_any_whitespace=True),
    ),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, of(json=SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"}, of(json=SCHEMA, whitespace_pattern=" ?")),
    ({"guided_regex": "a+"}, of(regex="a+")),
    ({"guided_choice": ["a", "b"]}, of(choice=["a", "b"])),
    ({"guided_grammar": GBNF}, of(grammar=GBNF)),
    ({"guided_json_object": True}, of(json_object=True)),
    ({"regex": "a+"}, of(regex="a+")),
    ({"ebnf": GBNF}, of(grammar=GBNF)),
    ({"json_schema": json.dumps(SCHEMA)}, of(json=SCHEMA)),
    ({"json_schema": SCHEMA}, of(json=SCHEMA)),
    ({"grammar": GBNF}, of(grammar=GBNF)),
]


@pytest.mark.parametrize("route", [complete, chat])
@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS, ids=lambda value: "-".join(value) if value is dict else "")
def test_spellings_become_one_grammar(route: Any, fields: dict[str, Any], grammar: Grammar) -> None:
    engine = FakeEngine()
    answer = route(make_app(engine), max_tokens=2, n=2, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-headrace-ignored" not in answer.headers
    assert engine.requests[0]["grammar"] == grammar.to_text()


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"regex": "", "guided_json": None}])
def test_a_request_without_constraint_has_no_grammar(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert complete(make_app(engine), max_tokens=2, **fields).status_code == 200
    assert engine.requests[0]["grammar"] == ""


@pytest.mark.parametrize("route", [complete, chat])
def test_a_constraint_and_allowed_tokens_hold_together(route: Any) -> None:
    """The engine samples what both allow; a request for which that is nothing fails alone."""
    engine = FakeEngine()
    assert route(make_app(engine), regex="[0-9]+", allowed_token_ids=[5, 6], max_tokens=2).status_code == 200
    asked = engine.requests[0]
    assert (asked["grammar"], asked["params"].allowed_token_ids) == (of(regex="[0-9]+").to_text(), [5, 6])


def test_two_constraints_are_one_too_many() -> None:
    error = error_of(complete(make_app(), regex="a", guided_choice=["b"]), 400)
    assert "one of" in error["message"]


def test_a_keyword_that_cannot_be_held_is_named_with_its_path() -> None:
    schema = {"type": "object", "properties": {"x": {"not": {"multipleOf": 2}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = error_of(chat(make_app(), response_format=form), 400)
    assert error["param"] == "response_format"
    assert "response_format.json_schema.schema.properties.x.not is not supported" in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_choice": []}, "guided_choice must be a list of 1 to"),
        ({"regex": "("}, "regex: unclosed group"),
        ({"structured_outputs": {"regex": "a{3,2}"}}, "structured_outputs.regex: invalid repetition count"),
        ({"guided_regex": "ab\\"}, "guided_regex ends in a backslash"),
        ({"ebnf": 'rot ::= "x"'}, "ebnf has no rule `root`"),
        ({"guided_json": {"type": "strin"}}, "guided_json.type must be"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern: unclosed group"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "["}},
            "structured_outputs.whitespace_pattern: unclosed",
        ),
    ],
)
def test_errors_begin_with_the_field_as_the_client_wrote_it_and_say_why(fields: dict[str, Any], message: str) -> None:
    error = error_of(complete(make_app(), **fields), 400)
    assert error["message"].startswith(message)
    assert error["param"] == message.split(" ")[0].split(".")[0].rstrip(":")


def test_without_tokenizer_a_grammar_is_refused() -> None:
    engine = FakeEngine(with_tokenizer=False)
    error = error_of(complete(make_app(engine), prompt=[5, 6], regex="a"), 400)
    assert error["param"] == "regex"
    assert "tokenizer" in error["message"]
