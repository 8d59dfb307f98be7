"""Holds arrays whose items must differ (`uniqueItems`), of which llguidance knows nothing: forbids the tokens that
would make an item equal to an earlier one, and those behind which nothing else could follow.

Beside the matcher of the whole answer, each part of it that is JSON with such arrays is followed by its bytes: by a
`State`, and by a matcher of that JSON alone, which says what may follow. Answers without such arrays have none of this.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headrace.structured_outputs.grammar import Unique, of_schema
from headrace.structured_outputs.json_state import SPACES, Frame, Phase, State, digits_of, known_text, start
from headrace.structured_outputs.limits import LIMITS, MAX_DIFFERENT
from headrace.structured_outputs.unique_places import Places
from headrace.structured_outputs.vocabulary import byte_vocabulary

MAX_TRIED = 200
"""Places behind a token that are looked at for a way on; where there are more, there is taken to be one."""
FEW = 16
"""Tokens that are looked at one by one."""
MAX_NUMBER = 24
"""Characters of a number, behind which no way on is looked for: 1.000 is equal to 1 for ever."""
MAX_EXPONENT = 3
"""The same of digits of its exponent: 1e9999 and all beyond are no floats."""
_EXPONENT = re.compile(rb"[eE][-+]?([0-9]*)")
_EQUAL = "an item is equal to an earlier one of its array"
_ESCAPE = b'"\\/bfnrtu0123456789abcdefABCDEF'
_NUMBER = b"-+.0123456789eE,]}"
_IN_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*\\(?:u[0-9a-fA-F]{0,3})?\Z")
_ITEM_BEHIND_STRING = re.compile(rb'".*,\s*(?:".|[^\s"])', re.DOTALL)
_COMMA_BEHIND_STRING = re.compile(rb'".*,', re.DOTALL)
_ITEM = re.compile(rb",\s*\S")
_COMMA = re.compile(rb",")
_ITEMS = re.compile(rb"\[.*,\s*\S", re.DOTALL)


class _Texts:
    """Holds the texts of tokens in order, so that those that begin alike stand side by side."""

    def __init__(self, texts: Iterable[tuple[bytes, int]]) -> None:
        ordered = sorted(texts)
        self.texts = [text for text, _ in ordered]
        self.tokens = [token for _, token in ordered]
        self.ids = np.array(self.tokens, dtype=np.int64)

    def any_in(self, line: memoryview, first: int, end: int) -> bool:
        """Return whether a mask, in words of 32 bits, allows any of some tokens."""
        return any(line[token >> 5] >> (token & 31) & 1 for token in self.tokens[first:end])

    def range(self, prefix: bytes, low: int, high: int) -> tuple[int, int]:
        """Return which of some tokens begin with a text, whose last byte is not 255."""
        first = bisect_left(self.texts, prefix, low, high)
        return first, bisect_left(self.texts, prefix[:-1] + bytes((prefix[-1] + 1,)), first, high)


class TokenTexts:
    """Finds tokens by their texts. Takes a quarter of a second for 150,000 tokens."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        texts = [
            (text, token)
            for token in range(vocabulary.vocab_size)
            if not vocabulary.is_special_token(token) and (text := vocabulary.decode_bytes([token]))
        ]
        self.all = _Texts(texts)
        self.behind_space = _Texts((text.lstrip(b" \t\r\n"), token) for text, token in texts if text[0] in SPACES)
        """Those that begin with white space, without it."""
        commas = [(text, token) for text, token in texts if b"," in text]
        self.several = {
            pattern: [token for text, token in commas if pattern.search(text)]
            for pattern in (_ITEM_BEHIND_STRING, _COMMA_BEHIND_STRING, _ITEM, _COMMA, _ITEMS)
        }
        """Tokens that may end an item and go on with the next one."""

    def of(self, token: int) -> bytes:
        """Return the text of a token; nothing for a mark."""
        return b"" if self._vocabulary.is_special_token(token) else self.with_marks(token)

    def with_marks(self, token: int) -> bytes:
        """Return the text of a token, or what spells it."""
        return self._vocabulary.decode_bytes([token])


class Part(NamedTuple):
    """Represents JSON with such arrays within answers of one grammar."""

    mark: str
    """The name under which the matcher captures what stands before it; "": nothing does."""
    places: Places
    matcher: LLMatcher
    """Of single bytes, in front of it."""


def parts_of(unique: Sequence[Unique]) -> tuple[Part, ...]:
    """Return the parts of a grammar that are to be followed."""
    found = []
    for one in unique:
        schema = json.loads(one.schema)
        matcher = LLMatcher(_bytes(), of_schema(schema).to_llguidance(), log_level=0, limits=LIMITS)
        found.append(Part(one.mark, Places(schema), matcher))
    return tuple(found)


@cache
def _bytes() -> LLTokenizer:
    return byte_vocabulary({})


