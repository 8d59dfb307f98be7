"""Texts of the peers' own tests, with the answers on which their parsers agree: whole, and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import answer, called, in_three, read

TEXTS = Path(__file__).parents[2].parent / "shared" / "data" / "parser-texts"
if not TEXTS.is_dir():
    pytest.skip("no folder ../shared/data/parser-texts beside the repository", allow_module_level=True)


def rows(name: str) -> list[Any]:
    lines = (TEXTS / name).read_text().splitlines()
    return [pytest.param(row, id=row["id"]) for row in map(json.loads, lines)]


def trimmed(text: str | None) -> str:
    """White space around a section, and null or an empty string, are no difference."""
    return (text or "").strip()


def tools_of(row: dict[str, Any]) -> list[FunctionTool]:
    functions = [tool.get("function", tool) for tool in row["tools"]]
    return [FunctionTool(tool["name"], tool.get("parameters") or {}) for tool in functions]


def is_open(row: dict[str, Any]) -> bool | None:
    options = row["options"]
    return options.get("prompt_opens_reasoning", options.get("enable_thinking"))


@pytest.mark.parametrize("row", rows("tool_calls.jsonl"))
def test_tool_calls(row: dict[str, Any]) -> None:
    expected, found = row["expected"], answer(row["parser"], row["text"], *tools_of(row))
    assert called(found) == [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    accepted = [expected, *row.get("also_seen", {}).values()]
    assert trimmed(found.content) in [trimmed(seen["content"]) for seen in accepted if "content" in seen]
    if "reasoning" in expected:
        assert trimmed(found.reasoning) == trimmed(expected["reasoning"])


@pytest.mark.parametrize("row", rows("reasoning.jsonl"))
def test_reasoning(row: dict[str, Any]) -> None:
    expected, found = row["expected"], answer(None, row["text"], reasoning=row["parser"], opened=is_open(row))
    assert (found.reasoning, found.content) == (expected["reasoning"], expected["content"])


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("tool_calls.jsonl") + rows("reasoning.jsonl"))
def test_every_cut_into_three(row: dict[str, Any]) -> None:
    tool, reasoning = (
        (TOOL_FORMATS[row["parser"]], None) if "tools" in row else (None, REASONING_FORMATS[row["parser"]])
    )
    tools, opened = (tools_of(row), None) if tool else ([], is_open(row))
    whole = read([row["text"]], tool, reasoning, tools, reasoning_open=opened)
    for pieces in in_three(row["text"]):
        assert read(pieces, tool, reasoning, tools, reasoning_open=opened) == whole, pieces
