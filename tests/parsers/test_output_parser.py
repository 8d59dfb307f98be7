"""What holds for every format: a stream says what the whole text says, no text breaks it, and time is linear."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.parsers.formats import ReasoningFormat, ToolFormat
from headrace.parsers.reader import Markers, Reader
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS
from headrace.parsers.tools import FunctionTool
from tests.parsers.reading import read

PIECES = ['{"name": "f", "arguments": {"a": 1}}', '{"name": "', '"arguments": ', "{", "}", "[", "]", ",", ";", ":",
          '"', "\\", "'", "(", ")", "=", "<", ">", "|", "f", "g", "functions.f:0", "\n", " ", "\t", "null", "true",
          "-1.5e3", '"\\ud800"', "\\ud800", "é🎉", "words and more words ", "<think>", "</think>", "</", "```",
          "\x00", "\u2028"]  # fmt: skip
TOOLS = [
    FunctionTool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}),
    FunctionTool("g", {"type": "object", "properties": {"a": {"anyOf": [{"type": "object"}, {"type": "null"}]}}}),
]


def strings_of(value: Any) -> Iterator[str]:
    """Every string of a format: its markup, and the names of its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from strings_of(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from strings_of(getattr(value, field.name))


def texts(*formats: ToolFormat | ReasoningFormat | None) -> st.SearchStrategy[str]:
    """Texts made of the formats' own markup, pieces of JSON, and noise."""
    markup = sorted(filter(None, set(strings_of(formats))))
    return st.lists(st.one_of(st.sampled_from(markup), st.sampled_from(PIECES)), max_size=14).map("".join)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """A text cut at random places."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def check_the_law(data: st.DataObject, tool: ToolFormat | None, reasoning: ReasoningFormat | None) -> None:
    text = data.draw(texts(tool, reasoning))
    tools = data.draw(st.sampled_from([(), TOOLS]))
    opened = data.draw(st.sampled_from([None, True, False]))
    cut = data.draw(st.booleans())
    whole = read([text], tool, reasoning, tools, reasoning_open=opened, cut=cut)
    for pieces in (list(text), data.draw(cuts(text))):
        assert read(pieces, tool, reasoning, tools, reasoning_open=opened, cut=cut) == whole
    assert "" not in (whole.reasoning, whole.content)
    assert all(call.name for call in whole.calls)
    parts = [whole.reasoning, whole.content, *(part for call in whole.calls for part in (call.name, call.arguments))]
    "".join(filter(None, parts)).encode()  # no half of a surrogate pair, which no answer can carry


LAW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("name", sorted({format.name for format in TOOL_FORMATS.values()}))
@LAW
@given(data=st.data())
def test_a_stream_of_calls_says_what_the_whole_text_says(name: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([None, None, "qwen3", "deepseek_r1", "gemma4"]))
    check_the_law(data, TOOL_FORMATS[name], REASONING_FORMATS[reasoning] if reasoning else None)


@pytest.mark.parametrize("name", sorted({format.name for format in REASONING_FORMATS.values()}))
@LAW
@given(data=st.data())
def test_a_stream_of_reasoning_says_what_the_whole_text_says(name: str, data: st.DataObject) -> None:
    tool = data.draw(st.sampled_from([None, "hermes"]))
    check_the_law(data, TOOL_FORMATS[tool] if tool else None, REASONING_FORMATS[name])


@pytest.mark.parametrize("name", sorted({format.name for format in TOOL_FORMATS.values()}))
def test_a_value_that_is_no_markup_is_left_alone(name: str) -> None:
    """Ordinary answers pass through each format word for word, whatever reasoning format is beside it."""
    text = "# Title\n\nUse `a < b` and {x: [1, 2]} or f(x); see <https://example.org> | 3 > 2.\n\n- one\n- two\n"
    if not TOOL_FORMATS[name].whole_answer:
        assert read(list(text), TOOL_FORMATS[name]).content == text


class Work:
    """Counts the characters that are searched, copied and decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        find, feed, loads = Markers.find, Reader.feed, json.loads

        def counted_find(markers: Markers, text: str, at: int, closed: bool) -> tuple[int, str]:
            end, found = find(markers, text, at, closed)
            self.characters += end - at + len(found) + markers.longest
            return end, found

        def counted_feed(reader: Reader, piece: str) -> None:
            feed(reader, piece)
            self.characters += len(reader._text)

        def counted_loads(text: str, **options: Any) -> Any:
            self.characters += len(text)
            return loads(text, **options)

        monkeypatch.setattr(Markers, "find", counted_find)
        monkeypatch.setattr(Reader, "feed", counted_feed)
        monkeypatch.setattr(json, "loads", counted_loads)

    def of(self, text: str, piece: int, tool: ToolFormat | None, reasoning: ReasoningFormat | None) -> int:
        """The work of reading a text in pieces of so many characters."""
        self.characters = 0
        read([text[at : at + piece] for at in range(0, len(text), piece)], tool, reasoning, TOOLS)
        return self.characters


def adversaries(tool: ToolFormat | None, reasoning: ReasoningFormat | None) -> Iterator[tuple[str, str]]:
    """A beginning and what is repeated after it."""
    markup = sorted(filter(None, set(strings_of((tool, reasoning)))))
    yield from (("", text) for text in markup)
    yield from (("", text[:-1]) for text in markup if len(text) > 1)
    opener = tool.openers[0] if tool and tool.openers else ""
    for begin in {opener, opener + '{"name": "f", "arguments": {"a": ', opener + "f"}:
        yield from ((begin, text) for text in ("[", "{", '{"a":', "x", '"', "\\", " ", "<", *markup[:2]))


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
@pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_work_is_linear_in_the_text(kind: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the text is at most about twice the work, however the text holds a parser up: in some ways each run."""
    work = Work(monkeypatch)
    table: dict[str, Any] = TOOL_FORMATS if kind == "tool" else REASONING_FORMATS
    for format in {format.name: format for format in table.values()}.values():
        formats = (format, None) if kind == "tool" else (None, format)
        for begin, repeated in (one for one in adversaries(*formats) if random.random() < share):
            for size, piece in ((200, 4),) if begin else ((200, 4), (2000, 100_000)):
                small = work.of(begin + repeated * (size // len(repeated) + 1), piece, *formats)
                large = work.of(begin + repeated * (4 * size // len(repeated) + 1), piece, *formats)
                assert large < 6 * small + 4000, (format.name, begin, repeated)


def test_half_a_megabyte_is_read_in_bounded_time() -> None:
    """Not a matter of speed: what is quadratic would take hours."""
    for name in ("hermes", "llama3_json", "mistral", "kimi_k2", "deepseek_v3"):
        format = TOOL_FORMATS[name]
        for text in (format.openers[0] * 30_000, format.openers[0] + "[" * 500_000, '{"name": "' + "x" * 500_000):
            read([text[:250_000], text[250_000:]], format, REASONING_FORMATS["qwen3"])


def test_no_format_reads_a_thought_again_and_again() -> None:
    """`Reader.again` is linear only if it happens once, at the end of an answer's first reasoning."""
    for format in REASONING_FORMATS.values():
        assert not (format.anywhere and format.call_openers), format.name


def test_every_name_is_that_of_its_format_or_an_alias() -> None:
    for table in (TOOL_FORMATS, REASONING_FORMATS):
        assert {format.name for format in table.values()} <= table.keys()


def test_the_beginning_of_markup_within_which_an_answer_was_cut_is_no_text() -> None:
    hermes, deepseek = TOOL_FORMATS["hermes"], REASONING_FORMATS["deepseek_r1"]
    for pieces in (["Hi <tool_ca"], list("Hi <tool_ca")):
        assert read(pieces, hermes, cut=True).content == "Hi "
        assert read(pieces, hermes).content == "Hi <tool_ca"
    for pieces in (["Hm</thin"], list("Hm</thin")):
        assert read(pieces, None, deepseek, cut=True).reasoning == "Hm"
        assert read(pieces, None, deepseek).reasoning == "Hm</thin"
