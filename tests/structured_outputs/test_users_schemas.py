"""Schemas as users' tools write them: the grammar takes the values that the jsonschema library finds valid, and refuses
others that differ from these in one place."""

import datetime
import decimal
import enum
import json
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from headrace.structured_outputs.conversion import of_params
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

UUID = "123e4567-e89b-12d3-a456-426614174000"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"]
    age: Annotated[float, Field(gt=0, lt=40)]
    friends: list["Cat | Dog"] = []


class Order(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    amount: Annotated[int, Field(multiple_of=5, ge=5, le=100)]
    price: decimal.Decimal
    color: Color | None = None
    pair: tuple[int, str] | None = None
    by_day: dict[datetime.date, float] = {}
    by_id: dict[uuid.UUID, Color] = {}
    codes: dict[Annotated[str, Field(pattern="^[A-Z]{1,3}$")], int] = {}


def of_type(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema()


EMAIL = "^(?!\\.)(?!.*\\.\\.)[a-z.]*[a-z]@([a-z]+\\.)+[a-z]{2,}$"
DURATION = "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$"
DECIMAL = "^(?!^[-+.]*$)[+-]?0*(?:\\d{0,5}|(?=[\\d.]{1,18}0*$)\\d{0,5}\\.\\d{0,12}0*$)"
ZOD = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
USERS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "pydantic": (
        of_type(Order),
        [
            {
                "pet": {"kind": "cat", "lives": 3},
                "amount": 5,
                "price": "1.50",
                "color": "red",
                "pair": [1, "x"],
                "by_day": {"2024-02-28": 1.5},
                "by_id": {UUID: "blue"},
                "codes": {"AB": 1},
            },
            {"pet": {"kind": "dog", "age": 0.5, "friends": [{"kind": "cat"}]}, "amount": 100, "price": 2, "pair": None},
        ],
    ),
    "pydantic, recursive": (
        of_type(list[Dog]),
        [[{"kind": "dog", "age": 1, "friends": [{"kind": "dog", "age": 2.5}]}]],
    ),
    "zod": (
        {
            **ZOD,
            "properties": {
                "email": {"type": "string", "format": "email", "pattern": EMAIL},
                "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                "role": {"anyOf": [{"type": "string", "const": "admin"}, {"type": "null"}]},
                "scores": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[a-z]+$"},
                    "additionalProperties": {"type": "number"},
                },
                "at": {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 2,
                    "items": [{"type": "number"}, {"type": "number"}],
                },
            },
            "required": ["email"],
        },
        [{"email": "a.b@c.org", "age": 3, "role": None, "scores": {"x": 1}, "at": [1, 2.5]}],
    ),
    "zod, one of": (
        {
            "$schema": ZOD["$schema"],
            "oneOf": [
                {**ZOD, "properties": {"type": {"const": name}, name: {"type": "integer"}}, "required": ["type"]}
                for name in "ab"
            ],
        },
        [{"type": "a", "a": 1}, {"type": "b"}],
    ),
    "zod 4": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "lasts": {"type": "string", "format": "duration", "pattern": DURATION},
                "by": {
                    "type": "object",
                    "propertyNames": {"type": "string", "enum": ["a", "b"]},
                    "additionalProperties": {"type": "string"},
                    "required": ["a", "b"],
                },
                "row": {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "boolean"}},
                "one": {"anyOf": [{"type": "string", "const": "a"}, {"type": "number", "const": 1}, {"type": "null"}]},
                "self": {"$ref": "#"},
                "never": {"not": {}},
            },
            "required": ["lasts"],
            "additionalProperties": False,
        },
        [{"lasts": "P1DT2H", "by": {"a": "x", "b": "y"}, "row": ["a", True], "one": 1, "self": {"lasts": "P1W"}}],
    ),
    "pydantic's decimals": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}, {"type": "null"}]},
        ["12.30", 1.5, "-7", None],
    ),
    "schemars": (
        {
            "$schema": ZOD["$schema"],
            "oneOf": [
                {"type": "string", "enum": ["A", "B"]},
                {
                    "type": "object",
                    "required": ["C"],
                    "properties": {"C": {"type": "integer", "format": "uint8", "minimum": 0.0}},
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "required": ["D"],
                    "properties": {
                        "D": {
                            "type": "array",
                            "items": [{"type": "number"}, {"anyOf": [{"$ref": "#/definitions/X"}, {"type": "null"}]}],
                            "maxItems": 2,
                            "minItems": 2,
                        }
                    },
                    "additionalProperties": False,
                },
            ],
            "definitions": {"X": {"type": "string", "maxLength": 1, "minLength": 1}},
        },
        ["A", {"C": 5}, {"D": [1, "x"]}, {"D": [0.5, None]}],
    ),
    ".NET": (
        {
            "type": ["object", "null"],
            "properties": {
                "Name": {"type": ["string", "null"]},
                "N": {"type": ["string", "integer"], "pattern": "^-?\\d+$"},
            },
            "required": ["Name"],
        },
        [{"Name": None, "N": "12"}, {"Name": "x", "N": 5}, None],
    ),
    "OpenAPI 3.0": (
        {
            "allOf": [
                {"$ref": "#/components/schemas/N"},
                {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
                        "tag": {"type": "string", "nullable": True, "example": "x"},
                    },
                    "required": ["id"],
                },
            ],
            "components": {"schemas": {"N": NAMED}},
        },
        [{"name": "x", "id": 1, "tag": "y"}],
    ),
    "draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "object",
            "properties": {"n": {"type": "number", "minimum": 0, "exclusiveMinimum": True}, "e": {"enum": ["x", None]}},
            "required": ["n"],
            "dependencies": {"e": ["f"]},
        },
        [{"n": 0.5}, {"n": 1, "e": "x", "f": 1}],
    ),
    "password": (
        {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[a-z])(?=.*\\d)[A-Za-z\\d]{8,32}$"},
        ["Abcdefg1", "1aB45678"],
    ),
    "words": (
        {"type": "string", "maxLength": 300, "pattern": "^(?:\\S+\\s+){0,49}\\S+$"},
        ["A summary of the service. " * 9 + "End"],
    ),
}


def changed(value: Any) -> Iterator[Any]:
    """Values that differ from one in one place."""
    yield from (None, "zz", -1, 1.25, True, [], {})
    if isinstance(value, dict):
        yield {**value, "other": 1}
        for name in value:
            yield {other: value[other] for other in value if other != name}
            yield from ({**value, name: one} for one in changed(value[name]))
    elif isinstance(value, list):
        yield from (value + value[-1:], value[:-1])
        for place, item in enumerate(value):
            yield from ([*value[:place], one, *value[place + 1 :]] for one in changed(item))
    elif isinstance(value, str):
        yield from (value + " !", value[1:], value * 40)
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1000)


@pytest.mark.parametrize("name", USERS)
def test_values_are_taken_and_refused_as_jsonschema_does(name: str) -> None:
    schema, valid = USERS[name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    plain, strict = kind(schema), kind(schema, format_checker=kind.FORMAT_CHECKER)
    matcher = matcher_of(of_params(StructuredOutputsParams(json=schema), {}))
    for value in valid:
        assert strict.is_valid(value), value
        assert accepts(matcher, json.dumps(value, ensure_ascii=False)), value
    verdicts = set()
    for value in (other for one in valid for other in changed(one)):
        taken = accepts(matcher, json.dumps(value, ensure_ascii=False))
        assert plain.is_valid(value) or not taken, value
        assert taken or not strict.is_valid(value) or '"format"' in json.dumps(schema), (
            value
        )  # it knows not all of these
        verdicts.add(taken)
    assert False in verdicts
