"""Decodes JSON of any size in short steps, so that a thread that does it does not hold up the event loop.

One call of msgspec holds Python's lock (GIL) from beginning to end, which for a body of 32 MiB takes seconds. Here,
regular expressions find where the text may be cut, and msgspec decodes, and so checks, every piece.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.errors import RequestError, clip

PIECE = 2**16
"""Bytes that are decoded in one call, roughly."""
MAX_VALUES = 2**17
"""Most values of a body. Token ids in lists do not count: the body's size bounds them."""
MAX_ITEMS = 2**20
"""Most items of one list, which is more than any context or vocabulary that fits into a body."""
MAX_LEVELS = 128
SHARED_BELOW = 2**19
"""Equal integers below this (more than any vocabulary) share one object: 8 bytes for each occurrence instead of 36."""
_SPACE = b" \t\n\r"
_MARK = re.compile(rb'["\[\]{}]')
_TEXT = re.compile(
    rb'[^"\\]*(?:\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}|u[dD][89abAB]..\\u[0-9a-fA-F]{4})[^"\\]*)*', re.DOTALL
)
"""A part of a string that ends neither inside an escape nor between the two halves of a surrogate pair."""
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}
_BYTE = re.compile(r"\(byte (\d+)\)")
_KEY = re.compile(rb'[\s,]*"([\w-]{1,64})"\s*:')
_text = msgspec.json.Decoder(str)


def decode_json(body: bytes | bytearray) -> Any:
    """Decode a body, with the results and errors of `msgspec.json.decode`. Raises RequestError if a large one has too
    many values or levels."""
    return msgspec.json.decode(body) if len(body) <= PIECE else _Pieces(body).decode()


class _Open:
    """Is a list or object whose end has not been reached. Small ones are decoded as part of what contains them. Of a
    large one, `built` holds the items so far."""

    __slots__ = ("begin", "built", "comma", "items", "key", "opening", "start")

    def __init__(self, opening: int, begin: int) -> None:
        self.opening = opening
        self.begin = begin
        self.start = begin + 1
        """Where the items that are not in `built` begin."""
        self.comma = self.start
        """Its last comma so far: where it may be cut."""
        self.items = 0
        self.built: list[Any] | dict[str, Any] | None = None
        self.key: Any = -1
        """Key in `built` of the large value that is being decoded."""


