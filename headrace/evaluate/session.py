"""Asks a model the items of a task, all at once, and keeps each answer as it comes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Protocol

from headrace.errors import ConfigError, HeadraceError, RequestError, UserError
from headrace.evaluate.code import run_program
from headrace.evaluate.data import Doc, hash_of
from headrace.evaluate.rolling import Likelihood, windows
from headrace.evaluate.samples import Record, Samples
from headrace.evaluate.tasks import Message, Task


@dataclass(frozen=True)
class Reply:
    """Holds what a model wrote."""

    text: str
    """Without reasoning."""
    reasoning: str | None
    finish_reason: str | None


class Model(Protocol):
    """Represents what answers. It bounds by itself how much is under way at once. Raises RequestError where one request
    cannot be answered, and any other HeadraceError where there is no use in going on."""

    async def complete(self, conversation: Sequence[Message]) -> Reply: ...

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, without BOS."""
        ...

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text."""
        ...

    @property
    def window_length(self) -> int:
        """Most tokens that are scored at once."""
        ...

    async def score(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        ...


@dataclass(frozen=True)
class Item:
    """Holds a place in the data, and how its record is made."""

    doc_id: int
    doc_hash: str
    answer: Callable[[Model], Awaitable[Record]]


def items_of(
    task: Task, docs: Sequence[Doc], pool: Sequence[Doc], num_fewshot: int, system: str, code_seconds: float
) -> list[Item]:
    """Return the items of a task whose answers are generated. Raises ConfigError for an item that is none, and where
    examples are missing."""
    runners = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="code")
    return [_item(task, at, doc, pool, num_fewshot, system, code_seconds, runners) for at, doc in enumerate(docs)]


def _item(
    task: Task, doc_id: int, doc: Doc, pool: Sequence[Doc], num_fewshot: int, system: str, code_seconds: float,
    runners: ThreadPoolExecutor,
) -> Item:  # fmt: skip
    try:
        conversation = task.conversation(doc, task.examples_of(doc, pool, num_fewshot), system)
        right = task.right(doc)
    except ConfigError as error:
        raise ConfigError(f"item {doc_id} of {task.name}: {error}") from None

    async def answer(model: Model) -> Record:
        reply = await model.complete(conversation)
        found = {name: find(doc, task.cut(reply.text)) for name, find in task.filters.items()}
        scores: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for name, one in found.items():
            if task.is_right is not None:
                scores[name] = float(task.is_right(one, right))
                continue
            program = f"{one}\n{right}"
            verdict = await asyncio.get_running_loop().run_in_executor(runners, run_program, program, code_seconds)
            scores[name] = float(verdict.passed)
            reasons |= {} if verdict.passed else {name: verdict.reason}
        return {
            "group": task.group(doc),
            "target": right,
            "resps": [[reply.text]],
            "filtered_resps": found,
            "scores": {f"{task.metric},{name}": score for name, score in scores.items()},
            "finish_reason": reply.finish_reason,
            **({"reasoning": reply.reasoning} if reply.reasoning else {}),
            **({"failed": reasons} if reasons else {}),
        }

    return Item(doc_id, hash_of(doc), answer)


def texts_of(docs: Sequence[Doc]) -> list[Item]:
    """Return the items of perplexity: texts, in the field `text` or `page`. Raises ConfigError for one without."""
    return [_text(at, doc) for at, doc in enumerate(docs)]


def _text(doc_id: int, doc: Doc) -> Item:
    text = doc.get("text", doc.get("page"))
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"item {doc_id} of perplexity needs a text in `text` or `page`")

    async def answer(model: Model) -> Record:
        parts = [*windows(model.tokenize(text), model.prefix_token_id, model.window_length)]
        scored = await asyncio.gather(*(model.score(part.ids) for part in parts))
        logprobs = [values[-part.num_scored :] for part, values in zip(parts, scored, strict=True)]
        return asdict(Likelihood.of(text, [*itertools.chain.from_iterable(logprobs)]))

    return Item(doc_id, hash_of(doc), answer)


async def run(items: Iterable[Item], model: Model, samples: Samples, on_done: Callable[[int], None]) -> None:
    """Answer the items that `samples` does not have. `on_done` is called with the number of those that are done.

    An item that cannot be answered harms no other; the first one's error is raised at the end. Any other error ends
    the run at once. Both say what is kept. Raises UserError for what is wrong with all of them.
    """
    items = list(items)
    refused: dict[int, RequestError] = {}
    done = sum(item.doc_id in samples.done for item in items)

    async def one(item: Item) -> None:
        nonlocal done
        try:
            record = await item.answer(model)
        except RequestError as error:
            refused[item.doc_id] = error
            return
        samples.add({"doc_id": item.doc_id, "doc_hash": item.doc_hash, **record})
        done += 1
        on_done(done)

    on_done(done)
    tasks = [asyncio.create_task(one(item)) for item in items if item.doc_id not in samples.done]
    try:
        await asyncio.gather(*tasks)
    except UserError:
        raise
    except HeadraceError as error:
        raise HeadraceError(f"{error}; {kept(done, len(items), samples)}") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if refused:
        first = min(refused)
        raise HeadraceError(
            f"{len(refused)} items could not be answered, the first of them {first}: {refused[first]}; "
            f"{kept(done, len(items), samples)}"
        )


def kept(done: int, count: int, samples: Samples) -> str:
    """Say what a run that ended early has kept."""
    return f"{done} of {count} items are kept in {samples.path}, and the same command goes on from there"
