"""Turns the fields of a request into what the engine takes: prompts, SamplingParams, priority.

Limits are checked before anything is allocated. SamplingParams checks its own values; here is what only the API knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from headrace.engine.beam_search import BeamSearchParams
from headrace.errors import RequestError
from headrace.lora import LoRARequest
from headrace.sampling_params import MAX_N, SamplingParams, check_integer
from headrace.server.body import convert, decode_object, read_body
from headrace.server.fields import ignored_fields, ignored_header
from headrace.server.protocol import GenerateRequest
from headrace.server.serving import Serving, request_id_headers

T = TypeVar("T", bound=msgspec.Struct)

MAX_CHOICES = 1024
"""Most choices (prompts x n) of one HTTP request."""
MAX_INPUTS = 2048
"""Most texts of one HTTP request that are pooled, as many as OpenAI takes."""
MAX_COPIED = 2**20
"""Most token ids, over all choices of a request, in lists of which each choice holds a copy."""
IDS_PER_CHAR = 16
"""Token ids that one character of bad_words counts for: it costs more than an id, and becomes several."""
PASSED_ON = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerateRequest.__struct_fields__ and name not in ("max_tokens", "prompt_logprobs", "structured_outputs")
)
"""Fields that mean the same in a request as in SamplingParams."""


@dataclass(frozen=True)
class Generation:
    """Holds what one HTTP request asks of the engine."""

    response_id: str
    model: str
    prompts: list[str | list[int]]
    params: SamplingParams
    add_special_tokens: bool
    priority: int
    cache_salt: str | None
    grammar: str = ""
    """What holds the answers, as structured_outputs/grammar.py writes it; empty: nothing does."""
    kept: frozenset[int] = frozenset()
    """Special tokens that stay in the text, as a parser looks for them."""
    beams: BeamSearchParams | None = None
    """How to search for the likeliest outputs; None: outputs are sampled."""
    lora_request: LoRARequest | None = None
    """The adapter that `model` names; None: the model as it is."""
    most_tokens: int | None = None
    """Most tokens of an output that ends, without an error, where the context is full before; None: `params` says."""
    pools: str = ""
    """What a model that pools makes numbers for (see EngineCoreRequest); `prompts` are token ids that were checked."""


@dataclass(frozen=True)
class Received(Generic[T]):
    """Holds a request as it was received."""

    fields: T
    ignored: list[str]
    """Names of fields that have no effect."""
    size: int
    """Bytes of the body."""


async def receive(serving: Serving, http: Request, shape: type[T]) -> Received[T]:
    """Read a request's body as `shape`. Raises RequestError for one that is not."""
    body = await read_body(http, serving.config.max_request_bytes)
    names = shape.__struct_fields__  # not structs.fields: that evaluates all annotations anew, a millisecond

    def work() -> Received[T]:
        fields = decode_object(body)
        ignored = ignored_fields({name: fields[name] for name in fields.keys() - set(names)})
        return Received(convert(fields, shape), ignored, len(body))

    return await serving.work(http, len(body), work)


def answer_headers(
    serving: Serving, http: Request, request_id: str | None, generation: Generation, ignored: list[str]
) -> dict[str, str]:
    """Return the headers of an answer beside its type. `ignored`: fields that had no effect."""
    known = request_id_headers(http, serving.config, request_id, generation.response_id)
    return known | ignored_header(ignored, serving.logged)


def parse_prompts(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """Return the prompts in the field `name`: text, texts, token ids, or lists of them. Raises RequestError for
    anything else, an empty prompt, or too many."""
    prompts: list[str | list[int]]
    if not isinstance(prompt, list):
        prompts = [convert(prompt, str, name)]
    elif prompt and isinstance(prompt[0], str):
        prompts = [*convert(prompt, list[str], name)]
    elif prompt and isinstance(prompt[0], list):
        check_count(name, len(prompt), 1, MAX_INPUTS)
        prompts = [convert(ids, list[int], f"{name}[{index}]") for index, ids in enumerate(prompt)]
    else:
        prompts = [convert(prompt, list[int], name)]
    for index, given in enumerate(prompts):
        if not given:
            place = name if len(prompts) == 1 else f"{name}[{index}]"
            raise RequestError(f"{place} must not be empty", name)
    return prompts


def check_choices(prompts: list[str | list[int]], n: int | None) -> None:
    """Raise RequestError for too many choices (prompts x n)."""
    if n is not None:
        check_integer("n", n, 1, MAX_N)
    check_count("prompt", len(prompts), n or 1, MAX_CHOICES)


def check_count(name: str, count: int, n: int, most: int) -> None:
    """Raise RequestError for a field `name` with more prompts (x n) than one request may have."""
    if count * n > most:
        times = f" x n={n}" if n > 1 else ""
        raise RequestError(f"{name} holds {count} prompts{times}; one request may ask for {most} choices", name)


def check_copies(params: SamplingParams, choices: int) -> None:
    """Raise RequestError for lists that all choices together would copy into too much memory: a body of kilobytes could
    otherwise take gigabytes."""
    allowed, words = len(params.allowed_token_ids or ()), sum(map(len, params.bad_words))
    for name, size, unit, limit in (
        ("allowed_token_ids", allowed, "ids", MAX_COPIED),
        ("bad_words", words, "characters", MAX_COPIED // IDS_PER_CHAR),
    ):
        if size * choices > limit:
            raise RequestError(
                f"{name} has {size} {unit} for each of {choices} choices; one request may hold {limit} in all", name
            )


def check_common(request: GenerateRequest) -> None:
    """Raise RequestError for what neither completions nor chat completions take."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed when stream is true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available when stream is true", "prompt_logprobs")


def beam_params(request: GenerateRequest, params: SamplingParams, grammar: str) -> BeamSearchParams | None:
    """Return how a request wants its outputs searched for, with n or best_of beams; None if they are sampled. Raises
    RequestError for what a search cannot do."""
    if not request.use_beam_search:
        return None
    refused = {
        "stream": bool(request.stream), "logprobs": params.logprobs is not None, "echo": bool(request.echo),
        "prompt_logprobs": params.prompt_logprobs is not None, "response_format": bool(grammar),
        "stop": bool(params.stop), "temperature": bool(request.temperature),
    }  # fmt: skip
    for name, given in refused.items():
        if given:
            raise RequestError(f"{name} does not go with use_beam_search", name)
    width = params.n if request.best_of is None else request.best_of
    if width < params.n:
        raise RequestError(f"best_of must be at least n, {params.n}, got {width}", "best_of")
    most = 2**31 - 1 if params.max_tokens is None else params.max_tokens
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return BeamSearchParams(width, most, bool(params.ignore_eos), length_penalty=penalty)


def sampling_params(
    request: GenerateRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    detokenize: bool,
) -> SamplingParams:
    """Return a request's SamplingParams; `defaults` fill what it leaves out. Raises RequestError naming the field, its
    value and what would be accepted."""
    given = dict(defaults) | {name: value for name in PASSED_ON if (value := getattr(request, name)) is not None}
    if request.use_beam_search:
        given.pop("best_of", None)  # it is the number of beams
    return SamplingParams(
        **given, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, detokenize=detokenize
    )
