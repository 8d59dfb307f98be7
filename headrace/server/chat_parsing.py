"""Reads one choice of a chat completion: from text to reasoning, content and calls, whole and in pieces alike."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from headrace.parsers.formats import ReasoningFormat, ToolFormat
from headrace.parsers.output_parser import OutputParser, join
from headrace.parsers.tools import FunctionTool
from headrace.request import CompletionOutput
from headrace.server.answers import AssistantMessage, Delta, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta

MISTRAL_ID_CHARS = 9


@dataclass(frozen=True)
class Parsing:
    """Says how the answer to one request is read. There is none where nothing is to be found in it."""

    tool: ToolFormat | None
    """None: the request has no tools, so that nothing is a call."""
    reasoning: ReasoningFormat | None
    reasoning_open: bool
    """The answer begins within reasoning."""
    tools: tuple[FunctionTool, ...] = ()
    named: bool = False
    """The request named the function to call."""
    parallel: bool = True
    include_reasoning: bool = True
    stream_reasoning: bool = True
    calls_before: int = 0
    """Calls in the conversation so far."""


class ChoiceParser:
    """Turns the text of one choice into events, as it comes."""

    def __init__(self, parsing: Parsing) -> None:
        self.parsing = parsing
        self.has_calls = False
        self._parser = OutputParser(parsing.tool, parsing.reasoning, parsing.tools, parsing.reasoning_open)
        self._thought: list[str] = []
        """Reasoning that waits for its end, as the request wants it in one piece."""

    def feed(self, text: str) -> list[Event]:
        """Return what further text has decided."""
        return self._wanted(self._parser.feed(text))

    def finish(self, finish_reason: str, stop_reason: int | str | None) -> list[Event]:
        """Return the rest, as no more text comes."""
        cut = finish_reason != "stop" or isinstance(stop_reason, str)
        events = self._wanted(self._parser.finish(cut=cut))
        return [*events, *self._whole_thought()]

    def finish_reason(self, reason: str) -> str:
        """Return how an answer ended: with calls that the model chose itself it is not `stop`."""
        return "tool_calls" if reason == "stop" and self.has_calls and not self.parsing.named else reason

    def _wanted(self, events: list[Event]) -> list[Event]:
        """Return the events that the request wants to see, with an id for each call."""
        wanted: list[Event] = []
        parsing = self.parsing
        for event in events:
            if isinstance(event, Reasoning):
                if parsing.reasoning is None:  # a format of all of an answer tells it apart nevertheless
                    wanted.append(Content(event.text))
                elif not parsing.stream_reasoning:
                    self._thought.append(event.text)
                elif parsing.include_reasoning:
                    wanted.append(event)
                continue
            wanted += self._whole_thought()
            if isinstance(event, CallStart | Arguments):
                if parsing.tool is None or (event.index and not parsing.parallel):
                    continue
                self.has_calls = True
            if isinstance(event, CallStart) and event.id is None:
                event = CallStart(event.index, event.name, self._new_id(event))
            wanted.append(event)
        return wanted

    def _whole_thought(self) -> list[Event]:
        text = "".join(self._thought)
        self._thought = []
        return [Reasoning(text)] if text and self.parsing.include_reasoning else []

    def _new_id(self, call: CallStart) -> str:
        """Return an id in the form that the family's chat template expects."""
        form = "chatcmpl-tool" if self.parsing.tool is None else self.parsing.tool.ids
        if form == "kimi":
            return f"functions.{call.name}:{self.parsing.calls_before + call.index}"
        if form == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_CHARS))
        return f"chatcmpl-tool-{uuid.uuid4().hex}"


def read_new(parser: ChoiceParser | None, new: CompletionOutput) -> list[Event]:
    """Return what an increment of a choice has decided; without a parser its text is content."""
    if parser is None:
        return [Content(new.text)]
    found = parser.feed(new.text)
    if new.finish_reason is not None:
        found += parser.finish(new.finish_reason, new.stop_reason)
    return found


def message_of(events: Sequence[Event], with_reasoning: bool) -> AssistantMessage:
    """Return the whole message. `with_reasoning`: null stands for reasoning that there is not."""
    answer = join(events)
    nothing_else = not answer.calls and answer.reasoning is None
    message = AssistantMessage("" if answer.content is None and nothing_else else answer.content)
    if with_reasoning:
        message.reasoning = message.reasoning_content = answer.reasoning
    if answer.calls:
        message.tool_calls = [ToolCall(one.id or "", FunctionCall(one.name, one.arguments)) for one in answer.calls]
    return message


def deltas_of(events: Iterable[Event]) -> list[Delta]:
    """Return the deltas of a stream; neighbouring pieces of one kind are one delta."""
    deltas: list[Delta] = []
    for event in merged(events):
        match event:
            case Content(text):
                deltas.append(Delta(content=text))
            case Reasoning(text):
                deltas.append(Delta(reasoning=text, reasoning_content=text))
            case CallStart(index, name, id):
                function = FunctionDelta("", name)
                deltas.append(Delta(tool_calls=[ToolCallDelta(index, function, id or "", "function")]))
            case Arguments(index, text):
                deltas.append(Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))]))
    return deltas


def merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring pieces of one kind, and leave out empty ones."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            found[-1] = Arguments(last.index, last.text + event.text)
        elif isinstance(event, CallStart) or event.text:
            found.append(event)
    return found
