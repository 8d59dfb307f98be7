"""Defines the requests and answers of models that pool, in the shapes of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.server.protocol import Prompt

TextOrDocument = Annotated[Any, Meta(description="A text, or an object that has it as `text`.")]
Texts = Annotated[Any, Meta(description="A text, or a list of texts.")]


class PoolRequest(Struct, kw_only=True):
    """Holds the fields that all requests to pool have in common."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    activation: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    user: str | None = None


class EmbeddingRequest(PoolRequest, kw_only=True):
    """Requests the vectors of texts."""

    input: Prompt
    encoding_format: str | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Requests what the model makes of texts, or of each of their tokens."""

    task: str | None = None


class ClassifyRequest(PoolRequest, kw_only=True):
    """Requests the probabilities of labels for texts."""

    input: Prompt
    add_special_tokens: bool | None = None


class ScoreRequest(PoolRequest, kw_only=True):
    """Requests how well pairs of texts go together: `text_1` with `text_2`, or `queries` with `documents`."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    instruction: str | None = None


class RerankRequest(PoolRequest, kw_only=True):
    """Requests the order of documents by how well they answer a query."""

    query: str
    documents: list[TextOrDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class PoolUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolUsage
    object: str = "list"


class PooledData(Struct):
    """Holds the numbers of a text, or of each of its tokens."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PoolingList(Struct):
    id: str
    created: int
    model: str
    data: list[PooledData]
    usage: PoolUsage
    object: str = "list"


class Label(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class LabelList(Struct):
    id: str
    created: int
    model: str
    data: list[Label]
    usage: PoolUsage
    object: str = "list"


class Score(Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolUsage
    object: str = "list"


class RankedDocument(Struct):
    text: str


class Rank(Struct):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RankList(Struct):
    id: str
    model: str
    usage: PoolUsage
    results: list[Rank]
