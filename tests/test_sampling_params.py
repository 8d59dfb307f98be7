"""SamplingParams as vLLM's users handle them: copied, assigned to, and with fields that are not here."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import SamplingParams, StructuredOutputsParams
from headrace.errors import RequestError


def test_a_clone_is_independent() -> None:
    params = SamplingParams(temperature=0.7, stop="a", logit_bias={1: 2.0})
    clone = params.clone()
    assert clone == params
    clone.temperature = 0.2
    clone.stop.append("b")
    clone.logit_bias = None
    assert params == SamplingParams(temperature=0.7, stop="a", logit_bias={1: 2.0})
    assert clone == SamplingParams(temperature=0.2, stop=["a", "b"])


def test_what_is_assigned_is_checked_when_it_is_copied() -> None:
    params = SamplingParams()
    params.min_tokens = 20  # more than max_tokens for now: fields may be set in any order
    params.max_tokens = 30
    params.stop = "end"  # type: ignore[assignment]
    assert params.clone() == SamplingParams(min_tokens=20, max_tokens=30, stop=["end"])
    params.temperature = -1.0
    with pytest.raises(RequestError, match="temperature must be in") as caught:
        params.clone()
    assert caught.value.param == "temperature"
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits_processors": [print]}, "logits_processors is not supported"),
        ({"extra_args": {"a": 1}}, "extra_args is not supported"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported, got 5"),
        ({"flat_logprobs": True}, "flat_logprobs is not supported"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is not supported"),
        ({"thinking_token_budget": 5}, "thinking_token_budget is not supported"),
        ({"best_of": 2}, r"best_of must equal n \(1\) or be left out, got 2"),
    ],
    ids=lambda entry: next(iter(entry)) if isinstance(entry, dict) else "",
)
def test_fields_of_vllm_that_are_not_here_say_so(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**given)
    assert caught.value.param == next(iter(given))


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": None, "logits_processors": [], "flat_logprobs": False, "extra_args": {}},
        {"output_kind": "FINAL_ONLY", "skip_clone": True, "stream_interval": 4},
        {"best_of": 1},
    ],
    ids=lambda given: ",".join(given),
)
def test_fields_that_ask_for_nothing_are_taken(given: dict[str, Any]) -> None:
    assert SamplingParams(**given) == SamplingParams()
    assert SamplingParams(n=2, best_of=2) == SamplingParams(n=2)


def test_structured_outputs_are_one_constraint_by_its_name_or_the_older_one() -> None:
    wanted = StructuredOutputsParams(regex="[a-z]+")
    for given in (
        {"structured_outputs": wanted},
        {"structured_outputs": {"regex": "[a-z]+", "json": None, "_backend": "xgrammar"}},
        {"guided_decoding": {"regex": "[a-z]+", "backend": "outlines"}},
    ):
        params = SamplingParams(**given)
        assert params.structured_outputs == wanted
        assert params.guided_decoding is None
        assert params.clone() == params


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "needs exactly one of .*; got none"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"choices": ["a"]}, "no field choices; the field is `choice`"),
        ({"regexp": "a"}, "no field 'regexp'; its fields are json, regex"),
        ({"json": 5}, "structured_outputs.json must be a JSON schema"),
        ({"choice": "a"}, "structured_outputs.choice must be a list"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        (5, "structured_outputs must be an object, got 5"),
    ],
)
def test_structured_outputs_that_make_no_sense_are_refused(given: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.param == "structured_outputs"


def test_structured_outputs_go_with_allowed_tokens_but_not_with_their_old_name() -> None:
    given = SamplingParams(structured_outputs={"regex": "a"}, allowed_token_ids=[1])
    assert (given.structured_outputs, given.allowed_token_ids) == (StructuredOutputsParams(regex="a"), [1])
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "b"})
