"""Lists every format by name: vLLM's names, and SGLang's where they differ.

The rows are in formats.json: of each format of tool calls what begins a call (the fields of `ToolFormat`), one of
SYNTAXES with its settings, and in which way its family writes calls (written.py); then the formats of reasoning, what
else the formats are called, and what tells them in a chat template (families.py). Of minicpm5's answers the text around
calls is content, as SGLang and vLLM's stream have it, and not dropped, as in vLLM's whole answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.parsers.formats import ByOpener, ReasoningFormat, Syntax, ToolFormat
from headrace.parsers.gemma import GemmaCalls
from headrace.parsers.harmony import HarmonyCalls
from headrace.parsers.json_calls import JsonCalls
from headrace.parsers.named_calls import NamedCalls
from headrace.parsers.pythonic import PythonicCalls
from headrace.parsers.tagged import TaggedCalls

ROWS: dict[str, Any] = json.loads(Path(__file__).with_name("formats.json").read_text(encoding="utf-8"))
SYNTAXES = {
    "json": JsonCalls, "named": NamedCalls, "tagged": TaggedCalls, "pythonic": PythonicCalls, "gemma": GemmaCalls,
    "harmony": HarmonyCalls,
}  # fmt: skip


def _settings(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row as a dataclass has them."""
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return settings | ({"or_json": JsonCalls(**_settings(row["or_json"]))} if "or_json" in row else {})


def _syntax(row: dict[str, Any]) -> Syntax:
    """The syntax that a row names."""
    if "by_opener" in row:
        return ByOpener(tuple((opener, _syntax(way)) for opener, way in row["by_opener"].items()))
    (name,) = SYNTAXES.keys() & row.keys()
    syntax: Syntax = SYNTAXES[name](**_settings(row[name]))
    return syntax


def _tool(row: dict[str, Any]) -> ToolFormat:
    own = {name: value for name, value in row.items() if name not in ("by_opener", "written", *SYNTAXES)}
    return ToolFormat(syntax=_syntax(row), **_settings(own))


def _reasoning(row: dict[str, Any]) -> ReasoningFormat:
    whole: dict[str, Any] = {"whole_answer": _syntax(row["whole_answer"])} if "whole_answer" in row else {}
    return ReasoningFormat(**_settings(row) | whole)


TOOL_FORMATS: dict[str, ToolFormat] = {row["name"]: _tool(row) for row in ROWS["tools"]}
"""By every name that `--tool-call-parser` takes."""
TOOL_FORMATS |= {alias: TOOL_FORMATS[name] for alias, name in ROWS["tool_aliases"].items()}
REASONING_FORMATS: dict[str, ReasoningFormat] = {row["name"]: _reasoning(row) for row in ROWS["reasoning"]}
"""By every name that `--reasoning-parser` takes."""
REASONING_FORMATS |= {alias: REASONING_FORMATS[name] for alias, name in ROWS["reasoning_aliases"].items()}
