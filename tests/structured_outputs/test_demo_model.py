"""The demo model, which knows no JSON, held to schemas and grammars: whatever it finishes fits."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from headrace import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_params
from tests.sampled import sampled
from tests.structured_outputs.test_shared_data import rows

SHORT = {"type": "string", "maxLength": 8}
NAMES = {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 4}
BOUNDED: dict[str, dict[str, Any]] = {
    "a list of objects": {
        "type": "array",
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"name": SHORT, "tags": NAMES},
            "required": ["name", "tags"],
            "additionalProperties": False,
        },
    },
    "objects in objects": {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}, "kind": {"enum": ["town", "a village"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "on": {"type": ["boolean", "null"]},
        },
        "required": ["place", "on"],
        "additionalProperties": False,
    },
    "a choice": {
        "anyOf": [NAMES, {"type": "string", "maxLength": 100}, {"type": "integer", "minimum": 0, "maximum": 99}]
    },
    "references": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/names"}, "b": {"$ref": "#/$defs/names"}},
        "required": ["b"],
        "additionalProperties": False,
        "$defs": {"names": NAMES},
    },
    "a tuple": {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}, NAMES], "items": False, "minItems": 3},
    "values": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3},
    "a format": {"anyOf": [{"type": "boolean"}, {"type": "string", "format": "date"}]},
    "one of": {
        "type": "object",
        "properties": {"a": SHORT, "b": {"type": "boolean"}},
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
}
"""Schemas all of whose values have a largest length"""
MAX_TOKENS = 480
"""What the demo model's context leaves"""


def longest(schema: Any, root: dict[str, Any]) -> float:
    """Characters of the longest text without whitespace that a schema allows: infinite, where it has no bound (or where
    it refers to itself, or says so in another way than those of BOUNDED). A number's digits, which nothing bounds, are
    taken for few."""
    if "$ref" in schema:
        return longest(root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/"), {}), root)
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return max(len(json.dumps(choice)) for choice in choices)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return max(longest(one, root) for one in alternatives)
    kind = schema.get("type")
    if isinstance(kind, list):
        return max(longest({**schema, "type": one}, root) for one in kind)
    if kind == "array":
        first = schema.get("prefixItems", [])
        most = schema.get("maxItems", len(first) if schema.get("items") is False else math.inf)
        items = [longest(one, root) for one in first]
        rest = longest(schema["items"], root) if most > len(items) and isinstance(schema.get("items"), dict) else 0
        return 2 + sum(one + 1 for one in items) + (max(0, most - len(items)) * (rest + 1))
    if kind == "object" and schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return 2 + sum(len(name) + 4 + longest(one, root) for name, one in schema.get("properties", {}).items())
    of_kind = {"string": schema.get("maxLength", math.inf) + 2, "boolean": 5, "null": 4, "integer": 20, "number": 20}
    return of_kind.get(kind, math.inf)


def shared_bounded() -> dict[str, dict[str, Any]]:
    """Those of the shared schemas whose longest text has room in MAX_TOKENS, and that are not refused."""
    found = {}
    for row in rows("json-schemas/schemas.jsonl"):
        try:
            bound = longest(row["schema"], row["schema"])
            of_params(StructuredOutputsParams(json=row["schema"]), {})
        except (RequestError, RecursionError):
            continue
        if bound < MAX_TOKENS / 2:
            found[row["id"]] = row["schema"]
    assert len(found) >= 5, found
    return found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", cpu_threads=1) as llm:
        yield llm


def generate(llm: LLM, wanted: dict[str, Any], **params: Any) -> list[CompletionOutput]:
    given = {"max_tokens": 200, "seed": random.randrange(2**31), "n": 3} | params
    held = StructuredOutputsParams(**wanted)
    (output,) = llm.generate(["Once upon a time"], SamplingParams(structured_outputs=held, **given), use_tqdm=False)
    return output.outputs


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("schemas", [lambda: BOUNDED, shared_bounded], ids=["ours", "shared"])
def test_answers_to_bounded_schemas_end_by_themselves(
    llm: LLM, schemas: Callable[[], dict[str, dict[str, Any]]], seed: int
) -> None:
    """With whitespace as it is by default: a model may write some wherever JSON allows it, and must come to an end."""
    wanted = schemas()
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed, n=3, logprobs=0, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for schema in wanted.values()
    ]
    outputs = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
    for (name, schema), output in zip(wanted.items(), outputs, strict=True):
        for answer in output.outputs:
            assert answer.finish_reason == "stop", (name, answer.text)
            jsonschema.validate(json.loads(answer.text), schema)
            assert answer.logprobs is not None
            assert len(answer.logprobs) == len(answer.token_ids)


def towards_the_end(llm: LLM, strength: float) -> dict[int, float]:
    """A logit bias by which this model, which would write stories for ever, ends strings, objects and arrays, and
    begins few."""
    ids = llm.get_tokenizer().get_vocab()
    return {ids[char]: strength for char in '"}]'} | {ids[char]: -strength for char in "{["}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_finished_answers_to_real_schemas_are_valid(llm: LLM, seed: int) -> None:
    """Some answers are `{}` and some as long as they may be: each request has a bias of its own. One that `max_tokens`
    cuts short does not count."""
    rng, params, schemas = random.Random(seed), list[SamplingParams](), dict[str, dict[str, Any]]()
    for row in rows("json-schemas/schemas.jsonl"):
        held = StructuredOutputsParams(json=row["schema"], disable_any_whitespace=rng.random() < 0.5)
        try:
            of_params(held, {})
        except RequestError:
            continue
        bias = towards_the_end(llm, rng.uniform(2, 10))
        one = SamplingParams(max_tokens=480, seed=rng.randrange(2**31), logit_bias=bias, structured_outputs=held)
        schemas[row["id"]] = row["schema"]
        params.append(one)
    outputs = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
    finished, wrong = 0, list[tuple[str, str]]()
    for (name, schema), output in zip(schemas.items(), outputs, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason == "stop":
            finished += 1
            judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            found = judge(schema).iter_errors(json.loads(answer.text))
            # the library divides floats: it finds 2.3 no multiple of 0.01
            wrong += [(name, error.message) for error in found if error.validator != "multipleOf"]
    assert wrong == []
    assert finished > 130, finished
    assert len(schemas) >= 190


WANTED: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["blue", "a kind of red"]}, "blue|a kind of red"),
    ({"regex": "[a-c]{3} [0-9]+\\."}, "[a-c]{3} [0-9]+\\."),
    ({"grammar": 'root ::= "x"{2,4} ("y" | "z")'}, "x{2,4}[yz]"),
    ({"grammar": 'start: "a" B\nB: /[0-9]{2}/'}, "a[0-9]{2}"),
]


@sampled(("case", "others"), WANTED, [{}, {"ignore_eos": True}, {"min_tokens": 30}, {"repetition_penalty": 1.5}])
def test_an_answer_ends_where_its_grammar_does(
    llm: LLM, case: tuple[dict[str, Any], str], others: dict[str, Any]
) -> None:
    wanted, fits = case
    for answer in generate(llm, wanted, max_tokens=100, **others):
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert re.fullmatch(fits, answer.text)


def test_a_stop_string_may_come_first(llm: LLM) -> None:
    for answer in generate(llm, {"regex": "abc-def"}, stop=["-"]):
        assert (answer.text, answer.stop_reason) == ("abc", "-")


def test_a_wrong_grammar_is_an_error_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not is not supported"):
        generate(llm, {"json": {"not": {"uniqueItems": True}}})
    assert generate(llm, {"choice": ["fine"]})[0].text == "fine"
