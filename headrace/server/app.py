"""Builds the ASGI application: the table of routes, API keys, CORS, and errors in OpenAI's shape."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config import ServerConfig
from headrace.engine.input_processor import NO_TEXT
from headrace.errors import HeadraceError, MethodNotAllowedError, NotFoundError, RequestError, ServerStoppingError
from headrace.server import answers, info, pooling, pooling_shapes, protocol, responses
from headrace.server.adapters import AdapterBook
from headrace.server.auth import RequireApiKey
from headrace.server.chat import answer_chat
from headrace.server.completions import answer_completion
from headrace.server.front_page import show_page
from headrace.server.message_shapes import CountTokensRequest, Message, MessagesRequest, StreamEvent, TokenCount
from headrace.server.messages import answer_message, count_tokens
from headrace.server.openapi import Handler, Operation, describe_api, page
from headrace.server.output_formats import choose_formats
from headrace.server.parse_text import parse_function_call, separate_reasoning
from headrace.server.relay import relay
from headrace.server.replies import AnthropicError, error_response, json_response, wire_of
from headrace.server.response_shapes import EVENTS, Deleted, ResponseObject, ResponsesRequest
from headrace.server.serving import Serving

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

CLIENT_CLOSED_REQUEST = 499
GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 503)
BODY_ERRORS = (400, 401, 404, 413, 415, 429)
OPERATIONS = (
    Operation("/v1/completions", answer_completion, "Complete prompts", answers.Completion, GENERATION_ERRORS,
              protocol.CompletionRequest, events=(answers.Completion,)),
    Operation("/v1/chat/completions", answer_chat, "Answer a conversation", answers.ChatCompletion, GENERATION_ERRORS,
              protocol.ChatCompletionRequest, events=(answers.ChatChunk,)),
    Operation("/v1/responses", responses.answer_response, "Answer input items", ResponseObject, GENERATION_ERRORS,
              ResponsesRequest, events=EVENTS, of_first=True),
    Operation("/v1/responses/{response_id}", responses.show_response, "Show a stored answer", ResponseObject,
              (400, 401, 404), of_first=True),
    Operation("/v1/responses/{response_id}", responses.delete_response, "Forget a stored answer", Deleted, (401, 404),
              verb="DELETE", of_first=True),
    Operation("/v1/responses/{response_id}/cancel", responses.cancel_response, "End an answer made in the background",
              ResponseObject, (400, 401, 404), verb="POST", of_first=True),
    Operation("/v1/messages", answer_message, "Answer a conversation, as Anthropic's API does", Message,
              GENERATION_ERRORS, MessagesRequest, events=get_args(StreamEvent), error=AnthropicError),
    Operation("/v1/messages/count_tokens", count_tokens, "Count the tokens of a conversation", TokenCount,
              BODY_ERRORS, CountTokensRequest, error=AnthropicError),
    Operation("/v1/embeddings", pooling.answer_embedding, "The vectors of texts", pooling_shapes.EmbeddingList,
              GENERATION_ERRORS, pooling_shapes.EmbeddingRequest),
    Operation("/pooling", pooling.answer_pooling, "What the model makes of texts, or of their tokens",
              pooling_shapes.PoolingList, GENERATION_ERRORS, pooling_shapes.PoolingRequest),
    Operation("/classify", pooling.answer_classify, "The probabilities of labels for texts", pooling_shapes.LabelList,
              GENERATION_ERRORS, pooling_shapes.ClassifyRequest),
    *(Operation(path, pooling.answer_score, "How well pairs of texts go together", pooling_shapes.ScoreList,
                GENERATION_ERRORS, pooling_shapes.ScoreRequest) for path in ("/v1/score", "/score")),
    *(Operation(path, pooling.answer_rerank, "Documents in the order in which they answer a query",
                pooling_shapes.RankList, GENERATION_ERRORS, pooling_shapes.RerankRequest)
      for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    Operation("/v1/models", info.list_models, "List the served models", answers.ModelList, (401,)),
    Operation("/v1/models/{model_id:path}", info.show_model, "Show a served model", answers.ModelCard, (401, 404)),
    Operation("/v1/load_lora_adapter", info.load_adapter, "Serve a further adapter", None, BODY_ERRORS,
              protocol.LoadAdapterRequest),
    Operation("/v1/unload_lora_adapter", info.unload_adapter, "Serve an adapter no longer", None, BODY_ERRORS,
              protocol.UnloadAdapterRequest),
    Operation("/v1/plan", info.show_plan, "How this server runs, and why", answers.PlanAnswer, (401,)),
    Operation("/tokenize", info.tokenize, "Text or messages to token ids", answers.TokenizeAnswer, BODY_ERRORS,
              protocol.TokenizeRequest),
    Operation("/detokenize", info.detokenize, "Token ids to text", answers.DetokenizeAnswer, BODY_ERRORS,
              protocol.DetokenizeRequest),
    Operation("/parse_function_call", parse_function_call, "The tool calls in a text",
              answers.ParseFunctionCallAnswer, BODY_ERRORS, protocol.ParseFunctionCallRequest),
    Operation("/separate_reasoning", separate_reasoning, "The reasoning in a text", answers.SeparateReasoningAnswer,
              BODY_ERRORS, protocol.SeparateReasoningRequest),
    Operation("/health", info.health, "200 while the engine steps", None, (503,), needs_key=False),
    Operation("/ping", info.health, "The same as /health, behind the key", None, (401, 503)),
    Operation("/metrics", info.metrics, "Prometheus metrics", None, (401,), of_first=True),
    Operation("/version", info.version, "The version of headrace", None, (401,)),
)  # fmt: skip


def build_app(engine: AsyncEngine, server_config: ServerConfig, model_names: list[str]) -> Starlette:
    """Return the application; `app.state.serving` is what its routes share. `model_names`: the names that requests may
    use; answers carry the first one. Raises ConfigError for a parser that there is not, UserError for an adapter that
    cannot be served."""
    model_type = engine.model_config.fields.text("model_type", "")
    formats = choose_formats(server_config, model_type, engine.tokenizer)
    adapters = AdapterBook(engine, server_config.lora_modules, server_config.runtime_lora_folder, model_names)
    serving = Serving(engine, server_config, model_names, adapters, formats)
    root_path = server_config.root_path
    in_front = []  # the first sees a request first; CORS answers preflights, which carry no key
    if root_path:
        in_front.append(Middleware(UnderRootPath, root_path=root_path))
    if server_config.allowed_origins:
        in_front.append(
            Middleware(
                CORSMiddleware,
                allow_origins=server_config.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )
    if server_config.api_key:
        in_front.append(Middleware(RequireApiKey, keys=server_config.api_key, root_path=root_path))
    app = Starlette(
        routes=_routes(serving, server_config), middleware=in_front, exception_handlers=_exception_handlers()
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    return app


class UnderRootPath:
    """Tells the router of a prefix that a proxy may or may not have taken off the path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "root_path": self.root_path}, receive, send)


