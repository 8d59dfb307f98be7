"""Converts Python literals into JSON while they come, for pythonic calls and for values that are written as Python.

Nothing is evaluated. Lists, tuples and sets become arrays, dicts become objects, and an expression that is no literal
(`x + 1`, `b'z'`) becomes a string of its text. A string in quotes ends at the quote after which the text goes on as it
must after a value: models forget to escape inner quotes, as in `bash(command='sed -n '1,5p' file')`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace.parsers.events import Arguments, Event, Steps
from headrace.parsers.reader import Markers, Reader, collected, markers
from headrace.parsers.scalars import json_escaped, json_scalar, json_string

LOOK = 256
"""How many characters are looked at ahead, to tell a closing quote from an inner one."""
MAX_DEPTH = 64
"""How deep lists and dicts may nest. What is deeper is passed on as the text of an expression."""

Emit = Callable[[str], Event]
Ends = Callable[[str, int, bool], bool | None]
"""Whether a value may end at this place of a text, of which no more will come if the last argument says so; None if
that takes more text to tell."""

_SPACE = re.compile(r"\s*")
_OPENING = re.compile(r"""[rubfRUBF]{0,2}(?:'''|\"\"\"|'|")""")
_WORD = re.compile(r"\s*([\w.+-]*)(\s*)")
_CODE = re.compile(r"[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_BEGUN_CODE = re.compile(r"(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}

_OPENERS = markers("[", "(", "{")
_BETWEEN = markers(",", "]", ")", "}")
_CLOSING = markers(")")
_COLON = markers(":")
_STOPS = markers("[", "]", "(", ")", "{", "}", ",", ":", "'", '"')
_STRING_STOPS = {quote: markers(quote, "\\") for quote in ("'", '"', "'''", '"""')}
_ANY_CHARACTER = markers("\\", "'", '"')


class NotALiteralError(ValueError):
    """Says that a text which must be a literal is none."""


def literal(reader: Reader, emit: Emit, ends: Ends, *, depth: int = 0, strict: bool = False) -> Steps[None]:
    """Hand on the JSON of the literal at the cursor, which ends where `ends` says so. Strict: fails if it is none."""
    yield from reader.space()
    opening = yield from reader.ahead(_opening)
    if opening and not set("bBfF") & set(opening):
        yield from reader.scan(lambda _, at: at + len(opening))
        quote = opening.lstrip("rRuU")
        yield from _string(reader, emit, quote, ends, "r" in opening.lower(), strict)
        return
    bracket = "" if depth == MAX_DEPTH else (yield from reader.accept(_OPENERS))
    if bracket == "(":
        yield from _parentheses(reader, emit, depth + 1, strict)
    elif bracket == "{":
        yield from _braces(reader, emit, depth + 1, strict)
    elif bracket:
        yield from _items(reader, emit, "]", depth + 1, strict)
    else:
        text, stop = yield from _expression(reader, key=ends is _after_key)
        if not stop and reader.cut:
            return
        known = json_scalar(text.strip())
        if strict and known is None:
            raise NotALiteralError(text)
        yield emit(known or json_string(text.strip()))


def whole_literal(text: str) -> str | None:
    """Return the JSON of a text that is a Python literal, or None if it is none."""
    reader = Reader()
    reader.feed(text.strip())
    reader.close(cut=False)
    try:
        pieces = [piece.text for piece in literal(reader, _first, _at_end, strict=True) if isinstance(piece, Arguments)]
    except NotALiteralError:
        return None
    return "".join(pieces) if reader.ended else None


def _first(text: str) -> Event:
    return Arguments(0, text)


def _at_end(text: str, at: int, closed: bool) -> bool | None:
    rest = _SPACE.match(text, at)
    return (closed or None) if rest and rest.end() == len(text) else False


def _after_item(text: str, at: int, closed: bool) -> bool | None:
    """Whether an item of a list, or a value of a dict, may end here."""
    return _goes_on(text, at, closed, ",]})")


def _after_key(text: str, at: int, closed: bool) -> bool | None:
    """Whether what stands first in braces, a key or the first item of a set, may end here."""
    return _goes_on(text, at, closed, ",}:")


def _goes_on(text: str, at: int, closed: bool, marks: str) -> bool | None:
    """Whether one of these marks follows, or nothing."""
    seen = text[at : at + LOOK]
    rest = seen.lstrip()
    if rest or len(seen) == LOOK:
        return rest[:1] in marks and bool(rest)
    return closed or None


def _opening(text: str, at: int, closed: bool) -> str | None:
    """The opening of a string in quotes, with its prefix, or ""."""
    if at == len(text):
        return "" if closed else None
    if text[at] not in "'\"rubfRUBF":
        return ""
    if len(text) - at < 5 and not closed:
        return None
    found = _OPENING.match(text, at)
    return found.group() if found else ""


def is_literal(text: str, at: int, closed: bool) -> bool | None:
    """Return whether a string, list, tuple, dict or set begins here, or a whole number or word is here."""
    found = _WORD.match(text, at, at + LOOK)
    if found is None or (found.end() == len(text) <= at + LOOK and not closed):
        return None
    word, space = found.groups()
    follows = text[found.end() : found.end() + 1]
    if not space and follows in ("'", '"'):
        return not set(word) - set("rRuU")
    return json_scalar(word) is not None and follows in ",)]};" if word else follows in ("[", "(", "{")


def _string(reader: Reader, emit: Emit, quote: str, ends: Ends, raw: bool, strict: bool) -> Steps[None]:
    """Hand on a string, whose opening quote was read, as it comes."""
    yield emit('"')
    while True:
        found = yield from reader.pass_on(_STRING_STOPS[quote], lambda text: emit(json_escaped(text)))
        if found == "\\":
            yield emit((yield from _escape(reader, raw)))
        elif not found or (yield from reader.ahead(ends)):
            break
        else:
            yield emit(json_escaped(found))
    if strict and not found:
        raise NotALiteralError(quote)
    # A quote that an answer was cut behind may be an inner one.
    if not reader.cut or (found and not reader.ended):
        yield emit('"')


def _escape(reader: Reader, raw: bool) -> Steps[str]:
    """Read what follows a backslash; returns what it means, as it stands in a JSON string."""
    if raw:
        return json_escaped("\\" + (yield from reader.accept(_ANY_CHARACTER)))
    char = yield from reader.peek()
    if char and char in _ESCAPES:
        yield from reader.scan(lambda _, at: at + 1)
        return json_escaped(_ESCAPES[char])
    code = (yield from reader.ahead(_code)) if char else ""
    if not code:
        if reader.cut and (yield from reader.ahead(_is_begun_escape)):
            yield from reader.scan(lambda text, _: len(text))
            return ""
        return json_escaped("\\")  # as Python has it: an unknown escape stays as it is
    yield from reader.scan(lambda _, at: at + len(code))
    number = int(code, 8) if code[0].isdigit() else int(code[1:], 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        return f"\\u{number & 0xFFFF:04x}"  # half of a pair, which JSON joins
    return json_escaped(chr(number))


def _code(text: str, at: int, closed: bool) -> str | None:
    """The number of a character, after a backslash, or ""."""
    if text[at] not in "xuU01234567":
        return ""
    if len(text) - at < 9 and not closed:
        return None
    found = _CODE.match(text, at)
    return found.group() if found else ""


def _is_begun_escape(text: str, at: int, closed: bool) -> bool:
    """Whether the text ends within an escape, which says nothing yet."""
    return closed and _BEGUN_CODE.fullmatch(text, at) is not None


def past_commas(reader: Reader, closers: Markers) -> Steps[str]:
    """Read over commas and white space to the next item; returns what ends the items, which is read, if that is there.
    `closers` has the comma too."""
    mark = ","
    while mark == ",":
        yield from reader.space()
        mark = yield from reader.accept(closers)
    return mark


def close(reader: Reader, emit: Emit, mark: str, closer: str, text: str) -> Steps[None]:
    """End a container with `text` at the mark that was read. One that ends something else is left for that."""
    if mark != closer:
        reader.back(mark)
    if mark or not reader.cut:
        yield emit(text)


def _items(reader: Reader, emit: Emit, closer: str, depth: int, strict: bool, first: str = "") -> Steps[None]:
    """Hand on the items of a list, tuple or set after its opening bracket (or after its first item) as an array."""
    yield emit("[" + first)
    separator = ", " if first else ""
    while True:
        mark = yield from past_commas(reader, _BETWEEN)
        if mark or reader.ended:
            break
        if separator:
            yield emit(separator)
        separator = ", "
        yield from literal(reader, emit, _after_item, depth=depth, strict=strict)
    _check_closed(mark, closer, strict)
    yield from close(reader, emit, mark, closer, "]")


def _parentheses(reader: Reader, emit: Emit, depth: int, strict: bool) -> Steps[None]:
    """Hand on what stands in parentheses, whose opening was read: a tuple, or a value where no comma follows it."""
    yield from reader.space()
    if (yield from reader.peek()) == ")":
        yield from _items(reader, emit, ")", depth, strict)
        return
    first, _ = yield from collected(reader, literal(reader, emit, _after_item, depth=depth, strict=strict))
    yield from reader.space()
    if reader.ended and reader.cut:
        return
    if (yield from reader.peek()) == ",":
        yield from _items(reader, emit, ")", depth, strict, first=first)
        return
    if not (yield from reader.accept(_CLOSING)) and strict:
        raise NotALiteralError(first)
    yield emit(first)


def _braces(reader: Reader, emit: Emit, depth: int, strict: bool) -> Steps[None]:
    """Hand on a dict or a set after its opening brace: the first item's end tells which it is."""
    separator = "{"
    while True:
        mark = yield from past_commas(reader, _BETWEEN)
        if mark or reader.ended:
            break
        key, _ = yield from collected(reader, literal(reader, emit, _after_key, depth=depth, strict=strict))
        yield from reader.space()
        if reader.ended and reader.cut:
            return
        if (yield from reader.accept(_COLON)):
            name = key if key.startswith('"') else json_string(key)
            yield emit(f"{separator}{name}: ")
            yield from literal(reader, emit, _after_item, depth=depth, strict=strict)
        elif separator == "{":
            yield from _items(reader, emit, "}", depth, strict, first=key)
            return
        elif strict:
            raise NotALiteralError(key)
        separator = ", "
    _check_closed(mark, "}", strict)
    yield from close(reader, emit, mark, "}", "{}" if separator == "{" else "}")


def _check_closed(mark: str, closer: str, strict: bool) -> None:
    if strict and mark != closer:
        raise NotALiteralError(mark)


def _expression(reader: Reader, *, key: bool) -> Steps[tuple[str, str]]:
    """Read an expression up to the comma or bracket that ends it (of a key: the colon), over brackets and strings.

    Returns the expression and what ends it, which is left unread.
    """
    parts = []
    depth = 0
    while True:
        text, mark = yield from reader.until(_STOPS)
        parts.append(text)
        if mark in ("[", "(", "{"):
            depth += 1
        elif mark in ("'", '"'):
            parts.append(mark)
            mark = yield from _skipped_string(reader, mark, parts)
        elif not mark or (not depth and (mark != ":" or key)):
            reader.back(mark)
            return "".join(parts), mark
        elif mark not in ",:":
            depth -= 1
        parts.append(mark)


def _skipped_string(reader: Reader, quote: str, parts: list[str]) -> Steps[str]:
    """Read the rest of a string within an expression into `parts`; returns its closing quote, "" if there is none."""
    while True:
        text, stop = yield from reader.until(_STRING_STOPS[quote])
        parts.append(text)
        if stop != "\\":
            return stop
        parts.append(stop + (yield from reader.accept(_ANY_CHARACTER)))
