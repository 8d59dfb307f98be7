"""Takes an answer apart into reasoning, content and tool calls, while it is being written or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.parsers.calls import Calls
from headrace.parsers.events import Arguments, CallStart, Content, Event, Reasoning, Steps
from headrace.parsers.formats import ReasoningFormat, ToolFormat
from headrace.parsers.reader import Reader, markers
from headrace.parsers.reasoning import read_first, read_open
from headrace.parsers.tools import FunctionTool


@dataclass
class Call:
    """Holds a tool call of a whole answer."""

    name: str
    arguments: str
    """JSON text."""
    id: str | None = None


@dataclass
class Answer:
    """Holds a whole answer. What is absent is None, never an empty string."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[Call] = field(default_factory=list)


class OutputParser:
    """Reads one answer.

    `reasoning_open`: True if the prompt ends inside a thought, False if it closed one or thinking is off, None if
    nothing is known of the prompt (`reasoning.begins_open` finds out).
    """

    def __init__(
        self,
        tool: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Sequence[FunctionTool] = (),
        reasoning_open: bool | None = None,
    ) -> None:
        self._reader = Reader()
        self._steps = _answer(self._reader, Calls(self._reader, tools), tool, reasoning, reasoning_open)

    def feed(self, text: str) -> list[Event]:
        """Return the events that this piece of the answer brings."""
        passing = self._reader.passing
        if passing and not passing[0].first.search(text):
            return [passing[1](text)] if text and passing[1] else []
        self._reader.feed(text)
        return self._run()

    def finish(self, *, cut: bool) -> list[Event]:
        """Return the last events; `cut` says that max_tokens or a stop string ended the answer, not the model."""
        self._reader.close(cut=cut)
        return self._run()

    def _run(self) -> list[Event]:
        """Read on as far as the text goes."""
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events


def parse(
    text: str,
    tool: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    tools: Sequence[FunctionTool] = (),
    *,
    reasoning_open: bool | None = None,
    cut: bool = False,
) -> Answer:
    """Take a whole answer apart."""
    parser = OutputParser(tool, reasoning, tools, reasoning_open)
    return join([*parser.feed(text), *parser.finish(cut=cut)])


def join(events: Sequence[Event]) -> Answer:
    """Return the answer that a stream of events says."""
    thoughts, said, calls = [], [], []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Reasoning(text):
                thoughts.append(text)
            case Content(text):
                said.append(text)
            case CallStart(_, name, id):
                calls.append(Call(name, "", id))
                arguments.append([])
            case Arguments(index, text):
                arguments[index].append(text)
    for call, parts in zip(calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return Answer("".join(thoughts) or None, "".join(said) or None, calls)


def _answer(
    reader: Reader, calls: Calls, tool: ToolFormat | None, reasoning: ReasoningFormat | None, is_open: bool | None
) -> Steps[None]:
    """Read a whole answer."""
    whole = (tool.syntax if tool and tool.whole_answer else None) or (reasoning.whole_answer if reasoning else None)
    if whole:
        yield from whole.read(reader, calls, "")
        return
    lead = (yield from read_first(reader, reasoning, is_open)) if reasoning else ""
    yield from _content(reader, calls, tool, reasoning, lead)


def _content(
    reader: Reader, calls: Calls, tool: ToolFormat | None, reasoning: ReasoningFormat | None, lead: str
) -> Steps[None]:
    """Read content with the calls in it, and with more reasoning where the format allows that.

    `lead` is white space that content begins with. It waits for other text, so that an answer of calls alone has none.
    """
    openers = tool.openers if tool else ()
    thoughts = reasoning.open if reasoning and reasoning.anywhere else ()
    beginnings = tool.beginnings if tool else ()
    silent = (*(tool.silent if tool else ()), *(reasoning.silent if reasoning else ()))
    stops = markers(*openers, *thoughts, *beginnings, *silent)
    starts = at_beginning = markers(*stops.all, *(tool.bare if tool else ()))
    while True:
        lead += yield from reader.space()
        found = yield from reader.accept(starts)
        left_out = tool is not None and calls.count > 0 and not tool.keeps_text_after
        if not found:
            if reader.ended:
                break
            starts = stops
            if lead and not left_out:
                yield Content(lead)
            lead = ""
            found = yield from reader.pass_on(stops, None if left_out else Content, strict=True)
        if not found:
            break
        if reasoning and found in thoughts:
            yield from read_open(reader, reasoning)
        elif found in beginnings:
            if not left_out:
                yield Content(lead + found)
            starts, lead = at_beginning, ""
        elif tool and (found in openers or found in tool.bare):
            given_back = yield from _calls(reader, calls, tool, found)
            if given_back and not left_out:
                starts = stops
                yield Content(lead + given_back)
            lead = ""
    if lead and not calls.count:
        yield Content(lead)


def _calls(reader: Reader, calls: Calls, tool: ToolFormat, opener: str) -> Steps[str]:
    """Read what follows an opener; returns the text to give back as content, if it made no call.

    What an answer that was cut short has of a call's markup is never content.
    """
    reader.keep()
    begun = calls.count
    made = yield from tool.syntax.read(reader, calls, opener)
    kept = reader.kept()
    if made or calls.count > begun or (reader.ended and reader.cut and opener not in tool.bare):
        return ""
    return opener + kept
