"""Types of values that are written as bare text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.parsers.scalars import json_number
from headrace.parsers.tools import FunctionTool
from headrace.parsers.typed_values import ValueSchema, is_text, json_of, parameters_of


def tool(**properties: Any) -> FunctionTool:
    return FunctionTool("f", {"type": "object", "properties": properties})


def types_of(found: FunctionTool | None, name: str) -> frozenset[str]:
    return parameters_of(found).member(name).types[0]


def read(text: str, schema: dict[str, Any], *, guess: bool = False) -> Any:
    """What a parameter of this schema gets from a text."""
    types, values = parameters_of(tool(a=schema)).member("a").types
    return json.loads(json_of(text, types, values, guess=guess))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "42", "42"),
        ("string", "null", "null"),
        ("string", '"x"', '"x"'),
        ("string", " x ", " x "),
        ("integer", "42", 42),
        ("integer", " -7\n", -7),
        ("integer", "+07", 7),
        ("integer", "3.0", 3),
        ("integer", "1_000", 1000),
        ("integer", "3.5", 3.5),
        ("integer", "null", None),
        ("integer", "many", "many"),
        ("integer", "9" * 5000, "digits"),
        ("number", "1.50", 1.5),
        ("number", ".5", 0.5),
        ("number", "5.", 5),
        ("number", "-1e-3", -0.001),
        ("number", "nan", "nan"),
        ("number", "Infinity", "Infinity"),
        ("number", "1e999", float("inf")),
        ("boolean", "true", True),
        ("boolean", "False", False),
        ("boolean", "TRUE", True),
        ("boolean", "1", True),
        ("boolean", "0", False),
        ("boolean", "yes", "yes"),
        ("null", "null", None),
        ("null", "None", None),
        ("object", '{"a": [1]}', {"a": [1]}),
        ("object", "{'a': None}", {"a": None}),
        ("object", '{\\"a\\": 1}', {"a": 1}),
        ("object", '"{\\"a\\": 1}"', {"a": 1}),
        ("object", "{a", "{a"),
        ("object", '{"a": "x\ny"}', {"a": "x\ny"}),
        ("array", "[1, 2]", [1, 2]),
        ("array", "('a', True)", ["a", True]),
        ("array", "a, b", "a, b"),
        ("array", "[NaN]", "[NaN]"),
        ("array", "[1e999]", [float("inf")]),  # JSON has such numbers, and a grammar may have written one
        ("float", "2", 2),
        ("int32", "2", 2),
        ("dict", "{}", {}),
        ("bool", "true", True),
        ("list", "[]", []),
        ("str", "2", "2"),
    ],
)
def test_values_of_a_type(kind: str, text: str, value: Any) -> None:
    """A text that cannot be of the type is what it says as JSON, or stays a string."""
    if value == "digits":  # more than Python converts
        assert json_of(text, frozenset({kind})) == text
    else:
        assert read(text, {"type": kind}) == value


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "NULL", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "boolean"]}, "1", "1"),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, "{}", {}),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[a]", "[a]"),
        ({"anyOf": [{"anyOf": [{"type": "integer"}]}, {"type": "null"}]}, "5", 5),
        ({"allOf": [{"type": "number"}, {"minimum": 3}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"enum": ["none", None]}, "none", "none"),
        ({"enum": ["none", None]}, "null", None),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"enum": ["true", "maybe"]}, "true", "true"),
        ({"properties": {"x": {}}}, '{"x": 1}', {"x": 1}),
        ({"items": {}}, "[1]", [1]),
        ({"description": "what"}, "5", "5"),
        ({}, "null", "null"),
    ],
)
def test_values_of_a_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    assert read(text, schema) == value


def test_types_behind_references() -> None:
    """A reference leads to its definition, whatever its form; one that leads in circles or nowhere says nothing."""
    parameters = {
        "$defs": {"count": {"type": "integer"}, "a/b~c": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}},
        "properties": {
            "n": {"$ref": "#/$defs/count"},
            "m": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
            "b": {"$ref": "#/$defs/a~1b~0c"},
            "l": {"$ref": "#/$defs/loop"},
            "x": {"$ref": "https://example.org"},
            "y": {"$ref": "#/nowhere/at/all"},
        },
    }
    known = {name: types_of(FunctionTool("f", parameters), name) for name in parameters["properties"]}
    nothing = frozenset[str]()
    assert known == {
        "n": {"integer"},
        "m": {"integer", "null"},
        "b": {"boolean"},
        "l": nothing,
        "x": nothing,
        "y": nothing,
    }


def test_parameters_of_alternatives_and_beyond_the_declared() -> None:
    either = FunctionTool(
        "f", {"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"type": "null"}}}]}
    )
    assert types_of(either, "a") == {"integer", "null"}
    others = FunctionTool("f", {"properties": {"a": {}}, "additionalProperties": {"type": "number"}})
    assert types_of(others, "b") == {"number"}
    assert types_of(tool(a={"type": "integer"}), "b") == frozenset()
    assert types_of(None, "a") == frozenset()
    assert [parameters_of(others).declares(name) for name in "ab"] == [True, False]
    assert parameters_of(FunctionTool("f")).declares("anything")


def test_values_within_values() -> None:
    """Each has the schemas that its place has, in whichever alternative and behind whichever reference."""
    parameters = {
        "$defs": {"point": {"properties": {"x": {"type": "number"}}, "additionalProperties": {"type": "boolean"}}},
        "properties": {
            "list": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}},
            "pair": {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": {"type": "boolean"}},
            "old": {"items": [{"type": "string"}], "additionalItems": {"type": "integer"}},
            "either": {"oneOf": [{"prefixItems": [{"type": "string"}]}, {"items": {"type": "null"}}]},
        },
    }
    root = parameters_of(FunctionTool("f", parameters))

    def types(schema: ValueSchema) -> set[str]:
        return set(schema.types[0])

    point = root.member("list").item(5)
    assert types(point) == {"object", "null"}
    assert [types(point.member(name)) for name in ("x", "y")] == [{"number"}, {"boolean"}]
    assert [types(root.member("pair").item(place)) for place in range(4)] == [
        {"string"}, {"integer"}, {"boolean"}, {"boolean"},
    ]  # fmt: skip
    assert [types(root.member("old").item(place)) for place in range(3)] == [{"string"}, {"integer"}, {"integer"}]
    assert [types(root.member("either").item(place)) for place in range(2)] == [{"string", "null"}, {"null"}]
    assert types(root.member("none").item(0).member("x").item(1)) == set()


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": {"a": True}},
        {"properties": {"a": {"type": 5}}},
        {"anyOf": {"a": 1}},
        {"properties": {"a": {"enum": "x", "anyOf": [None, 3]}}},
        {"properties": {"a": {"type": [["x"], None]}}},
        {"$ref": 7},
        {"properties": {"a": {"enum": [[1], {"b": 2}]}}},
        {"properties": 5},
        {"properties": {"a": {"prefixItems": {}, "items": 3, "properties": "x", "additionalProperties": [1]}}},
    ],
)
def test_a_schema_that_is_none_says_nothing_and_breaks_nothing(parameters: dict[str, Any]) -> None:
    root = parameters_of(FunctionTool("f", parameters))
    assert root.declares("a")
    assert root.member("a").item(0).member("x").types == (frozenset(), ())
    types, values = root.member("a").types
    assert json.loads(json_of("x", types, values)) == "x"


def test_a_schema_of_any_size_is_read_in_bounded_time() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100_000):
        deep = {"anyOf": [deep]}
    assert types_of(tool(a=deep), "a") == frozenset()
    assert types_of(tool(a={"anyOf": [{"type": "integer"} for _ in range(100_000)]}), "a") == {"integer"}


@pytest.mark.parametrize("text", ["[" * 30_000, "{'a':" * 15_000, "(" * 30_000, '"' + "\\" * 30_001, "-" * 30_000])
def test_a_value_of_any_depth_is_read(text: str) -> None:
    assert json.loads(json_of(text, frozenset(), guess=True)) == text
    assert json.loads(json_of(text, frozenset({"array", "object"}))) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-1.5", -1.5),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ("[1, 'x']", [1, "x"]),
        ("{'a', 'b'}", ["a", "b"]),
        ("'quoted'", "quoted"),
        ('"quoted"', "quoted"),
        ("2025-01-02", "2025-01-02"),
        ("3 apples", "3 apples"),
        ("x + 1", "x + 1"),
        ("[x]", "[x]"),
        ("{a: 1}", "{a: 1}"),
        ("", ""),
        (" ", " "),
        ("(7)", 7),
        ("(7,)", [7]),
        ("()", []),
        ("don't", "don't"),
        ("nullable", "nullable"),
        ("f(x)", "f(x)"),
    ],
)
def test_guessed_values(text: str, value: Any) -> None:
    """Where no schema says it, what looks like JSON or Python is that, and anything else is a string."""
    assert read(text, {}, guess=True) == value


def test_what_is_a_string_for_certain() -> None:
    """Such a value is handed on before it is whole; what then comes makes no difference."""
    either, nothing = frozenset({"string", "null"}), frozenset[str]()
    for beginning in ("x", "nulls", "nope", "1", "{"):
        assert is_text(beginning, either, guess=False)
    for beginning in ("", "n", "nul", "NULL"):
        assert not is_text(beginning, either, guess=False)
    assert is_text("x", nothing, guess=True)
    assert not any(is_text(beginning, nothing, guess=True) for beginning in ("", " ", "1", "[", "t", "'", "-", "N"))
    assert not is_text("x", frozenset({"string", "integer"}), guess=True)


@pytest.mark.parametrize("text", ["", "-", ".", "1.2.3", "0x10", "1e", "e5", "１", "--1", "1 2", "_", "1e999"])
def test_what_is_no_number(text: str) -> None:
    assert json_number(text) is None
