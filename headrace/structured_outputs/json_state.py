"""Follows JSON while it is written, byte by byte, and knows which earlier items an item may still become equal to.

States are values that share what they have in common: a step makes a new one, and the old one can be gone on from too.
Items are compared as JSON values: 1 and 1.0 are equal, and objects whose keys stand in another order.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.structured_outputs.limits import MAX_DIFFERENT
from headrace.structured_outputs.unique_places import Place

SPACES = frozenset(b" \t\r\n")
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_ARRAY, _ARRAY_END, _OBJECT, _OBJECT_END = b"[]{}"
_NUMBER = frozenset(b"-+.0123456789eE")
_WORDS = (b"true", b"false", b"null")
_ENDLESS = (math.inf, -math.inf)
_SURE_DIGITS = 15
"""Those that floats keep."""
_MOST_DIGITS = 4000
"""Python reads no longer integers."""


class Phase(enum.Enum):
    """Says what may come next."""

    VALUE = enum.auto()
    FIRST = enum.auto()
    """A value, or the end of an array that has none."""
    STRING = enum.auto()
    WORD = enum.auto()
    NUMBER = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    KEY_STRING = enum.auto()
    COLON = enum.auto()
    AFTER = enum.auto()
    """A comma, or the end of an array or object."""
    END = enum.auto()
    """Nothing: the whole value is written."""


class Candidate:
    """Represents an earlier item of an array, or a part of one, that what is being written may become equal to."""

    __slots__ = ("digits", "room", "text", "up", "value")

    def __init__(self, value: Any, up: Candidate | None = None, room: int = 0) -> None:
        self.value = value
        self.up = up
        """What it is a part of; None: it is the item."""
        self.text = value.encode(errors="surrogatepass") if isinstance(value, str) else b""
        self.digits = digits_of(repr(value).encode())[:_SURE_DIGITS].rstrip(b"0") if is_number(value) else b""
        self.room = room
        """How many characters might have followed the last one of a string."""


class Frame(NamedTuple):
    """Represents an array or an object that is not closed yet."""

    outer: Frame | None
    place: Place
    is_array: bool
    in_item: bool
    """Whether it is, or is within, an item of an array whose items must differ."""
    candidates: tuple[Candidate, ...]
    """Those that it may become equal to."""
    num_members: int = 0
    """Of its items, or properties, that are complete."""
    key: str = ""
    members: tuple[Any, ...] = ()
    """Its items, or pairs of key and value, where it is in an item."""
    used: tuple[Candidate, ...] = ()
    """Its items, where they must differ."""

    @property
    def inner(self) -> Place:
        """Return the place of the value that comes next."""
        return self.place.item(self.num_members) if self.is_array else self.place.named(self.key)

    def keys(self) -> Iterator[Candidate]:
        """Yield keys that the one which comes next may become equal to: its own, which must not come twice, and those
        of what the object may become equal to."""
        own = dict[str, Any](self.members)
        yield from map(Candidate, own)
        yield from (Candidate(key, one) for one in self.candidates for key in one.value if key not in own)

    def parts(self) -> tuple[Candidate, ...]:
        """Return what the value that comes next may become equal to."""
        if self.is_array:
            found = [
                Candidate(one.value[self.num_members], one)
                for one in self.candidates
                if self.num_members < len(one.value)
            ]
        else:
            found = [Candidate(one.value[self.key], one) for one in self.candidates if self.key in one.value]
        return (*found, *self.used)


class State(NamedTuple):
    """Represents JSON up to some byte."""

    phase: Phase
    frame: Frame | None
    raw: bytes = b""
    """What is written of a string, a word or a number."""
    candidates: tuple[Candidate, ...] = ()
    """What that may become equal to."""
    place: Place | None = None
    """Where the outermost value is, before it begins."""

    @property
    def settled(self) -> bool:
        """Return whether nothing that is open can become equal to an earlier item, whatever follows."""
        frame = self.frame
        if self.phase in (Phase.STRING, Phase.WORD, Phase.NUMBER, Phase.KEY_STRING):
            return not self.candidates
        if frame is None:
            return True
        if frame.candidates or frame.used:
            return False
        return frame.is_array or not frame.members or self.phase in (Phase.COLON, Phase.VALUE)

    @property
    def in_string(self) -> bool:
        return self.phase in (Phase.STRING, Phase.KEY_STRING)

    def step(self, byte: int) -> State | None:
        """Return the state behind a byte; None, if it makes an item equal to an earlier one, or is no JSON."""
        match self.phase:
            case Phase.STRING | Phase.KEY_STRING:
                return self._in_string(byte)
            case Phase.NUMBER if byte in _NUMBER:
                raw = self.raw + bytes((byte,))
                return State(Phase.NUMBER, self.frame, raw, _still_numbers(raw, self.candidates))
            case Phase.NUMBER:
                try:
                    value = _number(self.raw)
                except ValueError:
                    return None  # it is not complete
                # Of floats, others than those with the same digits may be equal: 1e-999 is 0.
                parts = () if self.frame is None else self.frame.parts()
                ended = self._completed(value, [one for one in parts if is_number(one.value) and one.value == value])
                return ended and ended.step(byte)
            case Phase.WORD:
                return self._in_word(self.raw + bytes((byte,)), self.candidates)
            case Phase.END:
                return self
        if byte in SPACES:
            return self
        match self.phase:
            case Phase.FIRST if byte == _ARRAY_END:
                return self._closed()
            case Phase.VALUE | Phase.FIRST:
                return self._begun(byte)
            case Phase.FIRST_KEY if byte == _OBJECT_END:
                return self._closed()
            case Phase.KEY | Phase.FIRST_KEY if byte == _QUOTE:
                assert self.frame is not None
                return State(Phase.KEY_STRING, self.frame, b"", tuple(self.frame.keys()))
            case Phase.COLON if byte == _COLON:
                return State(Phase.VALUE, self.frame)
            case Phase.AFTER:
                assert self.frame is not None
                if byte == _COMMA and len(self.frame.used) >= MAX_DIFFERENT:
                    return None
                if byte == _COMMA:
                    return State(Phase.VALUE if self.frame.is_array else Phase.KEY, self.frame)
                if byte == (_ARRAY_END if self.frame.is_array else _OBJECT_END):
                    return self._closed()
        return None

    def _begun(self, byte: int) -> State | None:
        """Return the state behind the first byte of a value."""
        frame = self.frame
        candidates = () if frame is None else frame.parts()
        if byte == _QUOTE:
            return State(Phase.STRING, frame, b"", tuple(one for one in candidates if isinstance(one.value, str)))
        if byte in (_ARRAY, _OBJECT):
            kind, in_item = (list if byte == _ARRAY else dict), False
            place = self.place
            if frame is not None:
                place, in_item = frame.inner, frame.in_item or (frame.is_array and frame.place.unique)
            assert place is not None
            same = tuple(one for one in candidates if isinstance(one.value, kind))
            opened = Frame(frame, place, byte == _ARRAY, in_item, same)
            return State(Phase.FIRST if byte == _ARRAY else Phase.FIRST_KEY, opened)
        if byte in b"tfn":
            return self._in_word(bytes((byte,)), candidates)
        if byte in b"-0123456789":
            raw = bytes((byte,))
            return State(Phase.NUMBER, frame, raw, _still_numbers(raw, filter(_has_number, candidates)))
        return None

    def _in_string(self, byte: int) -> State | None:
        if byte == _QUOTE and (len(self.raw) - len(self.raw.rstrip(b"\\"))) % 2 == 0:
            try:
                value = _text(self.raw)
            except ValueError:
                return None  # an escape is not complete
            if self.phase is Phase.STRING:
                return self._completed(value, [one for one in self.candidates if one.value == value])
            if any(one.value == value and one.up is None for one in self.candidates):
                return None  # a key that comes twice would hide a value
            assert self.frame is not None
            return State(Phase.COLON, self.frame._replace(key=value))
        raw = self.raw + bytes((byte,))
        if not self.candidates:
            return State(self.phase, self.frame, raw)
        known = known_text(raw) if b"\\" in raw else raw
        candidates = tuple([one for one in self.candidates if one.text.startswith(known)])
        return State(self.phase, self.frame, raw, candidates)

    def _in_word(self, raw: bytes, candidates: Iterable[Candidate]) -> State | None:
        if raw in _WORDS:
            return self._completed((raw,), [one for one in candidates if one.value == (raw,)])
        same = (one for one in candidates if isinstance(one.value, tuple) and one.value[0].startswith(raw))
        if any(word.startswith(raw) for word in _WORDS):
            return State(Phase.WORD, self.frame, raw, tuple(same))
        return None

    def _closed(self) -> State | None:
        """Return the state behind the end of an array or object."""
        frame = self.frame
        assert frame is not None
        value = list(frame.members) if frame.is_array else dict(frame.members)
        matches = [one for one in frame.candidates if len(one.value) == frame.num_members]
        return State(Phase.AFTER, frame.outer)._completed(value, matches)

    def _completed(self, value: Any, matches: list[Candidate]) -> State | None:
        """Return the state behind a value that is equal to `matches`."""
        frame = self.frame
        if frame is None:
            return State(Phase.END, None)
        ups: list[Candidate] = []
        for match in matches:
            if match.up is None:
                return None
            ups.append(match.up)
        frame = frame._replace(num_members=frame.num_members + 1, candidates=tuple(ups))
        if frame.in_item:
            frame = frame._replace(members=(*frame.members, value if frame.is_array else (frame.key, value)))
        if frame.is_array and frame.place.unique:
            frame = frame._replace(used=(*frame.used, Candidate(value)))
        return State(Phase.AFTER, frame)


def start(place: Place) -> State:
    """Return the state in front of the whole value."""
    return State(Phase.VALUE, None, place=place)


def _text(raw: bytes) -> str:
    if b"\\" not in raw:
        return raw.decode(errors="surrogateescape")
    return str(json.loads(b'"' + raw + b'"'))


@lru_cache(maxsize=1024)
def known_text(raw: bytes) -> bytes:
    """Return the text of a string that has been begun, up to an escape that is not complete."""
    if b"\\" not in raw:
        return raw
    for cut in range(12):  # \ud83d\ude00 is one character
        head = raw[: len(raw) - cut]
        try:
            text = json.loads(b'"' + head.decode(errors="ignore").encode() + b'"')
        except ValueError:
            continue
        if not "\ud800" <= text[-1:] <= "\udbff":
            whole: bytes = text.encode(errors="surrogatepass")
            return whole
    return b""


def is_number(value: Any) -> bool:
    """Return whether a value of a candidate is a number; words are none."""
    return isinstance(value, int | float)


def _has_number(one: Candidate) -> bool:
    return is_number(one.value)


def _number(raw: bytes) -> Any:
    if raw.lstrip(b"-").isdigit():
        return int(raw) if len(raw) < _MOST_DIGITS else (raw,)
    return float(raw)


def _still_numbers(raw: bytes, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates whose first digits are those of a number that has been begun."""
    digits = digits_of(raw)[:_SURE_DIGITS]
    short = digits.rstrip(b"0")
    return tuple(
        [one for one in candidates if one.digits.startswith(digits) or one.digits == short or one.value in _ENDLESS]
    )


def digits_of(raw: bytes) -> bytes:
    """Return a number's digits from the first that is not 0."""
    return raw.lstrip(b"-").lower().partition(b"e")[0].replace(b".", b"").lstrip(b"0")
