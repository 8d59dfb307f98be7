"""Stands in for a model: answers from a table, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headrace.errors import HeadraceError
from headrace.evaluate.session import Reply
from headrace.evaluate.tasks import Message, as_text


class FakeModel:
    """`answers`: end of a prompt -> the text, or the error to raise. A token is a character."""

    prefix_token_id = 1
    window_length = 8

    def __init__(self, answers: Mapping[str, str | HeadraceError]) -> None:
        self.answers = answers
        self.prompts: list[str] = []
        self.open = self.most_open = 0

    async def complete(self, conversation: Sequence[Message]) -> Reply:
        prompt = as_text(conversation)
        self.prompts.append(prompt)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        (answer,) = (answer for end, answer in self.answers.items() if prompt.endswith(end))
        if isinstance(answer, HeadraceError):
            raise answer
        return Reply(answer, None, "stop")

    def tokenize(self, text: str) -> list[int]:
        return [*map(ord, text)]

    async def score(self, ids: list[int]) -> list[float]:
        return [-id / 1000 for id in ids[1:]]
