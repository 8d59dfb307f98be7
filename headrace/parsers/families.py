"""Chooses the formats of a model by what its chat template writes, and by its family where several write alike."""

from __future__ import annotations

from headrace.parsers.table import ROWS

TOOL_MARKS: list[tuple[list[str], str]] = ROWS["tool_marks"]
"""What a template has of a format's markup, every string of a row; the first row that fits."""
TOOLS_OF_FAMILY: dict[str, str] = ROWS["tools_of_family"]
"""Families whose markup is also another format's."""
REASONING_MARKS: list[tuple[str, str]] = ROWS["reasoning_marks"]
THINKERS: dict[str, str] = ROWS["thinkers"]
"""Families that reason between <think> and </think>. Any other is read as qwen3, which takes nothing for reasoning that
is neither marked nor opened by the prompt."""


def choose(model_type: str, template: str) -> tuple[str | None, str | None]:
    """Return the names of a model's tool format and reasoning format, None where its template has neither."""
    found = (name for marks, name in TOOL_MARKS if all(mark in template for mark in marks))
    tool = next(found, None)
    if tool:
        tool = TOOLS_OF_FAMILY.get(model_type, tool)
    reasoning = next((name for mark, name in REASONING_MARKS if mark in template), None)
    if not reasoning and "</think>" in template:
        reasoning = THINKERS.get(model_type, "qwen3")
        # R1's template opens the thought. V3.1's does so by its keyword `thinking`, off by default, and V3's never.
        if reasoning == "deepseek_r1" and ("<think>" not in template or "thinking" in template):
            reasoning = "deepseek_v3"
    return tool, reasoning
