"""Answers the routes of models that pool: embeddings, scores, ranks and labels of texts.

Each turns its fields into prompts of one request to the engine, and numbers into the shapes of OpenAI, Cohere, Jina or
vLLM. A model that embeds also scores pairs: by the cosine of their vectors.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET, Struct
from starlette.requests import Request

from headrace.engine.pooling import POOLED, PoolingInputs, need_pooling, numbers, paired, plan_scores
from headrace.errors import RequestError, quoted
from headrace.pooling import Pooling, PoolingParams, Settled
from headrace.request import RequestOutput
from headrace.sampling_params import check_integer
from headrace.server.body import convert
from headrace.server.generation import GenerationResponse
from headrace.server.pooling_shapes import (
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Label,
    LabelList,
    PooledData,
    PoolingList,
    PoolingRequest,
    PoolRequest,
    PoolUsage,
    Rank,
    RankedDocument,
    RankList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
)
from headrace.server.replies import OPENAI
from headrace.server.requests import MAX_INPUTS, Generation, answer_headers, check_count, parse_prompts, receive
from headrace.server.serving import Serving, new_id

INLINE_BYTES = 4096
"""Bodies up to this are tokenized in the event loop."""
FORMATS = ("float", "base64")


@dataclass(frozen=True)
class Batch:
    """Holds the prompts of one request, and what is made of their outputs."""

    prompts: list[list[int]]
    settled: Settled
    answer: Callable[[Made], Struct]


@dataclass(frozen=True)
class Made:
    """Holds what came of a request."""

    id: str
    created: int
    model: str
    usage: PoolUsage
    rows: list[np.ndarray]
    """of each prompt # [width] float32, or [num_tokens, width]"""

    @property
    def head(self) -> dict[str, Any]:
        """The fields that most answers begin with."""
        return {"id": self.id, "created": self.created, "model": self.model, "usage": self.usage}


class PoolAnswer:
    """Implements generation.Answer for everything that is pooled."""

    wire = OPENAI
    parses = False

    def __init__(self, generation: Generation, batch: Batch) -> None:
        self.generation = generation
        self.batch = batch

    def whole(self, outputs: list[RequestOutput]) -> Struct:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        rows = [numbers(output, self.batch.settled) for output in outputs]
        found = self.generation
        return self.batch.answer(Made(found.response_id, int(time.time()), found.model, PoolUsage(count, count), rows))

    def events(self, prompt_index: int, output: RequestOutput) -> list[Struct]:
        return []  # such answers are never streamed

    def last_events(self) -> list[Struct]:
        return []


async def answer_embedding(serving: Serving, http: Request) -> GenerationResponse:
    """Return the vectors of texts, in OpenAI's shape."""

    def plan(request: EmbeddingRequest, inputs: PoolingInputs) -> Batch:
        _need_task(inputs.pooling, "embed", "embeddings")
        return _encoded(request, inputs, "embed", EmbeddingList, Embedding)

    return await _answer(serving, http, EmbeddingRequest, plan, "embd")


async def answer_pooling(serving: Serving, http: Request) -> GenerationResponse:
    """Return what the model makes of texts, or of their tokens, in vLLM's shape."""

    def plan(request: PoolingRequest, inputs: PoolingInputs) -> Batch:
        usual = "token_embed" if inputs.pooling.task == "embed" else inputs.pooling.task
        return _encoded(request, inputs, request.task or usual, PoolingList, PooledData)

    return await _answer(serving, http, PoolingRequest, plan, "pool")


async def answer_classify(serving: Serving, http: Request) -> GenerationResponse:
    """Return the probabilities of labels for texts, in vLLM's shape."""

    def plan(request: ClassifyRequest, inputs: PoolingInputs) -> Batch:
        _need_task(inputs.pooling, "classify", "labels")
        params, labels = _params(request, task="classify"), inputs.pooling.labels

        def answer(made: Made) -> LabelList:
            return LabelList(
                data=[
                    Label(place, labels[int(row.argmax())], row.tolist(), len(row))
                    for place, row in enumerate(made.rows)
                ],
                **made.head,
            )

        return Batch(_texts(request, inputs, params), params.settled(inputs.pooling), answer)

    return await _answer(serving, http, ClassifyRequest, plan, "classify")


async def answer_score(serving: Serving, http: Request) -> GenerationResponse:
    """Return how well pairs of texts go together, in vLLM's shape."""

    def plan(request: ScoreRequest, inputs: PoolingInputs) -> Batch:
        first = _list("text_1", request.text_1, "queries", request.queries)
        second = _list("text_2", request.text_2, "documents", request.documents)
        pairs = paired(first, second)

        def answer(made: Made, scores: list[float]) -> ScoreList:
            return ScoreList(data=[Score(place, score) for place, score in enumerate(scores)], **made.head)

        return _scored(request, inputs, first, second, pairs, answer)

    return await _answer(serving, http, ScoreRequest, plan, "score")


