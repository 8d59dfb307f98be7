"""Answers in channels, as gpt-oss writes them: <|channel|>final<|message|>Hello<|return|>."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.parsers.calls import Calls
from headrace.parsers.events import Arguments, Content, Event, Reasoning, Steps
from headrace.parsers.json_text import Lexer
from headrace.parsers.reader import Reader, markers

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_NEXT = ("<|start|>", "<|channel|>")
_HEADER_BEGINS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=", "assistant<|", "assistant to=")
_ROLE = re.compile(r"\s*(?!to=)([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_LOOK = 64
_MAX_HEADER = 1024
"""Characters of a message's header; what is longer is dropped."""

Leads = dict[type[Reasoning | Content], str]
"""What stands before the next text of a kind: a line break, if it is not the first."""


@dataclass(frozen=True)
class HarmonyCalls:
    """Messages, each with a header that names its channel and, if it is a call, its recipient.

    The prompt ends with <|start|>assistant, so an answer begins within a header. The channel analysis is reasoning; a
    message to a recipient is a call, in whatever channel and on either side of the channel's name the recipient stands;
    everything else is content. Messages of one kind are kept apart by a line break.
    """

    calls: bool = True
    """Hand on calls; otherwise they are left out."""
    namespace: str = "functions."
    """Stands before the name of a function of the request; any other recipient is a name as it is."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read a whole answer."""
        leads: Leads = {Reasoning: "", Content: ""}
        mark = ""
        while True:
            if mark in _NEXT or (yield from reader.ahead(lambda *place: _is_header(reader, *place))):
                head, mark = yield from self._header(reader, mark)
                if mark == "<|message|>":
                    role = _ROLE.match(head)
                    is_assistant = not role or role.group(1) == "assistant"
                    mark = yield from self._message(reader, calls, is_assistant, head, leads)
            elif reader.ended:
                return True
            else:
                mark = yield from _text(reader, Content, leads)

    def _header(self, reader: Reader, begun: str) -> Steps[tuple[str, str]]:
        """Read a message's header, which may begin with a marker that was read; returns it and what ends it."""
        head = begun if begun == "<|channel|>" else ""
        if not begun:
            yield from reader.accept(markers("<|start|>"))
        text, mark = yield from reader.until(markers("<|message|>", "<|start|>", *_ENDS), limit=_MAX_HEADER)
        return head + text, mark

    def _message(self, reader: Reader, calls: Calls, is_assistant: bool, head: str, leads: Leads) -> Steps[str]:
        """Read the body of a message; returns the marker that ends it."""
        recipient = _RECIPIENT.search(head)
        channel = _CHANNEL.search(head)
        name = recipient.group(1).removeprefix(self.namespace) if recipient else ""
        if not is_assistant or name in ("assistant", "user", "all"):
            return (yield from reader.pass_on(markers(*_ENDS, *_NEXT), None))
        if not name:
            thought = channel is not None and channel.group(1) == "analysis"
            return (yield from _text(reader, Reasoning if thought else Content, leads))
        if not self.calls:
            return (yield from reader.pass_on(markers(*_ENDS, *_NEXT), None))
        yield calls.start(name)
        yield from reader.space()
        mark = yield from reader.accept(markers(*_ENDS, *_NEXT))
        if mark:  # no arguments
            yield calls.arguments("{}")
            return mark
        return (yield from reader.pass_on(markers(*_ENDS, *_NEXT), _escaping(calls), strict=True))


def _text(reader: Reader, kind: type[Reasoning | Content], leads: Leads) -> Steps[str]:
    """Hand on the text of a message as it comes; returns the marker that ends it."""

    def event(text: str) -> Event:
        lead, leads[kind] = leads[kind], ""
        return kind(lead + text)

    mark = yield from reader.pass_on(markers(*_ENDS, *_NEXT), event, strict=True)
    leads[kind] = "\n"
    return mark


def _escaping(calls: Calls) -> Callable[[str], Arguments]:
    """Makes events of arguments, in whose strings control characters are escaped."""
    lexer = Lexer()

    def event(text: str) -> Arguments:
        end = lexer.end(text, 0)
        return calls.arguments(lexer.escaped(text[:end]) + text[end:])

    return event


def _is_header(reader: Reader, text: str, at: int, closed: bool) -> bool | None:
    """Whether what follows is a message's header, or the rest of one, rather than text."""
    rest = text[at : at + _LOOK].lstrip()
    if rest.startswith(_HEADER_BEGINS):
        return True
    if len(text) - at < _LOOK and any(begin.startswith(rest) for begin in _HEADER_BEGINS):
        return (reader.cut and bool(rest)) if closed else None
    return False