def _routes(serving: Serving, server_config: ServerConfig) -> list[Route]:
    """Return all routes. Starlette answers HEAD wherever it answers GET."""

    @functools.cache
    def document() -> dict[str, Any]:
        return describe_api(OPERATIONS, bool(server_config.api_key), server_config.root_path)

    async def openapi_json(serving: Serving, request: Request) -> Response:
        return json_response(document())

    async def docs(serving: Serving, request: Request) -> Response:
        return HTMLResponse(page(document(), f"{server_config.root_path}/openapi.json"))

    def route(
        path: str, handler: Handler, *methods: str, generates: bool = False, has_body: bool | None = None
    ) -> Route:
        """`has_body`: whether a request that the first HTTP process answers has one; None: any process answers."""

        async def endpoint(request: Request) -> Response:
            if serving.draining and request.method == "POST":
                raise ServerStoppingError
            if generates and serving.engine.limits.pooling is not None:
                raise RequestError(NO_TEXT, "model")
            if serving.first and has_body is not None:
                return await serving.until_stopped(relay(serving, request, has_body))
            return await serving.until_stopped(handler(serving, request))

        return Route(path, endpoint, methods=methods)

    return [
        *(
            route(
                one.path,
                one.handler,
                one.method,
                generates=bool(one.events),
                has_body=one.body is not None if one.of_first else None,
            )
            for one in OPERATIONS
        ),
        route("/ping", info.health, "POST"),
        route("/openapi.json", openapi_json, "GET"),
        route("/docs", docs, "GET"),
        *(() if server_config.disable_page else (route("/", show_page, "GET"),)),
    ]


def _exception_handlers() -> dict[Any, Any]:
    async def ours(request: Request, error: HeadraceError) -> Response:
        return error_response(error, wire=wire_of(request.scope["path"]))

    async def routing(request: Request, error: HTTPException) -> Response:
        place = f"{request.method[:20]} {request.scope['path'][:200]}"  # request.url is made of the Host header
        if error.status_code == 404:
            return error_response(NotFoundError(f"no such route: {place}"))
        if error.status_code == 405:
            allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
            refused = MethodNotAllowedError(f"method not allowed: {place}")
            return error_response(refused, {"allow": ", ".join(allowed)}, wire=wire_of(request.scope["path"]))
        return error_response(RequestError(str(error.detail)))

    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(error, wire=wire_of(request.scope["path"]))

    return {HeadraceError: ours, HTTPException: routing, ClientDisconnect: gone, Exception: unexpected}
