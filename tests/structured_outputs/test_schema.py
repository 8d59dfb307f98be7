"""Each keyword of JSON Schema: values that a grammar takes and refuses as jsonschema does, or a refusal by path."""

import datetime
import json
import random
from typing import Any

import jsonschema
import pytest

from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_params, of_response_format
from headrace.structured_outputs.formats import REFUSED_FORMATS
from headrace.structured_outputs.regex import checked_regex
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

OPTIONAL = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "additionalProperties": False}
ONE_FORMAT = {
    "date": ("2024-02-29", "2024-13-01"), "time": ("10:11:12Z", "25:00:00Z"),
    "date-time": ("2024-02-29T10:11:12.5+01:00", "2024-02-29"), "duration": ("P1DT2H", "1 day"),
    "email": ("a.b@example.org", "a b"), "hostname": ("a-1.example", "-a.example"), "ipv4": ("127.0.0.1", "1.2.3"),
    "ipv6": ("::1", ":::1"), "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "uri": ("https://a.example/b?c#d", "a b"), "uri-reference": ("../a?b#c", "a b"),

    "uri-template": ("/a/{b,c*}{?d:3}", "/a/{b"),

}  # fmt: skip
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({}, [None, 1, "x", [1], {"a": []}], []),
    *(({"type": name}, [value], [{"x": 1} if name != "object" else 5])
      for name, value in (("null", None), ("boolean", True), ("integer", -3), ("number", 2.5), ("string", "é\n"),
                          ("array", [1, "x"]), ("object", {"k": None}))),
    ({"type": ["string", "null"]}, ["x", None], [1]),
    ({"type": "integer"}, [0, 10], [1.5, "1"]),
    ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, 1]),
    ({"const": 5, "type": "integer"}, [5], [6]),
    ({"enum": ["a", 1, None, True, [1]]}, ["a", 1, None, True, [1]], ["b", 2, False, []]),
    ({"enum": ["a", 1, "long"], "type": "string", "maxLength": 2}, ["a"], [1, "long"]),
    ({"type": "integer", "minimum": -2, "maximum": 5}, [-2, 5], [-3, 6]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5}, [0.1, 1.25], [0, 1.5]),
    ({"type": "integer", "multipleOf": 7}, [0, 14, -21], [1]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a[0-9]+$"}, ["a1"], ["a", "ba1"]),
    ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
    ({"type": "string", "pattern": "a($|/)"}, ["a", "ba", "a/b"], ["ab"]),
    ({"type": "string", "pattern": "(^a$|^b$)"}, ["a", "b"], ["xa", "ax", "ab"]),
    ({"type": "string", "pattern": "(^|,)a+(,|$)"}, ["a", "x,aa", "a,x", "x,a,x"], ["xa", "ax", ""]),
    ({"minLength": 2}, ["ab", 1, None], ["a"]),
    ({"maximum": 2}, [1, "x"], [3]),
    ({"required": ["a"]}, [{"a": 1}, 5], [{}]),
    ({"items": {"type": "integer"}}, [[1], "x"], [["x"]]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]],
     [[], [1, 2, 3], ["x"]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False}, [[], [1, None]],
     [["x"]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ({"anyOf": [{"type": "string", "uniqueItems": True}, {"type": "array"}]}, [[1, 1], "a"], []),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    ({"type": "object", **OPTIONAL}, [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}], [{"a": "x"}, {"c": 1}]),
    ({"type": "object", **OPTIONAL, "required": ["b"]}, [{"b": "x"}], [{"a": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "y"}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
     [{}, {"xa": None}], [{"xa": 1}, {"a": None}]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", **OPTIONAL, "minProperties": 1}, [{"a": 1}, {"b": "x"}], [{}]),
    ({"type": "object", **OPTIONAL, "minProperties": 1, "required": ["b"]}, [{"b": "x"}], [{}]),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2, "maxProperties": 2},
     [{"a": 1, "c": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]+$"}}, [{"ab": 1}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1, "b": 2}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    ({"$id": "urn:x:1", "$ref": "urn:x:1#/$defs/a", "$defs": {"a": {"$id": "urn:x:2", "type": "integer"}}}, [1], ["x"]),
    ({"type": "object", **OPTIONAL, "dependentRequired": {"a": ["b"]}}, [{}, {"b": "x"}, {"a": 1, "b": "x"}],
     [{"a": 1}]),
    ({"type": "object", **OPTIONAL, "dependentSchemas": {"a": {"properties": {"a": {"minimum": 5}}}}},
     [{"b": "x"}, {"a": 6}], [{"a": 4}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "x"], ["xy", None]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 4}]}, [3, 4], [2, "x"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x"], [None]),
    ({"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+$"}, ["a.b", "a."], [".a", "a..b", ""]),
    ({"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?\\d*\\.?\\d*$"}, ["1.5", "-.5"], ["", "-.", "."]),
    ({"type": "string", "pattern": "^(?=.{1,4}\\.?$)[a-z.]+$"}, ["ab.c", "abcd."], ["abcdef", ""]),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, [2], [4, "x"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
      "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"type": "object", "properties": {"kind": {"enum": ["x", "y"]}}, "required": ["kind"],
      "oneOf": [{"properties": {"kind": {"const": "x"}}},
                {"properties": {"kind": {"const": "y"}, "n": {"type": "null"}}}]},
     [{"kind": "x"}, {"kind": "y", "n": None}], [{"kind": "z"}, {"kind": "y", "n": 1}]),
    ({"oneOf": [{"type": "object", "properties": {name: {}}, "additionalProperties": False, "required": [name]}
                for name in "ab"]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"not": {"oneOf": [{"type": "string"}, {"type": "null"}]}}, [1, []], ["x", None]),
    ({"not": {"type": "string"}}, [1, None, []], ["x"]),
    ({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*\\d)\\w{4,6}$"}, ["Abc1", "a2Bcd_"], ["abc1", "Ab1"]),
    ({"type": "object", **OPTIONAL, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}], [{"a": 1, "b": "x"}]),
    ({"type": "integer", "not": {"minimum": 3}}, [2], [3]),
    ({"type": "string", "not": {"minLength": 3}}, ["ab"], ["abc"]),
    ({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}},
     [{}, {"next": {"next": {}}}], [{"next": 1}]),
    ({"$ref": "#/$defs/a~1b%25", "minimum": 3, "$defs": {"a/b%": {"type": "integer"}}}, [3], [2, "x"]),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}}, [{"a": {}}], [{"a": 1}]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64}, [5, -5], [1.5]),
    ({"type": "number", "minimum": 0, "maximum": 1e300}, [1.5], [-1]),
    ({"items": {"$ref": "#"}, "type": "array"}, [[], [[], [[]]]], [[1]]),
    ({"title": "t", "description": "d", "default": 5, "examples": [1], "$comment": "c", "readOnly": True, "x-note": 1,
      "deprecated": True, "contentEncoding": "base64", "type": "integer"}, [1], ["x"]),
    ({"type": "string", "format": "color-of-our-own"}, ["red"], [1]),
]  # fmt: skip


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(("schema", "fit", "unfit"), CASES, ids=lambda case: None)
def test_keywords_are_held(schema: dict[str, Any], fit: list[Any], unfit: list[Any]) -> None:
    """What is marked here is what the jsonschema library finds; the grammar is of the same opinion."""
    judge = jsonschema.Draft202012Validator(schema)
    assert [value for value in fit if not judge.is_valid(value)] == []
    assert [value for value in unfit if judge.is_valid(value)] == []
    matcher = matcher_of(of_params(StructuredOutputsParams(json=schema), {}))
    assert [value for value in fit if not accepts(matcher, text_of(value))] == []
    assert [value for value in unfit if accepts(matcher, text_of(value))] == []


