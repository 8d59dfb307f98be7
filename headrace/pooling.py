"""Says how a model that pools turns hidden states into vectors or scores, and what a request may ask of that.

Facts alone, without torch; models/poolers.py reads them from a model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from headrace.errors import RequestError, quoted
from headrace.layer_parts import Norm

Task = Literal["embed", "classify", "token_embed"]
"""What is made of a text: one vector, numbers for labels, or a vector for each token"""
TASKS: tuple[Task, ...] = ("embed", "classify", "token_embed")
PoolingKind = Literal["last", "cls", "mean"]
"""Which hidden state stands for a text: its last token's, its first one's, or the mean of all"""
Squash = Literal["none", "normalize", "sigmoid", "softmax"]
"""What is done to what comes out last: nothing, a vector gets length 1, or numbers become probabilities"""


@dataclass(frozen=True)
class HeadLayer:
    """Describes one linear that follows pooling, kept in float32 on every rank."""

    name: str
    """as models/registry.py has checkpoints' names rewritten, without dots"""
    inputs: int
    outputs: int
    bias: bool
    activation: Literal["none", "tanh", "gelu", "relu"] = "none"
    """what is done to its outputs"""
    norm: Norm | None = None
    """what follows the activation; its name ends in `_norm` in place of `_dense`"""
    folder: str = ""
    """below the model's, where its tensors are; empty: they are among the model's own"""


@dataclass(frozen=True)
class Pooling:
    """Says what a model that pools makes of a text."""

    task: Literal["embed", "classify"]
    kind: PoolingKind
    squash: Squash
    """what requests get that say nothing of `use_activation`"""
    head: tuple[HeadLayer, ...] = ()
    token_pair: tuple[int, int] | None = None
    """the score is the second token's logit less the first one's, from the head over the vocabulary, which then takes
    the place of `head`"""
    labels: tuple[str, ...] = ()
    width: int = 0
    """numbers of a whole vector; 0 for a classifier"""
    dimensions: tuple[int, ...] | None = ()
    """shorter vectors that a request may ask for: the first so many numbers (Matryoshka, arXiv 2205.13147); None: any
    number, empty: none"""
    segments: bool = False
    """the two texts of a pair have embeddings of their own: the second one's token ids come as id + vocab_size"""
    prompts: tuple[tuple[str, str], ...] = ()
    """(name, text) of what the model wants in front of texts of a kind"""
    default_prompt: str = ""
    """the name of the one that texts get without a name"""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What requests may ask for."""
        return ("embed", "token_embed") if self.task == "embed" else ("classify",)

    @property
    def scores_pairs(self) -> bool:
        """Tell whether a pair of texts is read together and gets one number."""
        return self.task == "classify" and len(self.labels) == 1


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Holds what one request asks of pooling. Names are vLLM's. Raises RequestError naming field and value."""

    task: str | None = None
    """one of TASKS; None: what the model is for"""
    dimensions: int | None = None
    use_activation: bool | None = None
    """False: vectors keep their length, and numbers for labels stay logits. None: as the model says"""
    normalize: bool | None = None
    """Of older vLLM: another name of use_activation, and becomes None."""
    truncate_prompt_tokens: int | None = None
    """Longer prompts lose what is behind so many tokens; -1: as many as the model takes. None: they are refused"""

    def __post_init__(self) -> None:
        if self.use_activation is None:
            self.use_activation = self.normalize
        self.normalize = None
        cut = self.truncate_prompt_tokens
        if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int) or cut == 0 or cut < -1):
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1 for what the model takes, got {quoted(cut)}",
                "truncate_prompt_tokens",
            )

    def settled(self, pooling: Pooling) -> Settled:
        """Return what the request gets from a model. Raises RequestError for what that does not do."""
        task = self.task or pooling.task
        if task not in pooling.tasks:
            raise RequestError(
                f"task {quoted(task)} is not one of this model's; accepted: {', '.join(pooling.tasks)}", "task"
            )
        width = self.dimensions
        if width is not None:
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise RequestError(f"dimensions must be an integer of at least 1, got {quoted(width)}", "dimensions")
            _check_width(width, pooling)
        squash: Squash = pooling.squash
        if self.use_activation is not None:
            usual: Squash = "softmax" if len(pooling.labels) > 1 else "sigmoid"
            on: Squash = "normalize" if pooling.task == "embed" else usual if squash == "none" else squash
            squash = on if self.use_activation else "none"
        return Settled(task, squash, width)


def _check_width(width: int, pooling: Pooling) -> None:
    """Raise RequestError if the model has no vectors of that length."""
    if pooling.dimensions == () or pooling.task != "embed":
        raise RequestError(
            f"dimensions is {width}, but this model is not known to have shorter vectors within its own (Matryoshka); "
            "`is_matryoshka` or `matryoshka_dimensions` in its config.json, or --hf-overrides, would say so",
            "dimensions",
        )
    if pooling.dimensions is not None and width not in pooling.dimensions:
        known = ", ".join(map(str, pooling.dimensions))
        raise RequestError(f"dimensions must be one of {known}, got {width}", "dimensions")
    if width > pooling.width:
        raise RequestError(f"dimensions must be at most {pooling.width}, got {width}", "dimensions")


@dataclass(frozen=True)
class Settled:
    """Says what one request gets."""

    task: str
    squash: Squash
    dimensions: int | None

    @property
    def unit(self) -> str:
        """Say what the engine core makes a row of numbers for: the whole `text`, or each of its `tokens`."""
        return "tokens" if self.task == "token_embed" else "text"


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """Carries rows of numbers from a rank to the front end."""

    BYTES: ClassVar[int] = 4
    """of a number"""

    data: bytes
    """float32, little-endian, row by row"""
    width: int
    """numbers of a row"""


@dataclass
class PoolingOutput:
    """Holds what `LLM.encode` returns of a prompt."""

    data: Any
    """torch tensor # [width] float32, or [num_tokens, width]"""


@dataclass
class EmbeddingOutput:
    """Holds a prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """Holds the probabilities of labels for a prompt."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """Holds how well two texts go together."""

    score: float


Outputs = TypeVar("Outputs")


@dataclass
class PoolingRequestOutput(Generic[Outputs]):
    """Holds the output of a prompt that was pooled. Attributes are vLLM's."""

    request_id: str
    outputs: Outputs
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