class _Pieces:
    """Decodes one large body in a single pass, keeping the lists and objects that are open at the current place."""

    def __init__(self, body: bytes | bytearray) -> None:
        self._body = body
        root = _Open(ord("["), -1)  # the document is the one item of a list
        root.built = []
        self._open = [root]
        self._values = 0
        self._shared: dict[int, int] = {}

    def decode(self) -> Any:
        body, size, at = self._body, len(self._body), 0
        while at < size:
            here = self._open[-1]
            mark = _MARK.search(body, at, at + PIECE)
            end = mark.start() if mark else min(at + PIECE, size)
            if commas := body.count(b",", at, end):
                self._add_items(here, commas)
                here.comma = body.rfind(b",", at, end)
            if here.comma - here.start >= PIECE:
                self._build(len(self._open) - 1)
                self._take(here, here.comma)
            at = end
            if mark is None:
                if not commas and at < size:
                    raise _wrong(f"a number, or a run of spaces, has more than {PIECE} bytes", end)
            elif body[at] == ord('"'):
                at = self._skip_string(at)
            elif body[at] in _CLOSING:
                self._enter(at)
                at += 1
            else:
                self._close(at)
                at += 1
        root = self._open.pop()
        if self._open:
            raise _wrong("it ends too early", size)
        self._take(root, size)
        assert isinstance(root.built, list)
        if len(root.built) != 1:
            raise _wrong("there is more than one value", size)
        return root.built[0]

    def _enter(self, at: int) -> None:
        self._count(1)
        if len(self._open) > MAX_LEVELS:
            raise RequestError(f"the JSON is nested too deeply: more than {MAX_LEVELS} levels", self._field())
        self._open.append(_Open(self._body[at], at))

    def _close(self, at: int) -> None:
        here = self._open[-1]
        if len(self._open) == 1 or _CLOSING[here.opening] != self._body[at]:
            raise _wrong("a bracket closes what was not opened", at)
        if here.built is None and at - here.begin >= PIECE:
            self._build(len(self._open) - 1)
        if here.built is not None:
            self._take(here, at)
        self._open.pop()
        if here.built is not None:
            self._put(here.built, at + 1)

    def _skip_string(self, at: int) -> int:
        """Return where the string at `at` ends. A large one is decoded here."""
        self._count(1)
        body, size, cuts = self._body, len(self._body), [at + 1]
        while True:
            match = _TEXT.match(body, cuts[-1], cuts[-1] + PIECE)
            end = match.end() if match else cuts[-1]
            if end < size and body[end] == ord('"'):
                break
            while end < size and end > cuts[-1] and body[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            if end == cuts[-1]:
                raise _wrong("a string does not end, or holds a wrong escape (halves of characters come in pairs)", end)
            cuts.append(end)
        if end - at > PIECE:
            here = self._open[-1]
            self._build(len(self._open) - 1)
            self._reserve(here, at)
            pieces = zip(cuts, [*cuts[1:], end], strict=True)
            self._put("".join([self._decode(b'"', start, stop, b'"', _text) for start, stop in pieces]), end + 1)
        return end + 1

    def _build(self, depth: int) -> None:
        """Build the open value at `depth`, and those that contain it, from pieces from now on."""
        for outer, inner in zip(self._open[:depth], self._open[1 : depth + 1], strict=True):
            if inner.built is None:
                self._reserve(outer, inner.begin)
                inner.built = [] if inner.opening == ord("[") else {}

    def _reserve(self, outer: _Open, at: int) -> None:
        """Put a placeholder into `outer` for the large value that begins at `at`."""
        if outer.comma > outer.start:
            self._take(outer, outer.comma)
        found = self._items(outer, at, b"null")
        if isinstance(outer.built, dict):
            outer.key = next(iter(found))
            outer.built[outer.key] = None
        else:
            assert outer.built is not None
            outer.built.append(None)

    def _put(self, value: Any, end: int) -> None:
        outer = self._open[-1]
        assert outer.built is not None
        outer.built[outer.key] = value
        outer.start = outer.comma = end

    def _take(self, here: _Open, end: int) -> None:
        """Decode the items up to `end`, which is a comma or the closing bracket, and add them to `built`."""
        found = self._items(here, end)
        self._settle(found)
        if isinstance(here.built, dict):
            here.built.update(found)
        else:
            assert here.built is not None
            here.built.extend(found)
        here.start = here.comma = end

    def _items(self, here: _Open, end: int, last: bytes = b"") -> Any:
        text = self._body[here.start : end]
        start = here.start
        if here.built:  # items that follow others begin with a comma, and do not end with one
            rest = text.lstrip(_SPACE)
            if rest or last:
                if rest[:1] != b"," or not (rest[1:].strip(_SPACE) or last):
                    raise _wrong("a comma is missing, or one too many", end)
                start = end - len(rest) + 1
        opening = bytes((here.opening,))
        closing = bytes((_CLOSING[here.opening],))
        return self._decode(opening, start, end, last + closing)

    def _decode(
        self, before: bytes, start: int, end: int, after: bytes, decoder: msgspec.json.Decoder[Any] | None = None
    ) -> Any:
        try:
            return (decoder or _any).decode(b"".join((before, self._body[start:end], after)))
        except msgspec.DecodeError as error:
            raise msgspec.DecodeError(_BYTE.sub(lambda m: f"(byte {start + int(m[1]) - 1})", str(error))) from None

    def _settle(self, found: list[Any] | dict[str, Any]) -> None:
        """Count new values, and make equal token ids share one object."""
        if isinstance(found, list) and {*map(type, found)} == {int}:
            if min(found) >= 0 and max(found) < SHARED_BELOW:  # larger ones could be chosen to have equal hashes
                found[:] = map(self._shared.setdefault, found, found)
            else:
                self._count(len(found))
            return
        self._count(len(found))
        for value in found.values() if isinstance(found, dict) else found:
            if isinstance(value, list | dict):
                self._settle(value)

    def _add_items(self, here: _Open, count: int) -> None:
        here.items += count
        if here.items >= MAX_ITEMS:
            raise RequestError(f"a list in a request may hold at most {MAX_ITEMS} items", self._field())

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise RequestError(f"a request may hold at most {MAX_VALUES} texts, lists and objects", self._field())

    def _field(self) -> str | None:
        """Return the field of the document that is being read."""
        if len(self._open) < 2:
            return None
        match = _KEY.match(self._body, self._open[1].comma)
        return match[1].decode() if match else None


_any = msgspec.json.Decoder()


def _wrong(what: str, at: int) -> msgspec.DecodeError:
    return msgspec.DecodeError(f"JSON is malformed: {clip(what)} (byte {at})")