@pytest.mark.parametrize("name", ONE_FORMAT)
def test_formats_are_held(name: str) -> None:
    good, bad = ONE_FORMAT[name]
    matcher = matcher_of(of_params(StructuredOutputsParams(json={"type": "string", "format": name}), {}))
    assert accepts(matcher, text_of(good))
    assert not accepts(matcher, text_of(bad))


REFUSED: list[tuple[Any, str]] = [
    ({"uniqueItems": "yes"}, "uniqueItems must be true or false"),
    ({"contains": {}, "minContains": "x"}, "schema.contains is not supported"),
    ({"items": {"contains": {"type": "null"}, "maxContains": 1}}, "schema.items.contains is not supported"),
    ({"uniqueItems": True}, "schema.uniqueItems is not supported but for arrays of at most one item"),
    ({"items": {"type": "string"}, "uniqueItems": True}, "schema.uniqueItems is not supported but"),
    ({"items": {"enum": list("abc")}, "uniqueItems": True}, "schema.uniqueItems is not supported but"),
    (
        {"oneOf": [{}, {"prefixItems": [{"uniqueItems": True}], "type": "array"}]},
        r"oneOf\[0\] is not supported here",
    ),
    ({"prefixItems": [{"uniqueItems": True}]}, r"schema.prefixItems\[0\].uniqueItems is not supported"),
    ({"patternProperties": {"^x": {"uniqueItems": True}}}, "patternProperties.\\^x.uniqueItems is not supported"),
    ({"additionalProperties": {"uniqueItems": True}}, "schema.additionalProperties.uniqueItems is not supported"),
    ({"$ref": "#/$defs/t", "$defs": {"t": {"uniqueItems": True}}}, r"schema.\$defs.t.uniqueItems is not supported"),
    *(
        ({"not": {name: value}}, f"schema.not is not supported here: what {name} does not accept")
        for name, value in (
            ("contains", {}),
            ("items", {"type": "null"}),
            ("prefixItems", [{}]),
            ("if", {}),
            ("dependentRequired", {"a": ["b"]}),
            ("pattern", "//"),
            ("enum", ["a", 1]),
            ("uniqueItems", True),
            ("const", None),
            ("multipleOf", 2),
            ("patternProperties", {"a": {}}),
            ("propertyNames", {}),
            ("additionalProperties", {"type": "null"}),
            ("dependencies", {"a": ["b"]}),
            ("dependentSchemas", {"a": {}}),
        )
    ),
    ({"oneOf": [{"items": {"type": "null"}}, {"items": {"type": "string"}}]}, "oneOf.0. is .* what items does not"),
    ({"items": {"if": {"required": ["a"]}, "then": {"required": ["b"]}}}, "schema.items.if is not supported"),
    ({"properties": {"a": {}}, "unevaluatedProperties": False}, "schema.unevaluatedProperties is not supported"),
    ({"items": {"unevaluatedItems": False}}, "schema.items.unevaluatedItems is not supported"),
    ({"items": {**OPTIONAL, "minProperties": 2}}, "schema.items.minProperties is not supported beside"),
    ({"items": {**OPTIONAL, "maxProperties": 1}}, "schema.items.maxProperties is not supported beside"),
    *(({"items": {"format": name}}, f"schema.items.format '{name}' is not supported") for name in REFUSED_FORMATS),
    ({"properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, "schema.propertyNames is not supported beside"),
    ({"properties": {"a": {"$id": "http://b/", "items": {"$ref": "#"}}}}, r"properties.a.items.\$ref is not supported"),
    ({"$ref": "#named", "$defs": {"x": {"$anchor": "named"}}}, r"\$ref: '#named' is an anchor"),
    ({"patternProperties": {"^a": {}, "b$": {}}}, "patternProperty regexes /\\^a/ and /b\\$/ are not disjoint"),
    ({"propertyNames": {"pattern": "^a", "maxLength": 2}}, "schema.propertyNames is supported with one of pattern"),
    ({"propertyNames": {"pattern": "^a"}, "patternProperties": {"b": {}}}, "propertyNames is not supported beside"),
    ({"propertyNames": {"type": "integer"}}, "schema.propertyNames is not supported"),
    ({"type": "string", "pattern": "^(/?([a-z]*)($|/))*$"}, "lookarounds not supported yet"),
    *(
        ({"pattern": pattern}, "schema.pattern has .*: look-around cannot be matched in linear time")
        for pattern in (
            r"\bcat",
            "a(?!x)",
            "(?<!_)id$",
            "^(?!ab|c$)[a-c]+$",
            "^(?!a)(?!.*b$)",
            "^(?!x)y|z",
            "^(?!.*ab)",
            "^(?!@@)[\\w@]+$",
        )
    ),
    *(
        ({"patternProperties": {pattern: {}}}, "schema.patternProperties has .*: look-around cannot be matched")
        for pattern in ("^(?=.*b)[ab]+$", "^(?!@@)[\\w@]+$", "(?<=a)b")
    ),
    ({"$dynamicRef": "#x"}, r"\$dynamicRef is not supported"),
    ({"not": {"allOf": 5}}, "not has a keyword with a value that it cannot have"),
    ({"format": ["date"]}, "format must be a text"),
    ({"minProperties": 1, "properties": {"a": {}}, "required": [{}]}, "required must be a text"),
    ({"minimum": 2**63}, "minimum is supported up to"),
    ({"enum": [[2**63]]}, "enum holds .* integers of 64 bits"),
    ({"allOf": [{}, {"not": {"format": "date"}}]}, r"allOf\[1\].not is not supported"),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, r"oneOf\[0\] is not supported"),
    ({"oneOf": [{"type": "null"}, {"type": "array", "extends": {}}]}, r"schema.oneOf\[1\].extends is not"),
    ({"dependentSchemas": {"a": {"not": {"multipleOf": 2}}}}, "schema.dependentSchemas.a.not is not"),
    ({"if": {"multipleOf": 3}, "then": {"minimum": 5}}, "if is not supported"),
    ({"propertyNames": {"not": {"const": "a"}}}, "propertyNames is supported with one of .*; it has not"),
    ({"pattern": r"(a)\1"}, "back-references"),
    ({"$ref": "http://elsewhere.example/schema"}, r"\$ref: .* refers to another document"),
    ({"$ref": "file:///etc/passwd"}, "another document"),
    ({"$ref": "#/$defs/none"}, "refers to nothing"),
    ({"$ref": "#none"}, "anchor"),
    ({"$ref": 5}, r"\$ref must be a text"),
    ({"type": "strin"}, "type must be one or a list of"),
    ({"type": []}, "type must be"),
    ({"properties": []}, "properties must be an object"),
    ({"properties": {"a": 5}}, "properties.a must be a schema"),
    ({"anyOf": {}}, "anyOf must be a list"),
    ({"minLength": -1}, "minLength must be an integer of at least 0"),
    ({"minItems": 2**40}, "minItems must be at most"),
    ({"minimum": "3"}, "minimum must be a number"),
    ({"multipleOf": 0}, "multipleOf must be above 0"),
    ({"required": True}, "required must be a list"),
    ({"enum": []}, "nothing|empty"),
    ({"type": "object", "properties": {"x": {"minimum": 5, "maximum": 3, "type": "integer"}}, "required": ["x"]}, "x"),
    ({"$ref": "#"}, "nothing fits it"),
    (5, "must be a JSON schema"),
    ("{", "is not JSON"),
    ([], "must be a JSON schema"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_held_is_refused_by_path(schema: Any, why: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(RequestError, match=why) as caught:
        of_response_format(form, {})
    assert str(caught.value).startswith("response_format.json_schema.schema")
    assert caught.value.param == "response_format"


def test_only_what_is_referred_to_has_to_be_supported() -> None:
    schema = {
        "type": "null",
        "$defs": {"unused": {"extends": {}}},
        "definitions": {"unused": {"$ref": "http://x"}},
    }
    assert accepts(matcher_of(of_params(StructuredOutputsParams(json=schema), {})), "null")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", **OPTIONAL},
        {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"b": {}}, "$defs": {"base": {"properties": {"a": {}}}}},
        {"$ref": "#/$defs/base", "properties": {"b": {}}, "$defs": {"base": {"properties": {"a": {}}}}},
    ],
)
def test_properties_come_in_the_schemas_order(schema: dict[str, Any]) -> None:
    matcher = matcher_of(of_params(StructuredOutputsParams(json=schema), {}))
    assert accepts(matcher, '{"a": 1, "b": "x"}')
    assert not accepts(matcher, '{"b": "x", "a": 1}')


def test_whitespace_is_bounded_or_as_the_request_says() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}

    def allows(text: str, **options: Any) -> bool:
        return accepts(matcher_of(of_params(StructuredOutputsParams(json=schema, **options), {})), text)

    assert allows("[1,2]")
    assert allows(json.dumps([1, 2], indent=8))
    assert not allows(json.dumps([1, 2], indent=9))
    assert allows("[1,2]", disable_any_whitespace=True)
    assert not allows("[1, 2]", disable_any_whitespace=True)
    assert allows("[1,  2]", whitespace_pattern=" {2}")
    assert not allows("[1,\n2]", whitespace_pattern=" ?")