class _Followed:
    """Represents such JSON that has been begun, or may have been."""

    __slots__ = ("matcher", "state")

    def __init__(self, state: State, matcher: LLMatcher) -> None:
        self.state = state
        self.matcher = matcher

    @property
    def has_begun(self) -> bool:
        return self.state.phase is not Phase.VALUE or self.state.frame is not None

    def copy(self) -> _Followed:
        return _Followed(self.state, self.matcher.deep_copy())

    def take(self, text: bytes) -> bool:
        """Go on; return whether all items still differ. `state` is at its end if the text is no such JSON."""
        for byte in text:
            state = self.state
            if byte in SPACES and not self.has_begun:
                continue
            room = self._room() if state.phase is Phase.STRING and byte == 0x22 and state.frame else 0
            following = state.step(byte)
            if state.phase is Phase.END or self.matcher.try_consume_tokens([byte]) != 1:
                self.state = State(Phase.END, None)
                return True
            if following is None:
                return False
            self.state = following
            if room and (frame := following.frame) and following.phase is Phase.AFTER and frame.used:
                frame.used[-1].room = room
        return True

    def _room(self) -> int:
        """Return how many characters may follow in the string that is being written."""
        return sum(byte not in b'"\\' for byte in self._allowed().tolist())

    def _allowed(self) -> np.ndarray:
        """Return the bytes that may follow."""
        bits = np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8)[:32], bitorder="little")
        return np.flatnonzero(bits)

    def forbidden(self, texts: TokenTexts, line: memoryview) -> Iterator[np.ndarray]:
        """Yield ids of tokens that must not come next. `line`: the mask of the grammar, in words of 32 bits."""
        state = self.state
        frames, frame = [], state.frame
        while frame is not None:
            frames.append(frame)
            frame = frame.outer
        held = [frame for frame in frames if frame.place.unique]
        if not held:
            pattern = _ITEMS
        elif any(_may_run_out(frame) for frame in held):
            pattern = _COMMA_BEHIND_STRING if state.in_string else _COMMA
        else:
            pattern = _ITEM_BEHIND_STRING if state.in_string else _ITEM
        for token in texts.several[pattern]:
            if line[token >> 5] >> (token & 31) & 1 and not self._may_follow(texts.of(token)):
                yield np.array([token])
        if state.settled:
            return
        yield from self._walk(state, texts, texts.all, line)
        if not state.in_string:
            spaced = state.step(0x20)
            if spaced is None:
                yield texts.behind_space.ids
            elif not spaced.settled:
                yield from self._walk(spaced, texts, texts.behind_space, line)

    def _may_follow(self, text: bytes) -> bool:
        """Return whether a token may come next."""
        state: State | None = self.state
        for byte in text:
            state = state and state.step(byte)
        return state is not None and (state.settled or self._goes_on(state, text))

    def _walk(self, begun: State, texts: TokenTexts, ordered: _Texts, line: memoryview) -> Iterator[np.ndarray]:
        """Yield ids of tokens that must not come next: those whose texts lead along what an earlier item has."""
        waiting = [(begun, b"", 0, len(ordered.texts))]
        while waiting:
            state, text, low, high = waiting.pop()
            along = _bytes_along(state, bool(text))
            if high - low < FEW:
                along = {one[len(text)] for one in ordered.texts[low:high] if len(one) > len(text)}.intersection(along)
            for byte in along:
                longer = text + bytes((byte,))
                first, end = ordered.range(longer, low, high)
                if first == end or (end - first < FEW and not ordered.any_in(line, first, end)):
                    continue
                following = state.step(byte)
                if following is None:
                    yield ordered.ids[first:end]
                    continue
                if following.settled:
                    continue
                whole = first
                while whole < end and ordered.texts[whole] == longer:
                    token = ordered.tokens[whole]
                    if line[token >> 5] >> (token & 31) & 1 and not self._goes_on(following, texts.of(token)):
                        yield ordered.ids[whole : whole + 1]
                    whole += 1
                waiting.append((following, longer, whole, end))

    def _goes_on(self, state: State, text: bytes) -> bool:
        """Return whether behind a text, which leads to a state, something may follow that is not forbidden."""
        frame = state.frame
        if state.phase is Phase.STRING and frame and any(one.room > len(frame.used) for one in state.candidates):
            return True
        ahead = [*text]
        if self.matcher.validate_tokens(ahead) < len(ahead):
            return True  # the grammar itself forbids it
        if not self.matcher.consume_tokens(ahead):
            return True
        found = self._has_way(state, [MAX_TRIED])
        self.matcher.rollback(len(ahead))
        return found

    def _has_way(self, state: State, left: list[int]) -> bool:
        """Return whether something may follow where the matcher is. `left`: how many places may still be looked at."""
        left[0] -= 1
        if left[0] < 0:
            return True
        if state.phase is Phase.NUMBER and _stays(state):
            return False
        allowed = self._allowed()
        plain = allowed[allowed > 0x20]  # white space leads nowhere else
        later = []
        for byte in (plain if len(plain) else allowed).tolist():
            following = state.step(byte)
            if following is not None:
                if following.settled:
                    return True
                later.append((byte, following))
        for byte, following in later:
            self.matcher.consume_token(byte)
            found = self._has_way(following, left)
            self.matcher.rollback(1)
            if found:
                return True
        return False


