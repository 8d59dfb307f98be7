"""Answers in channels, as gpt-oss writes them: <|channel|>final<|message|>Hello<|return|>."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace.parsers.calls import Calls
from headrace.parsers.events import Arguments, Content, Reasoning, Steps
from headrace.parsers.json_text import Lexer
from headrace.parsers.reader import Markers, Reader, markers

_NEXT = ("<|start|>", "<|channel|>")
_ENDS = Markers("<|end|>", "<|return|>", "<|call|>", *_NEXT)
_HEADER_ENDS = Markers("<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
_HEADER = re.compile(r"\s*(?:to=|assistant to=|\w*<\|(?:start|channel|message|constrain)\|>)")
_HEADER_BEGUN = re.compile(r"\s*(?:to?|assistant (?:to?)?|\w*(?:<(?:\|\w*\|?)?)?)\Z")
_ROLE = re.compile(r"<\|start\|>\s*(?!to=)([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_LOOK = 64
_MAX_HEADER = 320
"""Characters of a message's header; what is longer is dropped."""


@dataclass(frozen=True)
class HarmonyCalls:
    """Describes messages, each with a header that names its channel and, if it is a call, its recipient.

    The prompt ends with <|start|>assistant, so an answer begins within a header. The channel analysis is reasoning; a
    message to a recipient is a call, in whatever channel and on either side of the channel's name the recipient stands;
    everything else is content. Messages of other roles are left out.
    """

    calls: bool = True
    """Hand on calls; otherwise they are left out."""
    namespace: str = "functions."
    """Stands before the name of a function of the request; any other recipient is a name as it is."""
    markup: tuple[str, ...] = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_ENDS.all)
    """Special tokens that a server must leave in the text."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read a whole answer."""
        mark = ""
        while True:
            if mark in _NEXT or (yield from reader.ahead(partial(_is_header, reader))):
                begun = mark if mark in _NEXT else (yield from reader.accept(markers("<|start|>")))
                head, mark = yield from reader.until(_HEADER_ENDS, limit=_MAX_HEADER)
                if mark == "<|message|>":
                    mark = yield from self._message(reader, calls, begun + head)
            elif reader.ended:
                return True
            else:
                mark = yield from reader.pass_on(_ENDS, Content, strict=True)

    def _message(self, reader: Reader, calls: Calls, head: str) -> Steps[str]:
        """Read the body of a message; returns the marker that ends it."""
        role, recipient, channel = _ROLE.match(head), _RECIPIENT.search(head), _CHANNEL.search(head)
        name = recipient.group(1).removeprefix(self.namespace) if recipient else ""
        if (role and role.group(1) != "assistant") or name in ("assistant", "user", "all") or (name and not self.calls):
            return (yield from reader.pass_on(_ENDS, None))
        if not name:
            thought = channel is not None and channel.group(1) == "analysis"
            return (yield from reader.pass_on(_ENDS, Reasoning if thought else Content, strict=True))
        yield calls.start(name)
        yield from reader.space()
        mark = yield from reader.accept(_ENDS)
        if mark:  # no arguments
            yield calls.arguments("{}")
            return mark
        return (yield from reader.pass_on(_ENDS, _escaping(calls), strict=True))


def _escaping(calls: Calls) -> Callable[[str], Arguments]:
    """Makes events of arguments, in whose strings control characters are escaped."""
    lexer = Lexer()

    def event(text: str) -> Arguments:
        end = lexer.end(text, 0)
        return calls.arguments(lexer.escaped(text[:end]) + text[end:])

    return event


def _is_header(reader: Reader, text: str, at: int, closed: bool) -> bool | None:
    """Whether what follows is a message's header, or the rest of one, rather than text."""
    seen = text[at : at + _LOOK]
    if _HEADER.match(seen):
        return True
    if len(seen) < _LOOK and _HEADER_BEGUN.match(seen):
        return (reader.cut and "<" in seen) if closed else None
    return False
