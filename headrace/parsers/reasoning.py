"""Tells reasoning from what follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.parsers.events import Content, Reasoning, Steps
from headrace.parsers.formats import ReasoningFormat
from headrace.parsers.reader import Reader, markers

_SWITCHES = ("enable_thinking", "thinking")
"""Keywords by which chat templates turn thinking on and off."""


def begins_open(format: ReasoningFormat, prompt: str, template: str, template_kwargs: Mapping[str, Any]) -> bool:
    """Return whether the answer to this prompt begins inside reasoning.

    The end of the prompt says so if the template opened a thought there, or closed it. If it did neither, a keyword of
    the template that turns thinking off says no; then the family: by its switch, or by what it takes unmarked text for.
    """
    tail = prompt[-256:].rstrip()
    if tail.endswith(tuple(marker.strip() for marker in format.open)):
        return True
    if tail.endswith(tuple(marker.strip() for marker in format.close)):
        return False
    if any(name in template and not template_kwargs.get(name, True) for name in _SWITCHES):
        return False
    return format.switch in template if format.switch else format.unmarked == "reasoning"


def read_first(reader: Reader, format: ReasoningFormat, is_open: bool | None) -> Steps[str]:
    """Read the reasoning that an answer begins with, if it does; returns white space that content begins with."""
    if format.as_content:
        yield Content(format.open[0])
        return ""
    space = yield from reader.space()
    begun = False
    while (yield from reader.accept(markers(*format.open))):
        begun = True
    if begun and is_open is None and format.unclosed == "content":
        yield from _read_if_closed(reader, format)
    elif begun:
        yield from read_open(reader, format)
    elif is_open or (is_open is None and format.unmarked == "reasoning"):
        if space:
            yield Reasoning(space)
        yield from read_open(reader, format)
    elif is_open is None and format.unmarked == "undecided":
        yield from _read_if_closed(reader, format, space)
    else:
        return space
    return ""


def read_open(reader: Reader, format: ReasoningFormat) -> Steps[None]:
    """Read the rest of reasoning, and over the markup that ends it. What begins it says nothing here."""
    close, found = markers(*format.close), format.open[0]
    while found in format.open:
        found = yield from reader.pass_on(
            markers(*format.open, *format.close, *format.call_openers), Reasoning, strict=True
        )
    if found in format.call_openers:
        text, closed = yield from reader.until(close)
        if closed:
            yield Reasoning(found + text)
        else:
            reader.again(found + text)


def _read_if_closed(reader: Reader, format: ReasoningFormat, space: str = "") -> Steps[None]:
    """Read what is reasoning if it is closed, or has an opener after all; otherwise content, which is left unread.

    Text before a later opener is left out, as the peers do.
    """
    text, found = yield from reader.until(markers(*format.close, *format.open))
    if found in format.open:
        yield from read_open(reader, format)
    elif found:
        yield Reasoning(space + text)
    else:
        reader.again(space + text)
