"""The engine's logprobs in the shapes of the two APIs. Knows nothing of requests or streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.request import Logprob
from headrace.server.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""JSON has no infinity; a token that cannot be drawn gets this."""
Entries = Sequence[dict[int, Logprob] | None]


@dataclass(frozen=True)
class TokenNames:
    """How a token is written: its text, or `token_id:5` where a client asked for that or no tokenizer is loaded."""

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
    """`offset`: where in the choice's text the first token begins. `first_text` names a token without entry."""
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
    """The token itself and the k best. Two tokens written alike share a key, which keeps the likelier one."""
    top: dict[str, float] = {}
    for token_id, one in entry.items():
        text, value = names.text(token_id, one), _finite(one.logprob)
        top[text] = max(value, top.get(text, LOWEST))
    return top


def chat_logprobs(token_ids: Sequence[int], entries: Entries, k: int, names: TokenNames) -> ChatLogprobs:
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            raise ValueError(f"no logprobs for output token {token_id}")
        best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:k]
        top = [TopLogprob(names.text(i, one), _finite(one.logprob), names.data(i)) for i, one in best]
        own = entry[token_id]
        content.append(TokenLogprob(names.text(token_id, own), _finite(own.logprob), names.data(token_id), top))
    return ChatLogprobs(content)


def prompt_logprobs(entries: Entries) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: token id -> logprob, rank and text, for each prompt token but the first."""
    return [
        None
        if entry is None
        else {i: PromptLogprob(_finite(one.logprob), one.rank, one.decoded_token) for i, one in entry.items()}
        for entry in entries
    ]


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """An echoed prompt and what follows it."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
