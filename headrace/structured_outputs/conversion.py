"""Turns what clients send into grammars: `structured_outputs`, `response_format` and their older spellings.

All of it is checked here, before a request runs, by compiling it against a small vocabulary: one token for each byte,
and the marks of the model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer
from msgspec import structs

from headrace.errors import RequestError, clip, quoted
from headrace.structured_outputs import schema as schemas
from headrace.structured_outputs.ebnf import is_ebnf, lark_of_ebnf
from headrace.structured_outputs.grammar import Grammar, JsonOptions, Rules
from headrace.structured_outputs.limits import (
    LIMITS_OF_CHECK,
    MAX_CHOICES,
    MAX_LINES,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_CHARS,
    check_text,
    decoded,
)
from headrace.structured_outputs.regex import checked_regex
from headrace.structured_outputs.schema import grammar_of_schema
from headrace.structured_outputs.structural_tag import of_structural_tag
from headrace.structured_outputs.vocabulary import byte_vocabulary
from headrace.structured_params import StructuredOutputsParams

MAX_KEPT = 64
"""Constraints whose grammars are kept, for requests that bring the same again."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
Marks = Mapping[str, int]


def of_params(params: StructuredOutputsParams, special: Marks, name: str = "structured_outputs") -> Grammar:
    """Return the grammar of a request's parameters. `special`: the vocabulary's marks (vocabulary.marks); `name`: the
    field that errors name. Raises RequestError for what cannot be held."""
    return _of_params(_encoded(params, name), tuple(special.items()), name)


@functools.lru_cache(maxsize=MAX_KEPT)
def _of_params(encoded: bytes, marks: tuple[tuple[str, int], ...], name: str) -> Grammar:
    try:
        params, special = msgspec.json.decode(encoded, type=StructuredOutputsParams), dict(marks)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name} has a value of the wrong type: {clip(str(error))}", name) from None
    options = _json_options(params, name)

    def path(field: str) -> str:  # older fields are the value itself
        return f"{name}.{field}" if name == "structured_outputs" else name

    if params.json is not None:
        return _of_json(params.json, path("json"), options)
    if params.json_object:
        return grammar_of_schema(ANY_OBJECT, name, options)
    if params.regex is not None:
        return _of_regex(params.regex, special, path("regex"))
    if params.choice is not None:
        return _of_choice(params.choice, path("choice"))
    if params.grammar is not None:
        return of_grammar(params.grammar, special, path("grammar"))
    where = path("structural_tag")
    tag = decoded(params.structural_tag, where)
    if not isinstance(tag, Mapping):
        raise RequestError(f"{where} must be an object, got {quoted(tag)}", name)
    return checked(of_structural_tag(tag, special, options, where), special, where)


def of_response_format(form: object, special: Marks, name: str = "response_format") -> Grammar | None:
    """Return the grammar of an OpenAI `response_format`, with what vLLM, SGLang, llama.cpp and TensorRT-LLM have added;
    None if it asks for plain text. Raises RequestError for what cannot be held."""
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise RequestError(f"{name} must be an object with a `type`, got {quoted(form)}", name)
    return _of_response_format(_encoded(form, name), tuple(special.items()), name)


@functools.lru_cache(maxsize=MAX_KEPT)
def _of_response_format(encoded: bytes, marks: tuple[tuple[str, int], ...], name: str) -> Grammar | None:
    form, special = msgspec.json.decode(encoded), dict(marks)
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema")
        return _of_json(ANY_OBJECT if schema is None else schema, f"{name}.schema", JsonOptions())
    if kind == "json_schema":
        inner = form.get("json_schema", form)
        path = f"{name}.json_schema.schema" if inner is not form else f"{name}.schema"
        if not isinstance(inner, Mapping) or inner.get("schema") is None:
            raise RequestError(f"{name} needs json_schema.schema, an object; got {quoted(inner)}", name)
        return _of_json(inner["schema"], path, JsonOptions())
    if kind == "structural_tag":
        return checked(of_structural_tag(form, special, JsonOptions(), name), special, name)
    if kind == "json" and "schema" in form:
        return _of_json(form["schema"], f"{name}.schema", JsonOptions())
    if kind == "regex":
        return _of_regex(form.get("regex", form.get("pattern")), special, f"{name}.regex")
    if kind in ("ebnf", "grammar"):
        return of_grammar(form.get(kind), special, f"{name}.{kind}")
    known = "text, json_object, json_schema, structural_tag, regex or ebnf"
    raise RequestError(f"{name}.type must be {known}; got {quoted(kind)}", name)