def test_additional_properties_may_be_off() -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": {}}}, "free": {"additionalProperties": True}}}
    grammar = of_params(StructuredOutputsParams(json=schema, disable_additional_properties=True), {})
    matcher = matcher_of(grammar)
    assert accepts(matcher, '{"a": {"b": 1}, "free": {"x": 1}}')
    assert not accepts(matcher, '{"c": 1}')
    assert not accepts(matcher, '{"a": {"c": 1}}')


def test_regexes_are_read_for_what_cannot_be_linear() -> None:
    for pattern in ("a", r"[b(?=]", r"\\1", r"\(?=", "(?:a)(?i)b(?P<n>c)", "[(?!]", r"\s{2}", ""):
        assert checked_regex(pattern, "regex") == pattern
    for pattern in ("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", r"\bword", r"a\B", r"(a)\1", r"(?P<n>a)(?P=n)", r"\k<n>"):
        with pytest.raises(RequestError, match="linear time"):
            checked_regex(pattern, "structured_outputs.regex")


def test_digits_and_letters_of_a_regex_are_asciis() -> None:
    for pattern, taken, refused in (
        (r"\d+", "12", "١٢"),
        (r"[\w.]+", "a_1.", "é"),
        (r"\[\d\]", "[1]", "[٣]"),
        (r"[^\d]", "a", "1"),
        (r"\D\W", "a-", "-é"),
        (r"\D\W", "é ", "٣-"),
    ):
        grammar = of_params(StructuredOutputsParams(regex=pattern), {})
        assert accepts(matcher_of(grammar), taken)
        assert not accepts(matcher_of(grammar), refused)


