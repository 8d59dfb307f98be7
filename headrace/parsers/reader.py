"""Reads a text that is still being written, as if it were whole.

A format is a generator (`Steps`): it asks a `Reader` for text and yields events. Where the text that has come so far
does not decide what follows, a primitive yields None, and goes on when more text has come. So code for a stream reads
like code for a whole text, and a whole text is a stream that came at once: there is no second way to read one.

    def read(reader: Reader, calls: Calls) -> Steps[bool]:
        yield from reader.space()                             # over white space
        if not (yield from reader.accept("<call:")):          # is this what follows? then over it
            return False
        name, stop = yield from reader.until(NAME_END, limit=MAX_NAME)    # collected, up to one of the markers
        if not stop:                                          # the text ended, or the name is too long
            return False
        yield calls.start(name)
        yield from reader.pass_on(CALL_END, calls.arguments)  # handed on as it comes
        return True

**The law.** A primitive decides only what no further text can change: it holds back the end of what has come if a
marker may begin there. What a format does may depend on nothing but what primitives return; then the events, joined,
are the same for every way to cut the text.

**Time** is linear in the text: what was read is never looked at again, and no more is held back than the longest
marker (or `limit`). Text that a format must collect goes into a list as it comes. So never search the same text twice,
and give `until` a limit for whatever must be short, a name for instance.

**The end.** When `closed` is set no more text comes, and each primitive says so by what it returns: `peek` and
`accept` an empty string, `until` and `pass_on` an empty marker.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

from headrace.parsers.events import CallStart, Content, Event, Steps, T

SPACE = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")
MAX_NAME = 256
"""Characters of a function's name; what is longer is no name."""


class Markers:
    """Finds several strings in a text at the same time; of two at one place it finds the longer."""

    def __init__(self, *markers: str) -> None:
        if "" in markers:
            raise ValueError("a marker is empty")
        self.all = tuple(sorted(set(markers), key=len, reverse=True))
        self.longest = max(map(len, self.all), default=1)
        self._whole = _any(map(re.escape, self.all))
        self._begun = _any(map(_beginning, self.all))
        self.first = _any(sorted({re.escape(marker[0]) for marker in markers}))
        """A character that may begin one."""
        # A shorter marker within a longer one is not decided before the longer one is ruled out.
        self._nested = any(inner in outer for outer in self.all for inner in self.all if inner is not outer)

    def find(self, text: str, at: int, closed: bool) -> tuple[int, str]:
        """Return where the first marker is, and which; or, with "", how far the text certainly has none."""
        found = self._whole.search(text, at)
        if closed:
            return (found.start(), found.group()) if found else (len(text), "")
        if found and not self._nested:
            return found.start(), found.group()
        begun = self._begun.search(text, max(at, len(text) - self.longest + 1))
        if found and not (begun and begun.start() <= found.start()):
            return found.start(), found.group()
        return (begun.start() if begun else len(text)), ""

    def may_begin(self, text: str, at: int) -> bool:
        """Return whether all the text from `at` is the beginning of a marker, and not the whole of one."""
        return bool(self._begun.match(text, at))


def collected(reader: Reader, steps: Steps[T]) -> Steps[tuple[str, T]]:
    """Run a reading; return the text that it would have handed on, joined, and what it returns."""
    parts: list[str] = []
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            return "".join(parts), end.value
        if event is None:
            reader.passing = None  # what comes must come through here
            yield None
        elif not isinstance(event, CallStart):
            parts.append(event.text)


@functools.cache
def markers(*texts: str) -> Markers:
    """Return the Markers of these strings, made once: for those of a table's row."""
    return Markers(*texts)