async def answer_rerank(serving: Serving, http: Request) -> GenerationResponse:
    """Return documents in the order in which they answer a query, in the shape of Cohere and Jina."""

    def plan(request: RerankRequest, inputs: PoolingInputs) -> Batch:
        documents = _list("documents", request.documents, "", None)
        if request.top_n is not None:
            check_integer("top_n", request.top_n, 0, 2**31 - 1)
        most = len(documents) if not request.top_n else request.top_n

        def answer(made: Made, scores: list[float]) -> RankList:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])[:most]
            shown = request.return_documents is not False
            ranks = [
                Rank(place, scores[place], RankedDocument(documents[place]) if shown else UNSET) for place in order
            ]
            return RankList(made.id, made.model, made.usage, ranks)

        pairs = [(0, place) for place in range(len(documents))]
        return _scored(request, inputs, [request.query], documents, pairs, answer)

    return await _answer(serving, http, RerankRequest, plan, "rerank")


def _encoded(
    request: EmbeddingRequest, inputs: PoolingInputs, task: str, answer: type[Struct], entry: type[Struct]
) -> Batch:
    """Return the prompts of texts whose rows of numbers are written as the request wants them: an `answer` with an
    `entry` for each."""
    encode, params = _encoding(request), _params(request, task=task, dimensions=request.dimensions)

    def write(made: Made) -> Struct:
        return answer(data=[entry(place, encode(row)) for place, row in enumerate(made.rows)], **made.head)

    return Batch(_texts(request, inputs, params), params.settled(inputs.pooling), write)


def _scored(
    request: ScoreRequest | RerankRequest, inputs: PoolingInputs, first: list[str], second: list[str],
    pairs: list[tuple[int, int]], answer: Callable[[Made, list[float]], Struct],
) -> Batch:  # fmt: skip
    """Return what scores pairs. Raises RequestError where the model does not."""
    pooling = inputs.pooling
    if pooling.task != "embed" and not pooling.scores_pairs:
        raise RequestError(
            f"this model has {len(pooling.labels)} labels for a text, and no score for a pair; /classify has them",
            "model",
        )
    params = _params(request, task=pooling.task)
    prompts, scores = plan_scores(inputs, first, second, pairs, params, request.instruction)
    return Batch(prompts, params.settled(pooling), lambda made: answer(made, scores(made.rows)))


async def _answer(
    serving: Serving, http: Request, shape: type[Any], plan: Callable[[Any, PoolingInputs], Batch], prefix: str
) -> GenerationResponse:
    """Read a request, and return the response that will run what `plan` makes of it."""
    received = await receive(serving, http, shape)
    request = received.fields

    def work() -> tuple[str, Batch]:
        model = serving.resolve_model(request.model)
        need_pooling(serving.engine.limits.pooling)
        inputs = serving.engine.pooling_inputs
        assert inputs is not None
        return model, plan(request, inputs)

    model, batch = await serving.work(http, received.size, work, INLINE_BYTES)
    generation = Generation(
        response_id=new_id(prefix), model=model, prompts=[*batch.prompts], params=POOLED, add_special_tokens=False,
        priority=request.priority or 0, cache_salt=None, pools=batch.settled.unit,
        lora_request=serving.adapter_of(model),
    )  # fmt: skip
    headers = answer_headers(serving, http, request.request_id, generation, received.ignored)
    return GenerationResponse(serving, generation, PoolAnswer(generation, batch), False, headers)


def _params(request: PoolRequest, task: str, dimensions: int | None = None) -> PoolingParams:
    given = (request.use_activation, request.normalize, request.activation)
    return PoolingParams(
        task=task, dimensions=dimensions, use_activation=next((one for one in given if one is not None), None),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )  # fmt: skip


def _need_task(pooling: Pooling, task: str, what: str) -> None:
    """Raise RequestError if the model is for something else."""
    if pooling.task != task:
        others = "classifies" if pooling.task == "classify" else "embeds"
        raise RequestError(f"this model has no {what}: it {others} (--convert)", "model")


def _texts(
    request: EmbeddingRequest | ClassifyRequest, inputs: PoolingInputs, params: PoolingParams
) -> list[list[int]]:
    texts = parse_prompts(request.input, "input")
    check_count("input", len(texts), 1, MAX_INPUTS)
    special, name = request.add_special_tokens is not False, getattr(request, "prompt_name", None)
    return [inputs.ids_of(text, params, special, name) for text in texts]


def _list(name: str, value: Any, other_name: str, other: Any) -> list[str]:
    """Return the texts of a field, or of another one that means the same. Raises RequestError for anything else."""
    if value is not None and other is not None:
        raise RequestError(f"give either {name} or {other_name}", name)
    name, value = (name, value) if value is not None else (other_name or name, other)
    if value is None:
        raise RequestError(f"{name} is required", name)
    entries = value if isinstance(value, list) else [value]
    check_count(name, len(entries), 1, MAX_INPUTS)
    if not entries:
        raise RequestError(f"{name} must not be empty", name)
    return [_text(f"{name}[{place}]", entry) for place, entry in enumerate(entries)]


def _text(name: str, entry: Any) -> str:
    if isinstance(entry, dict):
        entry = entry.get("text")
    return convert(entry, str, name)


def _encoding(request: EmbeddingRequest) -> Callable[[np.ndarray], Any]:
    """Return what writes rows of numbers as the request wants them."""
    wanted = request.encoding_format or "float"
    if wanted not in FORMATS:
        raise RequestError(
            f"encoding_format must be one of {', '.join(FORMATS)}, got {quoted(wanted)}", "encoding_format"
        )
    if wanted == "float":
        return lambda row: row.tolist()
    return lambda row: base64.b64encode(row.astype("<f4").tobytes()).decode()
