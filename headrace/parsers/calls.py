"""Makes the events of the calls of one answer, and knows the tools that they may name."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.parsers.events import Arguments, CallStart
from headrace.parsers.reader import Reader
from headrace.parsers.tools import FunctionTool


class Calls:
    """Makes the events of calls, each with its index."""

    def __init__(self, reader: Reader, tools: Sequence[FunctionTool] = ()) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.count = 0
        """Calls that began."""
        self._reader = reader

    def start(self, name: str, id: str | None = None) -> CallStart:
        """Begin a call: from now on its markup is not given back as content."""
        self._reader.kept()
        self.count += 1
        return CallStart(self.count - 1, name, id)

    def arguments(self, text: str) -> Arguments:
        """Return the event of a piece of arguments, those of the call that began last."""
        return Arguments(self.count - 1, text)
