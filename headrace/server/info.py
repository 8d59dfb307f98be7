"""Answers the routes that generate nothing: models, adapters, the plan, tokens of texts, health, metrics, version."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace import __version__
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import (
    EngineDeadError,
    NotFoundError,
    RequestError,
    ServerStoppingError,
    StepsFailError,
    UserError,
    quoted,
)
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.server.answers import DetokenizeAnswer, ModelCard, ModelList, PlanAnswer, TokenizeAnswer
from headrace.server.chat_prompt import RENDERED_INLINE_BYTES, is_slow_to_render, render_prompt
from headrace.server.protocol import DetokenizeRequest, LoadAdapterRequest, TokenizeRequest, UnloadAdapterRequest
from headrace.server.relay import AnswerEndedError, samples_of
from headrace.server.replies import error_response, json_response
from headrace.server.requests import receive
from headrace.server.serving import Serving
from headrace.server.tool_use import template_tools

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _card(serving: Serving, name: str) -> ModelCard:
    adapter, parent = serving.adapter_of(name), serving.model_names[0]
    root, of = (name, None) if adapter is None else (adapter.lora_path, parent)
    return ModelCard(name, serving.created, root, serving.engine.max_model_len, parent=of)


async def list_models(serving: Serving, http: Request) -> Response:
    names = (*serving.model_names, *serving.adapters.by_name)
    return json_response(ModelList([_card(serving, name) for name in names]))


async def show_model(serving: Serving, http: Request) -> Response:
    return json_response(_card(serving, serving.check_name(http.path_params["model_id"])))


async def show_plan(serving: Serving, http: Request) -> Response:
    engine = serving.engine
    expected = engine.expected
    return json_response(
        PlanAnswer(
            serving.model_names[0],
            engine.config.objective or USUAL_OBJECTIVE,
            engine.decisions,
            engine.kv_cache_tokens,
            engine.memory,
            None if expected is None else expected.workload,
            None if expected is None else expected.source,
            None if expected is None else expected.prediction,
        )
    )


async def tokenize(serving: Serving, http: Request) -> Response:
    received = await receive(serving, http, TokenizeRequest)
    request = received.fields
    serving.resolve_model(request.model)
    tokenizer = _tokenizer(serving)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.prompt is None:
        most = 0 if is_slow_to_render(request) else RENDERED_INLINE_BYTES
        rendered = await serving.work(
            http, received.size, lambda: render_prompt(serving, request, template_tools(request.tools)), most
        )
        text = rendered.text
        special = request.add_special_tokens is True
    else:
        text, special = request.prompt, request.add_special_tokens is not False
    ids = await serving.engine.tokenize(text, special)  # refuses texts far beyond the context
    names = await asyncio.to_thread(lambda: [*map(tokenizer.token_text, ids)]) if request.return_token_strs else None
    return json_response(TokenizeAnswer(len(ids), serving.engine.max_model_len, ids, names))


async def detokenize(serving: Serving, http: Request) -> Response:
    request = (await receive(serving, http, DetokenizeRequest)).fields
    serving.resolve_model(request.model)
    tokenizer = _tokenizer(serving)
    limit, longest = serving.engine.vocab_size, serving.engine.max_model_len
    if len(request.tokens) > longest:  # the library holds Python's lock while it decodes
        raise RequestError(
            f"tokens may hold at most {longest} ids (max_model_len), got {len(request.tokens)}", "tokens"
        )
    for token_id in (min(request.tokens, default=0), max(request.tokens, default=0)):
        if not 0 <= token_id < limit:
            raise RequestError(f"tokens must hold ids from 0 to {limit - 1}, got {quoted(token_id)}", "tokens")
    return json_response(DetokenizeAnswer(await asyncio.to_thread(tokenizer.decode, request.tokens, False)))


async def health(serving: Serving, http: Request) -> Response:
    """Answer 200 only while the engine runs, its steps succeed, and the server has not been told to stop. Of several
    engines one is enough; the body says what each of them does."""
    if serving.draining:
        return error_response(ServerStoppingError())
    try:
        serving.engine.check_health()
    except (EngineDeadError, StepsFailError) as error:
        logger.error("/health is red: %s", error)
        return error_response(error)
    if serving.engine.num_engines > 1:
        return json_response({"engines": serving.engine.engine_states()})
    return Response(status_code=200)


async def metrics(serving: Serving, http: Request) -> Response:
    try:
        further = await asyncio.gather(*map(samples_of, serving.further))
    except (OSError, AnswerEndedError):  # one has ended, so all do
        raise ServerStoppingError from None
    return Response(serving.engine.metrics.render(further), 200, media_type=METRICS_TYPE)


async def version(serving: Serving, http: Request) -> Response:
    return json_response({"version": __version__})


async def load_adapter(serving: Serving, http: Request) -> Response:
    """Serve a further adapter, or with load_inplace another one under a name in use."""
    received = await receive(serving, http, LoadAdapterRequest)
    request, book = received.fields, serving.adapters

    def check() -> Path:
        path = book.inside(request.lora_path)
        book.check_name(request.lora_name, request.load_inplace)
        try:
            book.check(path)
        except UserError as error:
            raise RequestError(str(error), "lora_path") from None
        return path

    path = await serving.work(http, 1, check, 0)
    book.check_name(request.lora_name, request.load_inplace)  # another client may have been faster
    book.add(request.lora_name, str(path))
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(serving: Serving, http: Request) -> Response:
    """Serve an adapter no longer; requests that have it run to their ends."""
    received = await receive(serving, http, UnloadAdapterRequest)
    name, book = received.fields.lora_name, serving.adapters
    book.folder()
    if book.by_name.pop(name, None) is None:
        raise NotFoundError(f"no adapter {quoted(name)} is served", "lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _tokenizer(serving: Serving) -> Tokenizer:
    tokenizer = serving.engine.tokenizer
    if tokenizer is None:
        raise RequestError("this server runs without tokenizer (--skip-tokenizer-init)")
    return tokenizer
