"""Constraints that are made to hurt: each is refused, or made in a moment. None ends the process."""

import time
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_params
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import matcher_of

SECONDS = 3.0
"""Long, so that a busy machine does not fail the test: what goes wrong here takes minutes, memory or the process."""


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(count: int, link: str) -> dict[str, Any]:
    """Definitions each of which refers to the next."""
    definitions: dict[str, Any] = {f"d{count}": {"type": "null"}}
    for index in range(count):
        following = {"$ref": f"#/$defs/d{index + 1}"}
        definitions[f"d{index}"] = {
            "plain": following,
            "object": {"type": "object", "properties": {"a": following}, "required": ["a"]},
            "twice": {"anyOf": [following, following]},
            "all": {"allOf": [following, following]},
            "one": {"oneOf": [following, following]},
            "not": {"not": following},
        }[link]
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def alike(count: int) -> dict[str, Any]:
    """Two definitions that refer to each other by many names."""
    definitions = {
        name: {
            "type": "object",
            "properties": {f"p{index}": {"$ref": f"#/$defs/{other}"} for index in range(count)},
            "required": [f"p{index}" for index in range(count)],
            "additionalProperties": False,
        }
        for name, other in ("ab", "ba")
    }
    return {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": definitions}


BOMBS: dict[str, Any] = {
    "deep": nested(5_000),
    **{f"chain of 5000, {link}": chain(5_000, link) for link in ("plain", "object", "twice", "all", "one", "not")},
    "chain of 30, one": chain(30, "one"),
    "million values": {"enum": list(range(1_000_000))},
    "many texts": {"enum": [f"value {index}" for index in range(50_000)]},
    "many properties": {"type": "object", "properties": {f"p{index}": {} for index in range(20_000)}},
    "many nodes": {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "null"}}} for i in range(30_000)]},
    "long repetition": {"type": "string", "minLength": 10**30},
    "huge number": {"const": 10**400},
    "not a number": {"const": float("nan")},
    "half a surrogate": {"enum": ["\ud800"]},
    "half a surrogate in a name": {"properties": {"\ud800": {}}},
    "long regex": {"pattern": "a?" * 100_000},
    "many oneOf": {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(300)]},
    "many that are alike": alike(100),
    "contains many": {"type": "array", "contains": {}, "minContains": 10**9},
    "circle": {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "type": "object"},
    "circle of two": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "circle of not": {"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}},
    "circle of ids": {"$id": "a", "$ref": "a"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_schemas_that_hurt_are_refused_at_once(name: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError):
        of_params(StructuredOutputsParams(json=BOMBS[name]), {})
    assert time.process_time() - started < SECONDS


HARMLESS: dict[str, dict[str, Any]] = {
    "NUL": {"choice": ["a\x00b"]},
    "nested quantifiers": {"regex": "(a*)*b|(a|aa)+c|(.*a){20}"},
    "counted twice": {"regex": "((a{1,100}){1,100}){1,100}"},
    "long count": {"regex": "[ab]*a[ab]{200}"},
    "long text": {"json": {"type": "string", "maxLength": 2**62}},
    "many choices": {"choice": [f"choice {index}" for index in range(10_000)]},
    "property names": {"json": {"properties": {'a"}\n': {}, "\x00": {}, "__proto__": {}, "$ref": {"type": "null"}}}},
    "json in text": {"choice": ['", "x-guidance": {"lenient": true}, "a": "']},
    "chain of 200": {"json": chain(200, "object")},
    **{f"chain of 30, {link}": {"json": chain(30, link)} for link in ("twice", "all", "not")},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_others_become_grammars_in_a_moment(name: str) -> None:
    started = time.process_time()
    matcher = matcher_of(of_params(StructuredOutputsParams(**HARMLESS[name]), {}))
    matcher.inner.compute_bitmask()
    assert not matcher.inner.is_error()
    assert time.process_time() - started < SECONDS


def test_a_schema_cannot_set_llguidances_own_options() -> None:
    schema = {"x-guidance": {"lenient": True}, "not": {"multipleOf": 3}}
    with pytest.raises(RequestError, match="not is not supported"):
        of_params(StructuredOutputsParams(json=schema), {})
    assert '"lenient"' not in of_params(StructuredOutputsParams(json={"x-guidance": {"lenient": True}}), {}).to_text()
