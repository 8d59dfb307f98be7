"""Chooses how a model's answers are read: the format of its tool calls and that of its reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

from headrace.config import ServerConfig
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError, RequestError, quoted
from headrace.parsers.families import choose
from headrace.parsers.formats import ReasoningFormat, ToolFormat
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

AUTO, NONE = "auto", "none"
WITHOUT_FORMAT = TOOL_FORMATS["hermes"]
"""The format of calls that a grammar imposes on a model of which none is known."""


@dataclass(frozen=True)
class OutputFormats:
    """Holds the formats of a served model."""

    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    line: str = ""
    """What the start says of them."""
    kept: frozenset[int] = frozenset()
    """Special tokens that are part of their markup, so that a parser must see them."""


def check_parser_names(config: ServerConfig) -> None:
    """Raise ConfigError if a parser is named that there is not: before a model is loaded for it."""
    for name, table in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        value = getattr(config, name)
        if value not in (AUTO, NONE, *table):
            known = ", ".join((AUTO, NONE, *sorted(table)))
            raise ConfigError(f"{name} must be one of {known}; got {quoted(value)}")


def choose_formats(config: ServerConfig, model_type: str, tokenizer: Tokenizer | None) -> OutputFormats:
    """Return the formats that the flags name, or else those of the model's family and chat template."""
    check_parser_names(config)
    if tokenizer is None:
        return OutputFormats(line="tool calls and reasoning: not parsed (--skip-tokenizer-init)")
    template = tokenizer.templates.get("tool_use") or tokenizer.templates.get("default")
    found = choose(model_type, "" if template is None else template.source)
    tool, tool_why = _chosen(config.tool_call_parser, found[0], TOOL_FORMATS, "--tool-call-parser")
    reasoning, reasoning_why = _chosen(config.reasoning_parser, found[1], REASONING_FORMATS, "--reasoning-parser")
    line = f"tool calls: {tool_why}; reasoning: {reasoning_why}"
    return OutputFormats(tool, reasoning, line, _kept(tokenizer, tool, reasoning))


def named_format(field: str, name: str | None, table: Mapping[str, Format], served: Format | None) -> Format:
    """Return the format that a request names; without a name that of the served model. Raises RequestError."""
    if name is None and served is not None:
        return served
    if name is None or name not in table:
        got = "this model has none of its own" if name is None else f"got {quoted(name)}"
        raise RequestError(f"{field} must be one of {', '.join(sorted(table))}; {got}", field)
    return table[name]


def _chosen(given: str, found: str | None, table: Mapping[str, Format], flag: str) -> tuple[Format | None, str]:
    """Return a format, and what the start says of it."""
    if given == NONE:
        return None, f"not parsed ({flag} none)"
    if given != AUTO:
        return table[given], f"{given} ({flag})"
    if found is None:
        return None, f"not parsed (family and chat template show no format; {flag} names one)"
    return table[found], f"{found} (from family and chat template; {flag} overrides)"


def _kept(tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None) -> frozenset[int]:
    markup = [text for one in formats if one is not None for text in _texts(one)]
    specials = {i: tokenizer.backend.id_to_token(i) for i in tokenizer.special_ids}
    return frozenset(i for i, text in specials.items() if text and any(text in mark for mark in markup))


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a description of a format, among them all of its markup."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _texts(getattr(value, one.name))
