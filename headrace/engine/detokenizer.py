"""Turns the token ids of one request into text as they come, and looks for stop strings in it.

The text of a request is what its tokens add to the prompt: decode(prompt + output) without decode(prompt). It never
contains half a character, and what could still become a stop string is held back. Work per token is constant.
"""

from __future__ import annotations

import codecs
from collections.abc import Set
from typing import NamedTuple, Protocol

from headrace.engine.pieces import PieceTable, Rule
from headrace.engine.tokenizer import Tokenizer
from headrace.sampling_params import SamplingParams

PRIMING_TOKENS = 4
"""Last prompt tokens that are fed to a stream first, since an output token may complete their last character."""
MAX_HELD_TOKENS = 8
"""Most tokens that are held back as the beginning of a character. No character needs more."""


class TextStream(Protocol):
    """Converts tokens into text one by one."""

    def feed(self, token_id: int) -> str:
        """Add a token; return the text that is certain by now."""

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD for bytes that make up no character."""


class ByteLevelStream:
    """Decodes tokens that are bytes of UTF-8."""

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        return self._decoder.decode(piece.data) if piece is not None else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackStream:
    """Decodes tokens that are text, except single bytes that spell the characters that the vocabulary lacks."""

    def __init__(self, pieces: PieceTable, rule: Rule, at_start: bool) -> None:
        self._pieces = pieces
        self._pending = b""
        self._strip, self._strips_left = rule.strip if at_start else ("", 0)

    def feed(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None or not piece.data:
            return ""
        if piece.is_byte:
            self._pending += piece.data
            return self._stripped(self._complete_characters())
        return self._stripped(self.finish() + piece.data.decode())

    def finish(self) -> str:
        text, self._pending = "\ufffd" * len(self._pending), b""  # one for each byte, as the decoder does
        return text

    def _complete_characters(self) -> str:
        text = ""
        while self._pending:
            first = self._pending[0]
            length = 1 if first < 0x80 else 2 if first >> 5 == 6 else 3 if first >> 4 == 14 else 4
            try:
                char = self._pending[:length].decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                char, length = "\ufffd", 1
            text += char
            self._pending = self._pending[length:]
        return text

    def _stripped(self, text: str) -> str:
        while self._strips_left and text:
            if text.startswith(self._strip):
                text = text.removeprefix(self._strip)
                self._strips_left -= 1
            else:
                self._strips_left = 0
        return text


class WindowStream:
    """Serves any other decoder. It decodes the tokens since the last certain text, and their context, again each
    time. Tokens that are to be skipped are not fed."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._added_text()
        if not text or (text.endswith("\ufffd") and len(self._pending) < MAX_HELD_TOKENS):
            if len(self._pending) >= MAX_HELD_TOKENS:  # nothing but tokens without text
                self._context, self._pending = [*self._context, *self._pending][-MAX_HELD_TOKENS:], []
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._added_text()
        self._context, self._pending = [], []
        return text

    def _added_text(self) -> str:
        before = self._tokenizer.decode(self._context, False) if self._context else ""
        whole = self._tokenizer.decode(self._context + self._pending, False)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode(self._pending, False)


def text_stream(tokenizer: Tokenizer, prompt_token_ids: list[int], skipped: Set[int]) -> TextStream:
    """Return a stream that continues the text of a prompt without its `skipped` tokens, which are not fed either."""
    rule = tokenizer.pieces.rule
    context = [token_id for token_id in prompt_token_ids[-PRIMING_TOKENS:] if token_id not in skipped]
    if rule is None:
        return WindowStream(tokenizer, context)
    stream: TextStream
    if rule.byte_level:
        stream = ByteLevelStream(tokenizer.pieces)
    else:
        at_start = all(token_id in skipped for token_id in prompt_token_ids)
        stream = ByteFallbackStream(tokenizer.pieces, rule, at_start)
    for token_id in context:
        stream.feed(token_id)
    return stream


class StopMatch(NamedTuple):
    """Tells which stop string was found, and where in the text that was last fed it ends."""

    stop: str
    end: int


class StopMatcher:
    """Finds the stop string that completes first, in text that comes in pieces (Knuth, Morris, Pratt)."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)  # of several that end together the longest counts
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first = {stop[0] for stop in self._stops}

    def feed(self, text: str, enabled: bool) -> StopMatch | None:
        """Search further text; return the first stop string that ends in it. If not `enabled`, one here does not
        count."""
        if not any(self._states) and not any(char in text for char in self._first):
            return None
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stops):
                state, failure = self._states[i], self._failures[i]
                if state == len(stop):
                    state = failure[state - 1]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                self._states[i] = state
                if state == len(stop) and enabled:
                    return StopMatch(stop, position + 1)
        return None

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        held = 0
        for i, state in enumerate(self._states):
            held = max(held, self._failures[i][state - 1] if state == len(self._stops[i]) else state)
        return held


def _failure_table(stop: str) -> list[int]:
    """Return for each i the length of the longest proper prefix of `stop` that ends stop[: i + 1]."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table


class Detokenized(NamedTuple):
    """Holds what some tokens added to the text of a request."""

    text: str
    num_kept: int
    """How many of the tokens belong to the output: all, unless one of them completed a stop string."""
    stop: str | None
    """The stop string that was found."""


class Detokenizer:
    """Makes the text of one request, up to a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        kept: Set[int] = frozenset(),
    ) -> None:
        """`kept`: special tokens that stay in the text although `params` skip special tokens."""
        self._skipped = tokenizer.special_ids - kept if params.skip_special_tokens else frozenset[int]()
        self._stream = text_stream(tokenizer, prompt_token_ids, self._skipped)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def append(self, token_ids: list[int], last_is_stop_token: bool = False) -> Detokenized:
        """Add tokens; return what they add to the text. After a stop string was found, nothing more may be added.
        `last_is_stop_token`: the last token ended the request. It adds text only if stops are to be included."""
        texts: list[str] = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            silent = last_is_stop_token and i == len(token_ids) - 1 and not self._include_stop
            if silent or token_id in self._skipped:
                continue
            new = self._stream.feed(token_id)
            if self._matcher is None:
                texts.append(new)
            elif match := self._search(new, texts):
                return Detokenized("".join(texts), i + 1, match)
        return Detokenized("".join(texts), len(token_ids), None)

    def finish(self) -> str:
        """Return the rest of the text, when the request has ended, unless by a stop string."""
        rest = self._held + self._stream.finish()
        self._held = ""
        return rest

    def _search(self, new: str, texts: list[str]) -> str | None:
        """Append what has become certain to `texts`; return the stop string that was found, if any."""
        assert self._matcher is not None
        match = self._matcher.feed(new, enabled=self._num_tokens > self._min_tokens)
        text = self._held + new
        if match is None:
            cut = len(text) - self._matcher.num_held
            texts.append(text[:cut])
            self._held = text[cut:]
            return None
        end = len(self._held) + match.end
        texts.append(text[: end if self._include_stop else end - len(match.stop)])
        self._held = ""
        return match.stop
