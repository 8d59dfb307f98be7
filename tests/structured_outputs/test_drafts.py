"""A schema is read as the draft that it names in `$schema` has it: the jsonschema library is of the same opinion."""

import json
import random
from typing import Any

import jsonschema
import pytest

from headrace.structured_outputs.conversion import of_params
from headrace.structured_outputs.grammar import Grammar
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

URIS = {
    **{draft: f"http://json-schema.org/draft-0{draft}/schema#" for draft in (3, 4, 6, 7)},
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
NULL = {"type": "null"}
CASES: list[tuple[int, dict[str, Any], list[Any], list[Any]]] = [
    (4, {"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    (4, {"exclusiveMaximum": True, "maximum": 3, "type": "integer"}, [2], [3]),
    (4, {"minimum": 3, "exclusiveMinimum": False, "type": "integer"}, [3], [2]),
    (4, {"id": "http://a.example/s", "$ref": "#/definitions/x", "definitions": {"x": {"id": "#x", "enum": [0]}}},
     [0], [1]),
    (7, {"type": "array", "items": [NULL], "additionalItems": {"type": "integer"}}, [[None, 1]], [[1]]),
    (7, {"type": "array", "items": NULL, "additionalItems": False}, [[None]], [[1]]),
    (7, {"type": "object", "dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, [{"b": 1}, {}], [{"a": 1}]),
    (7, {"$ref": "#/definitions/x", "definitions": {"x": NULL}}, [None], [1]),
    (7, {"$ref": "#/definitions/x", "minimum": 5, "definitions": {"x": {"type": "integer"}}}, [3], ["x"]),
    (4, {"propertyNames": {"pattern": "^a"}, "patternProperties": {".*": NULL}}, [{"b": None}], [{"a": 1}]),
    (4, {"if": {}, "then": {"required": ["a"]}, "else": False, "type": "object"}, [{"b": 1}], [5]),
    (4, {"properties": {"if": {"type": "integer", "const": 1}, "const": {"contains": False}}, "type": "object"},
     [{"if": 2, "const": [1]}], [{"if": "x"}]),
    (4, {"dependencies": {"if": {"properties": {"not": NULL}}}}, [{"if": 1}, {"not": 1}], [{"not": 2, "if": 1}]),
    (2019, {"items": [NULL], "prefixItems": [{"type": "integer"}], "dependentRequired": {"a": ["b"]}},
     [[None], {"b": 1}], [[1], {"a": 1}]),
    (2020, {"prefixItems": [{"type": "integer"}], "type": "array"}, [[1]], [["x"], 5]),
]  # fmt: skip
NEWER = {
    3: ["allOf", "anyOf", "oneOf", "not", "minProperties", "maxProperties"],
    4: ["const", "contains", "propertyNames"],
    6: ["if"],
    7: ["dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$recursiveRef"],
    2019: ["prefixItems", "$dynamicRef"],
}
"""Draft -> keywords that came with the next one, and change what a schema accepts by themselves."""


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return of_params(StructuredOutputsParams(json=schema), {})


@pytest.mark.parametrize(("draft", "schema", "fit", "unfit"), CASES, ids=range(len(CASES)))
def test_a_schema_is_read_as_its_draft_has_it(
    draft: int, schema: dict[str, Any], fit: list[Any], unfit: list[Any]
) -> None:
    whole = {"$schema": URIS[draft], **schema}
    judge = jsonschema.validators.validator_for(whole)(whole)
    assert [value for value in fit if not judge.is_valid(value)] == []
    assert [value for value in unfit if judge.is_valid(value)] == []
    matcher = matcher_of(grammar_of(whole))
    assert [value for value in fit if not accepts(matcher, json.dumps(value))] == []
    assert [value for value in unfit if accepts(matcher, json.dumps(value))] == []


@pytest.mark.parametrize("draft", NEWER)
def test_newer_keywords_are_notes_to_the_reader_whatever_they_say(draft: int) -> None:
    newer = [keyword for since, keywords in NEWER.items() if since >= draft for keyword in keywords]
    for keyword in newer:
        said = random.choice([False, 5, "#/nowhere", [False], {"type": "null"}, {"a": ["b"]}])
        inner = {"type": "object", "properties": {keyword: {"type": "integer"}}}
        noted = {"$schema": URIS[draft], "items": {**inner, keyword: said}, keyword: said}
        assert grammar_of(noted) == grammar_of({"$schema": URIS[draft], "items": inner}), (draft, keyword, said)
        known = grammar_of({"$schema": URIS[draft], "properties": {keyword: {"type": "null"}}})
        assert not accepts(matcher_of(known), json.dumps({keyword: 1})), (draft, keyword)


def test_an_address_beside_a_reference_is_none_up_to_draft_7() -> None:
    schema = {
        "$schema": URIS[7],
        "$id": "http://a/b.json",
        "properties": {"x": {"$id": "http://c/d.json", "$ref": "#/definitions/i"}},
        "definitions": {"i": {"type": "integer"}},
    }
    matcher = matcher_of(grammar_of(schema))
    assert [accepts(matcher, text) for text in ('{"x": 1}', '{"x": "y"}')] == [True, False]
