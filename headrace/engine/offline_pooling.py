"""Implements LLM.encode, embed, classify and score: what models that pool make of prompts, offline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.engine.pooling import PoolingInputs, Text, numbers, paired, plan_scores
from headrace.errors import RequestError
from headrace.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    Settled,
)
from headrace.request import RequestOutput

T = TypeVar("T")


@dataclass(frozen=True)
class Offline:
    """Holds what an engine gives to these functions."""

    inputs: PoolingInputs
    run: Callable[[list[list[int]], str], list[RequestOutput]]
    """runs prompts of token ids, of which rows of numbers are made for that `Settled.unit`"""


def encode(
    offline: Offline, prompts: Sequence[Any], params: PoolingParams | None, task: str | None, truncate: int | None
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return what the model makes of each prompt: a text, token ids, or a mapping that has either. Raises RequestError
    for what it does not do."""
    params = PoolingParams() if params is None else copy.copy(params)
    params.task = task or params.task
    if truncate is not None:
        params.truncate_prompt_tokens = truncate
    params.__post_init__()
    settled = params.settled(offline.inputs.pooling)
    return _pool(offline, [offline.inputs.ids_of(_text_or_ids(prompt), params) for prompt in prompts], settled)


def embed(
    offline: Offline, prompts: Sequence[Any], params: PoolingParams | None, truncate: int | None
) -> list[EmbeddingRequestOutput]:
    """Return the vector of each prompt."""
    made = encode(offline, prompts, params, "embed", truncate)
    return [_with(one, EmbeddingOutput(one.outputs.data.tolist())) for one in made]


def classify(
    offline: Offline, prompts: Sequence[Any], params: PoolingParams | None
) -> list[ClassificationRequestOutput]:
    """Return the probabilities of the model's labels for each prompt."""
    made = encode(offline, prompts, params, "classify", None)
    return [_with(one, ClassificationOutput(one.outputs.data.tolist())) for one in made]


def score(
    offline: Offline, first: Sequence[str], second: Sequence[str], params: PoolingParams | None, truncate: int | None
) -> list[ScoringRequestOutput]:
    """Return how well each text of `second` goes with its own of `first`, or with the only one."""
    pairs, inputs = paired(first, second), offline.inputs
    params = params or PoolingParams()
    params = PoolingParams(
        use_activation=params.use_activation, truncate_prompt_tokens=truncate or params.truncate_prompt_tokens
    )
    settled = params.settled(inputs.pooling)
    if inputs.pooling.task != "embed" and not inputs.pooling.scores_pairs:
        raise RequestError("this model has several labels for a text, and no score for a pair", "data_1")
    prompts, scores = plan_scores(inputs, first, second, pairs, params)
    made = _pool(offline, prompts, settled)
    found = scores([one.outputs.data.numpy() for one in made])
    return [_with(one, ScoringOutput(value)) for one, value in zip(made[-len(pairs) :], found, strict=True)]


def _pool(offline: Offline, prompts: list[list[int]], settled: Settled) -> list[PoolingRequestOutput[PoolingOutput]]:
    import torch

    return [
        PoolingRequestOutput(
            one.request_id, PoolingOutput(torch.from_numpy(numbers(one, settled).copy())), one.prompt_token_ids,
            one.num_cached_tokens,
        )
        for one in offline.run(prompts, settled.unit)
    ]  # fmt: skip


def _with(output: PoolingRequestOutput[Any], outputs: T) -> PoolingRequestOutput[T]:
    """Return a request's output with other contents."""
    return PoolingRequestOutput(
        output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens, output.finished
    )


def _text_or_ids(prompt: Any) -> Text:
    """Return what of a prompt is pooled."""
    if not isinstance(prompt, Mapping):
        return prompt
    found: Any = prompt.get("prompt_token_ids") or prompt.get("prompt")
    if not isinstance(found, str | list):
        raise RequestError("prompt must have `prompt` or `prompt_token_ids`", "prompt")
    return found
