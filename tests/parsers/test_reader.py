"""The primitives of `Reader`: what they return, and that they decide nothing which more text could change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from headrace.parsers.events import Content, Event, Steps
from headrace.parsers.reader import Markers, Reader
from tests.parsers.reading import in_three


def run(pieces: list[str], steps: Callable[[Reader], Steps[Any]]) -> tuple[Any, str]:
    """What a generator returns over these pieces, and the text of its events."""
    reader = Reader()
    said: list[str] = []

    def on(generator: Steps[Any]) -> Any:
        events: list[Event | None] = []
        try:
            while (event := next(generator)) is not None:
                events.append(event)
        except StopIteration as stop:
            return stop
        finally:
            said.extend(event.text for event in events if isinstance(event, Content))
        return None

    generator = steps(reader)
    for piece in pieces:
        reader.feed(piece)
        if stop := on(generator):
            return stop.value, "".join(said)
    reader.close(cut=False)
    stop = on(generator)
    assert stop, "a primitive waits for text after the end"
    return stop.value, "".join(said)


@pytest.mark.parametrize(
    ("text", "markers", "before", "found"),
    [
        ("abc<end>", ["<end>"], "abc", "<end>"),
        ("abc<en", ["<end>"], "abc<en", ""),
        ("<<end>", ["<end>"], "<", "<end>"),
        ("a```json{", ["```", "```json"], "a", "```json"),
        ("a```jso", ["```", "```json"], "a", "```"),
        ("a</x></xyz>", ["</x>", "</x></xyz>"], "a", "</x></xyz>"),
        ("a</x></xy", ["</x>", "</x></xyz>"], "a", "</x>"),
        ("<a<b>c", ["<a<b>c!", "<b>"], "<a", "<b>"),
        ("<a<b>c!", ["<a<b>c!", "<b>"], "", "<a<b>c!"),
        ("aab", ["ab"], "a", "ab"),
        ("", ["x"], "", ""),
        ("anything", [], "anything", ""),
    ],
)
def test_the_first_and_longest_marker_is_found(text: str, markers: list[str], before: str, found: str) -> None:
    for pieces in in_three(text):
        assert run(pieces, lambda reader: reader.until(Markers(*markers)))[0] == (before, found), pieces
        assert run(pieces, lambda reader: reader.pass_on(Markers(*markers), Content)) == (found, before), pieces


def test_a_limit_bounds_what_is_read() -> None:
    text = "a" * 10 + "|rest"
    for pieces in in_three(text):
        assert run(pieces, lambda reader: reader.until(Markers("|"), limit=10))[0] == ("a" * 10, "|")
        assert run(pieces, lambda reader: reader.until(Markers("|"), limit=9))[0] == ("a" * 9, "")
    assert run(["aaa"], lambda reader: reader.until(Markers("|"), limit=9))[0] == ("aaa", "")


def test_accept_takes_the_longest_marker_or_nothing() -> None:
    markers = Markers("<t>", "<t><t>")
    for text, found in (("<t>x", "<t>"), ("<t><t>x", "<t><t>"), ("<t><tx", "<t>"), ("<x", ""), ("", ""), ("<", "")):
        for pieces in in_three(text):
            assert run(pieces, lambda reader: reader.accept(markers))[0] == found


def test_text_is_passed_on_at_once_where_no_marker_may_begin() -> None:
    reader = Reader()
    steps = reader.pass_on(Markers("<end>"), Content)
    reader.feed("one two")
    assert next(steps) == Content("one two")
    assert next(steps) is None
    assert reader.passing is not None  # nothing is held back: a piece without "<" needs no look at the format
    reader.feed(" three<e")
    assert next(steps) == Content(" three")
    assert next(steps) is None
    assert reader.passing is None
    reader.feed("l")
    assert next(steps) == Content("<el")


def test_what_is_unread_is_read_again() -> None:
    def steps(reader: Reader) -> Steps[Any]:
        reader.keep()
        yield from reader.until(Markers("{"))
        reader.back("{")
        follows = yield from reader.peek()
        rest, _ = yield from reader.until(Markers("}"))
        return follows, rest, reader.kept()

    for pieces in in_three("ab{cd}"):
        assert run(pieces, steps)[0] == ("{", "{cd", "ab{cd}")


def test_markers_agree_with_a_plain_search() -> None:
    """Over random texts of few letters, in which markers overlap often."""
    rng = random.Random(1)
    for _ in range(300):
        markers = list({"".join(rng.choices("ab<", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))})
        text = "".join(rng.choices("ab<", k=rng.randint(0, 12)))
        places = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
        at, _, found = min(places, default=(len(text), 0, ""))
        for pieces in (list(text), *(sorted_cut(text, rng) for _ in range(3))):
            assert run(pieces, lambda reader: reader.until(Markers(*markers)))[0] == (text[:at], found)  # noqa: B023


def sorted_cut(text: str, rng: random.Random) -> list[str]:
    first, second = sorted(rng.choices(range(len(text) + 1), k=2))
    return [text[:first], text[first:second], text[second:]]


def test_an_empty_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Markers("a", "")