def of_grammar(text: object, special: Marks, path: str) -> Grammar:
    """Return the grammar in a text: GBNF or EBNF if it defines rules with `::=`, else Lark."""
    given = check_text(text, path)
    if is_ebnf(given):
        return _of_lark(lark_of_ebnf(given, path), special, path)
    lines = given.splitlines()
    if len(lines) > MAX_LINES or any(len(line) > MAX_REGEX_CHARS for line in lines):
        field = path.partition(".")[0]
        raise RequestError(f"{path} may have {MAX_LINES} lines of {MAX_REGEX_CHARS} characters", field)
    return _of_lark(re.sub(r"(?m)^(\s*)[?!](?=[a-z])", r"\1", given), special, path)


def _of_lark(lark: str, special: Marks, path: str) -> Grammar:
    rules = Rules()
    return checked(rules.grammar(rules.lark(lark)), special, path)


def _encoded(value: object, name: str) -> bytes:
    """Return JSON of what a client has sent, by which its grammar is kept."""
    if isinstance(value, StructuredOutputsParams):
        value = {field: item for field, item in structs.asdict(value).items() if item not in (None, False)}
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}", name) from None


def checked(grammar: Grammar, special: Marks, path: str) -> Grammar:
    """Return a grammar. Raises RequestError, naming `path`, for one that llguidance does not take."""
    error = _error_of(grammar, tuple(special.items()))
    if error:
        raise RequestError(f"{path}: {error}", path.partition(".")[0])
    return grammar


def _error_of(grammar: Grammar, special: tuple[tuple[str, int], ...] = ()) -> str:
    """Return llguidance's reason against a grammar, in one line; nothing if it takes it."""
    matcher = LLMatcher(_small_vocabulary(special), grammar.to_text(), log_level=0, limits=LIMITS_OF_CHECK)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    # Of a regular expression the first line says that it is none, and a later one why.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "it is not valid")
    return "nothing fits it" if reason in _EMPTY else clip(reason.removeprefix("error: "))


_EMPTY = ("NoExtension", "NoExtensionBias")
"""llguidance's names for a grammar that allows no first character."""


@functools.lru_cache(maxsize=8)
def _small_vocabulary(special: tuple[tuple[str, int], ...]) -> LLTokenizer:
    return byte_vocabulary(dict(special))


def _of_json(schema: object, path: str, options: JsonOptions) -> Grammar:
    grammar = grammar_of_schema(schema, path, options)
    if _error_of(grammar):
        where, why = schemas.culprit(schema, path, options, _error_of)
        raise RequestError(f"{where}: {why}", path.partition(".")[0])
    return grammar


def _of_regex(pattern: object, special: Marks, path: str) -> Grammar:
    rules = Rules()
    return checked(rules.grammar(rules.regex(checked_regex(pattern, path))), special, path)


def _of_choice(choices: object, path: str) -> Grammar:
    field = path.partition(".")[0]
    if not isinstance(choices, list | tuple) or not 0 < len(choices) <= MAX_CHOICES:
        count = f"{len(choices)} texts" if isinstance(choices, list | tuple) else quoted(choices)
        raise RequestError(f"{path} must be a list of 1 to {MAX_CHOICES} texts, got {count}", field)
    texts = [check_text(choice, f"{path}[{index}]") for index, choice in enumerate(choices)]
    if sum(map(len, texts)) > MAX_SCHEMA_CHARS:
        raise RequestError(f"{path} may have {MAX_SCHEMA_CHARS} characters in all", field)
    rules = Rules()
    return rules.grammar(rules.terminal(" | ".join(map(json.dumps, dict.fromkeys(texts)))))


def _json_options(params: StructuredOutputsParams, name: str) -> JsonOptions:
    space = JsonOptions.whitespace
    if params.disable_any_whitespace:
        space = None
    elif params.whitespace_pattern is not None:
        path = "structured_outputs.whitespace_pattern" if name == "structured_outputs" else "guided_whitespace_pattern"
        space = checked_regex(params.whitespace_pattern, path)
        _of_regex(space, {}, path)
    return JsonOptions(space, not params.disable_additional_properties)