@pytest.mark.parametrize("indent", [None, 1, 2, "\t"])
def test_json_may_be_written_in_lines_but_not_be_whitespace_for_ever(indent: int | str | None) -> None:
    value = {"a": [1, {"b": []}], "c": {}}
    grammar = of_params(StructuredOutputsParams(json_object=True), {})
    assert accepts(matcher_of(grammar), json.dumps(value, indent=indent))
    assert accepts(matcher_of(grammar), json.dumps(value, separators=(",", ":")))
    for space in (" " * 9, "\n\n", "\n" + " " * 9, " " * 8 + "\n"):
        assert not accepts(matcher_of(grammar), "{" + space + '"a": 1}')


def test_dates_and_times_are_those_that_there_are() -> None:
    """Python's library, and pydantic in a client, fail at any other."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    kinds = ("date", "time", "date-time")
    matchers = [matcher_of(of_params(StructuredOutputsParams(json={"format": kind}), {})) for kind in kinds]
    for _ in range(300):
        year = rng.choice([0, 1, 4, 1900, 2000, 2023, 2024, 2100, 2400, rng.randrange(10_000)])
        day = f"{year:04}-{rng.randrange(1, 14):02}-{rng.randrange(27, 33):02}"
        day = rng.choice([day, f"{year:04}-02-29"])
        time = f"{rng.choice([0, 23, 24]):02}:{rng.choice([0, 59, 60]):02}:{rng.choice([0, 59, 60]):02}"
        time += rng.choice(["", ".5"]) + rng.choice(["Z", "+23:59", "-00:30", "+24:00", ""])
        zoned = time[-1] == "Z" or time[-6] in "+-"
        valid = [_reads(datetime.date, day), zoned and _reads(datetime.time, time)]
        texts, valid = [day, time, f"{day}T{time}"], [*valid, all(valid)]
        taken = [accepts(one, json.dumps(text)) for one, text in zip(matchers, texts, strict=True)]
        assert taken == valid, (texts, seed)


def _reads(kind: type[datetime.date | datetime.time], text: str) -> bool:
    try:
        kind.fromisoformat(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$", "a.b-c@x-y.org", "a/b@x.org"),
        (r"^[+-\d]+$", "+1-2", "1,2"),
        (r"^[\w-z]+$", "a-z", "`"),
        (r"^[^\s-.]+$", "a+", "a-"),
        (r"^[\\w-z]+$", r"\wxz", "-"),
        (r"^\d-\d$", "1-2", "12"),
        (r"^[!@#$%^&*()_+\-=[\]{};':\"\\|,.<>/?]+$", "[]{}\\", "a"),
        (r"^[^[\]]+$", "ab", "a["),
        (r"^[a-z&&b~~!]+$", "a&~!", "A"),
        (r"^[[:alpha:]-]+$", "a-B", "1"),
        (r"^\<b\>$", "<b>", "b"),
        (r"^[\b\0]\cJ$", "\b\n", "bJ"),
    ],
)
def test_patterns_are_read_as_javascript_and_python_read_them(pattern: str, taken: str, refused: str) -> None:
    """Between brackets Rust, in which llguidance's regular expressions are written, has classes within classes, `&&`
    between them, and no hyphen beside them."""
    schema = {"type": "string", "pattern": pattern}
    as_json, as_text = (
        matcher_of(of_params(StructuredOutputsParams(**field), {})) for field in ({"json": schema}, {"regex": pattern})
    )
    for text in (taken, refused):
        assert accepts(as_json, json.dumps(text)) == accepts(as_text, text) == (text == taken)