class UniqueItems:
    """Follows the arrays of one answer."""

    __slots__ = ("_before", "_followed", "_has_marks", "_num_captured", "_parts", "_tail", "_texts", "error")

    def __init__(self, parts: tuple[Part, ...], texts: TokenTexts) -> None:
        self._parts = parts
        self._texts = texts
        self._followed: list[_Followed] = []
        self._has_marks = any(part.mark for part in parts)
        self._num_captured = 0
        self._before: dict[str, bytes] = {}
        """Mark -> what was captured under it last."""
        self._tail = b""
        """The end of the text, as long as the longest of them."""
        self.error = ""
        """Why the arrays cannot be followed any further; empty while they can."""
        self._begin("", b"")

    def copy(self) -> UniqueItems:
        """Return what follows the same answer, and goes on by itself."""
        other = UniqueItems(self._parts, self._texts)
        other._num_captured, other._before, other._tail = self._num_captured, {**self._before}, self._tail
        other.error = self.error
        other._followed = [one.copy() for one in self._followed]
        return other

    def take(self, token: int) -> bool:
        """Go on by a token, before the answer's matcher does; return whether all items still differ."""
        text = self._texts.of(token)
        for one in self._followed:
            if not one.take(text):
                self.error = _EQUAL
        self._note_errors()
        self._followed = [one for one in self._followed if one.state.phase is not Phase.END]
        return not self.error

    def _note_errors(self) -> None:
        for one in self._followed:
            if one.matcher.is_error() and not self.error:
                self.error = one.matcher.get_error().strip().splitlines()[0]

    def is_spent(self) -> bool:
        """Return whether no answer of the grammar can be followed, since all of them share its lexer."""
        copies = [part.matcher.deep_copy() for part in self._parts]
        for one in copies:
            one.compute_bitmask()
        return any(one.is_error() for one in copies)

    def begin(self, token: int, answer: LLMatcher) -> bool:
        """Begin to follow what begins within a token, or behind it, that the answer's matcher has just taken; return
        whether all items differ."""
        if not self._has_marks:
            return True
        text = self._texts.with_marks(token)
        whole, places = self._tail + text, range(len(text) + 1)
        # llguidance keeps nothing of a match that is equal to the last of its name. The text is searched for those.
        found = {
            (mark, place)
            for mark, before in self._before.items()
            for place in places[1:]
            if whole.endswith(before, 0, len(self._tail) + place)
        }
        captured = answer.get_captures()
        new, self._num_captured = captured[self._num_captured :], len(captured)
        # Its lexer may see only one byte later that a match has ended, so that may have been anywhere in the token.
        found |= {(mark, place) for mark, _ in new for place in places}
        self._before.update(new)
        self._tail = whole[-max(map(len, self._before.values())) :] if self._before else b""
        is_text = self._texts.of(token) != b""
        for mark, place in sorted(found):
            self._begin(mark, text[place:] if is_text else b"")
        return not self.error

    def forbid(self, line: np.ndarray) -> None:
        """Remove tokens from a mask # [words] uint32, whose bit t % 32 of word t // 32 allows token t."""

        for one in self._followed:
            found = [*one.forbidden(self._texts, line.data)]
            if found:
                ids = np.concatenate(found)
                np.bitwise_and.at(line, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        self._note_errors()

    def _begin(self, mark: str, text: bytes) -> None:
        """Begin to follow the parts that stand behind a mark, and begin with a text."""
        for part in self._parts:
            if part.mark == mark:
                one = _Followed(start(part.places.start), part.matcher.deep_copy())
                if not one.take(text):
                    self.error = _EQUAL
                if one.state.phase is not Phase.END:
                    self._followed.append(one)


def _stays(state: State) -> bool:
    """Return whether a number that is equal to an earlier item, or may become so, is taken to stay that."""
    exponent = _EXPONENT.search(state.raw)
    if exponent is None:
        return len(state.raw) > MAX_NUMBER
    is_zero = not digits_of(state.raw) and any(one.value == 0 for one in state.candidates)
    return is_zero or len(exponent[1]) > MAX_EXPONENT


def _may_run_out(frame: Frame) -> bool:
    """Return whether there may be no room for an item behind the next one."""
    if len(frame.used) >= MAX_DIFFERENT - 1:
        return True
    return frame.place.runs_out and not any(one.room > len(frame.used) + 1 for one in frame.used)


def _bytes_along(state: State, with_space: bool) -> Iterable[int]:
    """Return the bytes that lead along an earlier item, to its end or to the next item."""
    if state.in_string:
        if _IN_ESCAPE.search(state.raw):
            return _ESCAPE
        size = len(known_text(state.raw))
        found = {one.text[size] if len(one.text) > size else 0x22 for one in state.candidates}
        # Elsewhere llguidance allows no escape.
        return found | {0x5C} if any(byte < 0x20 or byte in b'"\\/\x7f' for byte in found) else found
    if state.phase is Phase.WORD:
        return {one.value[0][len(state.raw)] for one in state.candidates}
    spaces = b" \t\r\n" if with_space else b""
    if state.phase is Phase.NUMBER:
        return _NUMBER + spaces
    return b'"[{tfn-0123456789,]}:' + spaces