def _beginning(marker: str) -> str:
    """A pattern of the proper beginnings of a marker at the end of a text; time is that of the marker's length."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return f"(?:{re.escape(marker[0])}{pattern}\\Z)" if len(marker) > 1 else "(?!)"


def _any(patterns: Iterable[str]) -> re.Pattern[str]:
    """Any of these; of none, a pattern that nothing matches."""
    return re.compile("|".join(patterns) or "(?!)")


class Reader:
    """Holds the text of one answer with a cursor; each method that is a generator is a primitive for formats."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.closed = False
        """No more text will come."""
        self.cut = False
        """The text was ended by max_tokens or a stop string, not by the model."""
        self.passing: tuple[Markers, Callable[[str], Event] | None] | None = None
        """Set while the format hands on text and nothing is held back: a piece in which no marker may begin is then
        an event without waking the format."""

    def feed(self, piece: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + piece
        self._at = 0

    def close(self, *, cut: bool) -> None:
        """Say that no more text comes."""
        self.closed = True
        self.cut = cut

    def keep(self) -> None:
        """Begin to keep what is read, for `kept`."""
        self._kept = []

    def kept(self) -> str:
        """Return all that was read since `keep`, and keep no more."""
        text = "".join(self._kept or ())
        self._kept = None
        return text

    @property
    def ended(self) -> bool:
        """Whether all the text was read and no more will come."""
        return self.closed and self._at == len(self._text)

    def _take(self, end: int) -> str:
        """Read up to `end`."""
        text = self._text[self._at : end]
        self._at = end
        if self._kept is not None and text:
            self._kept.append(text)
        return text

    def again(self, text: str) -> None:
        """Put text that was read before back in front of what follows: once in an answer, or time is not linear."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def back(self, text: str) -> None:
        """Put back `text`, a marker that was just read: only before anything else is read."""
        self._at -= len(text)
        if self._kept:
            self._kept[-1] = self._kept[-1].removesuffix(text)

    def peek(self) -> Steps[str]:
        """Return the next character, which stays unread; "" at the end."""
        while self._at == len(self._text) and not self.closed:
            yield None
        return self._text[self._at : self._at + 1]

    def space(self) -> Steps[str]:
        """Read white space; returns it."""
        parts = []
        while True:
            found = _SPACE.match(self._text, self._at)
            parts.append(self._take(found.end() if found else self._at))
            if self._at < len(self._text) or self.closed:
                return "".join(parts)
            yield None

    def accept(self, markers: Markers) -> Steps[str]:
        """Read the marker that the text goes on with, and return it; "" and nothing read if it goes on otherwise.

        The beginning of a marker within which an answer was cut is read too: it is no text.
        """
        while not self.closed and (self._at == len(self._text) or markers.may_begin(self._text, self._at)):
            yield None
        for marker in markers.all:
            if self._text.startswith(marker, self._at):
                return self._take(self._at + len(marker))
        if self.cut and markers.may_begin(self._text, self._at):
            self._take(len(self._text))
        return ""

    def until(self, markers: Markers, limit: int = 0) -> Steps[tuple[str, str]]:
        """Read up to a marker and over it; returns the text before it and the marker, "" at the end of the text.

        With a limit, the marker must begin within that many characters; otherwise just these are read, and the marker
        returned is "".
        """
        if limit:
            return (yield from self._near(markers, limit))
        return (yield from collected(self, self.pass_on(markers, Content)))

    def _near(self, markers: Markers, limit: int) -> Steps[tuple[str, str]]:
        """`until` with a limit: looks no further than that."""
        while True:
            text = self._text[self._at : self._at + limit + markers.longest]
            closed = self.closed and self._at + len(text) == len(self._text)
            end, found = markers.find(text, 0, closed)
            if end > limit:
                return self._take(self._at + limit), ""
            if found or closed:
                return self._take(self._at + end), self._take(self._at + len(found))
            yield None

    def pass_on(self, markers: Markers, event: Callable[[str], Event] | None, *, strict: bool = False) -> Steps[str]:
        """Hand on text as it comes, up to a marker, which is read too and returned; "" at the end of the text.

        Without an event the text is left out. Strict: so is the beginning of a marker within which a text was cut.
        """
        while True:
            end, found = markers.find(self._text, self._at, self.closed and not (strict and self.cut))
            text = self._take(end)
            if text and event:
                yield event(text)
            if self.closed and not found:
                self._take(len(self._text))
            if found or self.closed:
                return self._take(self._at + len(found))
            if self._at == len(self._text):
                self.passing = markers, event
            yield None
            self.passing = None

    def scan(self, match: Callable[[str, int], int]) -> Steps[str]:
        """Read as far as `match`, of the text so far and a place in it, says; "" at the end of the text.

        For lexers, whose state tells them how to go on.
        """
        while self._at == len(self._text) and not self.closed:
            yield None
        return self._take(match(self._text, self._at)) if self._at < len(self._text) else ""

    def ahead(self, decide: Callable[[str, int, bool], T | None]) -> Steps[T]:
        """Return what `decide` says of the text from the cursor on, none of which is read.

        It is given the text, the cursor and `closed`; it says None while further text may change its answer, and must
        look at a bounded piece.
        """
        while (answer := decide(self._text, self._at, self.closed)) is None:
            yield None
        return answer
