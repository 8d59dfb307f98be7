"""Helpers: answers read in pieces, whole and cut in every way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.parsers.formats import ReasoningFormat, ToolFormat
from headrace.parsers.output_parser import Answer, OutputParser, join
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from headrace.parsers.tools import FunctionTool


def read(
    pieces: Iterable[str],
    tool: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    tools: Sequence[FunctionTool] = (),
    *,
    reasoning_open: bool | None = None,
    cut: bool = False,
) -> Answer:
    """The answer that comes in these pieces."""
    parser = OutputParser(tool, reasoning, tools, reasoning_open)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join([*events, *parser.finish(cut=cut)])


def in_three(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into three pieces."""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            yield [text[:first], text[first:second], text[second:]]


def at_random(text: str, rng: random.Random) -> list[str]:
    """A text in pieces of random sizes, about as long as tokens."""
    pieces = []
    at = 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 4, 6, 9, 20))
        pieces.append(text[at : at + size])
        at += size
    return pieces


def some_cuts(text: str, rng: random.Random) -> Iterator[list[str]]:
    """The single characters, half of the ways into two pieces, some ways into three and some into many."""
    yield list(text)
    for at in rng.sample(range(len(text) + 1), len(text) // 2 + 1):
        yield [text[:at], text[at:]]
    for _ in range(8):
        first, second = sorted(rng.choices(range(len(text) + 1), k=2))
        yield [text[:first], text[first:second], text[second:]]
    for _ in range(4):
        yield at_random(text, rng)


def answer(
    tool: str | None,
    text: str,
    *tools: FunctionTool,
    reasoning: str | None = None,
    opened: bool | None = None,
    cut: bool = False,
) -> Answer:
    """The answer of a text in the formats of these names, the same for many ways to cut it: others in each run."""
    tool_format = TOOL_FORMATS[tool] if tool else None
    reasoning_format = REASONING_FORMATS[reasoning] if reasoning else None

    def of(pieces: list[str]) -> Answer:
        return read(pieces, tool_format, reasoning_format, tools, reasoning_open=opened, cut=cut)

    whole = of([text])
    for pieces in some_cuts(text, random.Random()):
        assert of(pieces) == whole, pieces
    return whole


def called(answer: Answer) -> list[tuple[str, Any]]:
    """Names and decoded arguments of an answer's calls."""
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]
