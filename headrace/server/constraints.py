"""Finds what the fields of a request hold its answer to: OpenAI's, and the spellings of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from typing import Any

from headrace.errors import RequestError
from headrace.server.protocol import GenerateRequest
from headrace.server.serving import Serving
from headrace.structured_outputs.conversion import of_params, of_response_format
from headrace.structured_outputs.grammar import Grammar
from headrace.structured_params import StructuredOutputsParams

SPELLINGS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object", "json_schema": "json", "regex": "regex", "ebnf": "grammar",
    "grammar": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip
"""Field of a request -> the field of StructuredOutputsParams that it is another name of."""
FIELDS = ("response_format", "structured_outputs", *SPELLINGS)


def is_constrained(request: GenerateRequest) -> bool:
    """Return whether a request asks for a form of its answer, which takes time to prepare."""
    return bool(_given(request))


def constraint_of(serving: Serving, request: GenerateRequest) -> Grammar | None:
    """Return the grammar that a request asks for; None if it asks for none. Raises RequestError for one that is not
    valid, for several at once, and where the server has no tokenizer."""
    given = _given(request)
    if not given:
        return None
    name, value = next(iter(given.items()))
    if len(given) > 1:
        raise RequestError(f"a request can have one of {' and '.join(given)}, not several", name)
    if serving.engine.tokenizer is None:
        raise RequestError(f"{name} needs a tokenizer, but the server runs without one", name)
    special = serving.engine.tokenizer.marks
    if name == "response_format":
        return of_response_format(value, special)
    if name == "structured_outputs":
        return of_params(StructuredOutputsParams.of(value), special)
    fields: dict[str, Any] = {SPELLINGS[name]: value}
    if name.startswith("guided_") and request.guided_whitespace_pattern is not None:
        fields["whitespace_pattern"] = request.guided_whitespace_pattern
    return of_params(StructuredOutputsParams.of(fields, name), special, name)


def _given(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields that ask for something."""
    found = {name: value for name in FIELDS if (value := getattr(request, name)) not in (None, False, "")}
    if found.get("response_format") == {"type": "text"}:
        del found["response_format"]
    return found
