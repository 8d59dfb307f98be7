"""Converts the engine's logprobs to the shapes of the two APIs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from headrace.request import Logprob
from headrace.server.answers import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0
"""Logprob shown for a token that cannot be sampled, since JSON has no infinity."""
Entries = Sequence[dict[int, Logprob] | None]


@dataclass(frozen=True)
class TokenNames:
    """Tells how a token is written: as text, or as `token_id:5` if the client asked for that or there is no
    tokenizer."""

    as_ids: bool
    bytes_of: Callable[[int], bytes] | None = None

    def text(self, token_id: int, entry: Logprob | None) -> str:
        if self.as_ids or entry is None or entry.decoded_token is None:
            return f"token_id:{token_id}"
        return entry.decoded_token

    def data(self, token_id: int) -> list[int] | None:
        return None if self.bytes_of is None else list(self.bytes_of(token_id))


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Entries,
    offset: int,
    names: TokenNames,
    first_text: Callable[[int], str] | None = None,
) -> CompletionLogprobs:
    """Return the logprobs of tokens in the shape of completions. `offset`: where in the choice's text the first token
    begins. `first_text` names a token that has no entry."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        own = None if entry is None else entry[token_id]
        unnamed = entry is None and first_text is not None and not names.as_ids
        text = first_text(token_id) if unnamed and first_text is not None else names.text(token_id, own)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if own is None else _finite(own.logprob))
        tops.append(None if entry is None else _top_by_text(entry, names))
    return CompletionLogprobs(tokens, values, tops, offsets)


def _top_by_text(entry: dict[int, Logprob], names: TokenNames) -> dict[str, float]:
    """Return text -> logprob of the token itself and the k best; of tokens with the same text the likeliest counts."""
    top: dict[str, float] = {}
    for token_id, one in entry.items():
        text, value = names.text(token_id, one), _finite(one.logprob)
        top[text] = max(value, top.get(text, LOWEST))
    return top


def chat_logprobs(token_ids: Sequence[int], entries: Entries, k: int, names: TokenNames) -> ChatLogprobs:
    """Return the logprobs of tokens in the shape of chat completions, with the k best of each position."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            raise ValueError(f"no logprobs for output token {token_id}")
        best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:k]
        top = [TopLogprob(names.text(i, one), _finite(one.logprob), names.data(i)) for i, one in best]
        own = entry[token_id]
        content.append(TokenLogprob(names.text(token_id, own), _finite(own.logprob), names.data(token_id), top))
    return ChatLogprobs(content)


class TextLogprobs:
    """Finds the tokens that a text of an answer was written with, as both come: markup has tokens too, and the text of
    a token may come later than the token."""

    def __init__(self, k: int, names: TokenNames, markup: AbstractSet[int]) -> None:
        """`k`: how many of the best tokens are shown for each; `markup`: tokens that no text has."""
        self.k, self.names, self.markup = k, names, markup
        self._written = bytearray()
        """bytes of the tokens behind the last text that was found"""
        self._tokens: list[tuple[int, int, dict[int, Logprob] | None]] = []
        """of each of them, where its bytes end, its id, and its logprobs"""

    def add(self, token_ids: Sequence[int], entries: Entries) -> None:
        """Take new tokens in."""
        bytes_of = self.names.bytes_of
        for token_id, entry in zip(token_ids, entries, strict=True):
            if bytes_of is not None and token_id not in self.markup:
                self._written += bytes_of(token_id)
                self._tokens.append((len(self._written), token_id, entry))

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the logprobs of the tokens of the next text. A token that two texts share goes with the first."""
        data = text.encode("utf-8", "replace")
        place = self._written.find(data)
        # Bytes that are no character stand in the text as U+FFFD: what comes next is then as good a guess as any.
        end = len(data) + max(place, 0)
        start = bisect_right(self._tokens, max(place, 0), key=_end)
        stop = bisect_left(self._tokens, end, key=_end) + 1 if data else start
        found = self._tokens[start:stop]
        self._tokens = [(last - end, token_id, entry) for last, token_id, entry in self._tokens[stop:]]
        del self._written[:end]
        ids, entries = [token_id for _, token_id, _ in found], [entry for *_, entry in found]
        return chat_logprobs(ids, entries, self.k, self.names).content


def _end(token: tuple[int, int, object]) -> int:
    return token[0]


def prompt_logprobs(entries: Entries) -> PromptLogprobs:
    """Return vLLM's `prompt_logprobs`: for each prompt token but the first, token id -> logprob, rank and text."""
    return [
        None
        if entry is None
        else {i: Logprob(_finite(one.logprob), one.rank, one.decoded_token) for i, one in entry.items()}
        for entry in entries
    ]


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Join the logprobs of an echoed prompt and of what follows it."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
