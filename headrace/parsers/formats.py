"""Describes what families of models write as tool calls and as reasoning: all that a parser takes for them.

A new format is a row in `formats.json`, which `table.py` reads. Most need no code: their calls are written in one of
the syntaxes that are there, with settings. A syntax is a frozen dataclass with a method `read`, which is given control
after an opener and keeps it until its calls end:

- `json_calls.JsonCalls`: objects with a name and arguments, one, several or a list
- `named_calls.NamedCalls`: a name, a separator and arguments in JSON
- `tagged.TaggedCalls`: tags with a name and parameters, whose values may be elements (`elements.py`)
- `pythonic.PythonicCalls`, `gemma.GemmaCalls`, `harmony.HarmonyCalls`

`reader.py` says how to write `read`. What `OutputParser` does for every format: it looks for openers in content; it
gives the text from the opener on back as content if `read` returns False and began no call; it drops it instead if the
answer was cut short (markup never leaks); and it drops text after the first call, as the peers do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.parsers.calls import Calls
from headrace.parsers.events import Steps
from headrace.parsers.reader import Reader


class Syntax(Protocol):
    """Reads calls that are written in one way. Implementations are frozen dataclasses."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read what follows an opener, up to the end of the call or of the section of calls, closing markup included.

        Returns False if this is no call after all. Text that it does not understand it leaves to be read as content.
        """
        ...


@dataclass(frozen=True)
class ByOpener:
    """Describes calls that are written in one of several ways: the opener says in which."""

    ways: tuple[tuple[str, Syntax], ...]
    """Opener, and what follows it."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps[bool]:
        """Read what follows an opener, as `Syntax.read` does."""
        return (yield from dict(self.ways)[opener].read(reader, calls, opener))


@dataclass(frozen=True)
class ToolFormat:
    """Describes how a family writes tool calls."""

    name: str
    syntax: Syntax
    openers: tuple[str, ...]
    """Markup that begins a call or a section of calls, anywhere in content."""
    bare: tuple[str, ...] = ()
    """Openers that are no markup, such as "{": what makes no call is content also in an answer that was cut short. They
    count only where content begins, unless they are among `openers` too."""
    beginnings: tuple[str, ...] = ()
    """Text in content behind which content begins anew, such as the end of a thought that no reasoning parser reads."""
    silent: tuple[str, ...] = ()
    """Markup in content that says nothing, such as the end of a section: left out."""
    keeps_text_after: bool = False
    """Text after a call is content too, instead of being left out."""
    whole_answer: bool = False
    """The syntax reads all of an answer, reasoning and content included (harmony): no openers are looked for."""
    ids: Literal["chatcmpl-tool", "kimi", "mistral"] = "chatcmpl-tool"
    """The form of a call's id where the text has none: kimi: functions.NAME:INDEX, mistral: 9 letters or digits."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Describes how a family writes its reasoning."""

    name: str
    open: tuple[str, ...]
    """Markup that begins it; the first is the one to write. Repeated, it counts once."""
    close: tuple[str, ...]
    """Markup that ends it; the first is the one to write."""
    unmarked: Literal["reasoning", "content", "undecided"] = "reasoning"
    """What a text is that does not begin with `open`, where nothing is known of the prompt. "undecided": held until
    `close` comes, which makes what stands before it reasoning, or the end, which makes it content."""
    unclosed: Literal["reasoning", "content"] = "reasoning"
    """What a text is that begins with `open` and never has `close`, where nothing is known of the prompt."""
    call_openers: tuple[str, ...] = ()
    """Markup of a tool call that ends reasoning which is never closed. Text behind it waits for `close` or the end."""
    anywhere: bool = False
    """Reasoning may begin after content too."""
    silent: tuple[str, ...] = ()
    """Markup around content that says nothing, such as <answer>: left out."""
    switch: str = ""
    """Keyword of the chat template that turns thinking on and off, is on by default, and leaves `open` to the model."""
    as_content: bool = False
    """Reasoning stays in the content, behind its opener (minimax_m2_append_think)."""
    whole_answer: Syntax | None = None
    """Reads all of an answer (harmony)."""
