"""The routes, and what stands in front of them: keys, CORS, and errors in OpenAI's shape."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from headrace import __version__
from headrace.config import ServerConfig
from headrace.errors import HeadraceError, MethodNotAllowedError, NotFoundError, RequestError
from headrace.server import info, openapi, protocol
from headrace.server.auth import RequireApiKey
from headrace.server.chat import answer_chat
from headrace.server.completions import answer_completion
from headrace.server.replies import error_response, json_response
from headrace.server.serving import Serving

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

CLIENT_CLOSED_REQUEST = 499


def build_app(engine: AsyncEngine, server_config: ServerConfig, model_names: list[str]) -> FastAPI:
    """`model_names`: what the API answers to, the first being the name in answers. `app.state.serving` is the rest."""
    app = FastAPI(
        title="headrace",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=_exception_handlers(),
    )
    serving = Serving(engine, server_config, model_names)
    app.state.serving = serving
    _add_generating_routes(app, serving)
    _add_plain_routes(app, serving)
    _add_description(app, server_config)
    # Each new middleware stands in front of those before it: CORS answers preflights, which carry no key.
    if server_config.api_key:
        app.add_middleware(RequireApiKey, keys=server_config.api_key, root_path=server_config.root_path)
    if server_config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server_config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    if server_config.root_path:
        app.add_middleware(UnderRootPath, root_path=server_config.root_path)
    return app


class UnderRootPath:
    """Tells the router of a prefix that a proxy may or may not have taken off the path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "root_path": self.root_path}, receive, send)


def _add_generating_routes(app: FastAPI, serving: Serving) -> None:
    async def completions(request: Request) -> Response:
        return await serving.until_stopped(answer_completion(serving, request))

    async def chat_completions(request: Request) -> Response:
        return await serving.until_stopped(answer_chat(serving, request))

    errors = (400, 401, 404, 413, 415, 429, 503)
    app.add_api_route(
        "/v1/completions", completions, methods=["POST"], response_model=None,
        summary="Complete prompts", openapi_extra=openapi.takes(protocol.CompletionRequest),
        responses=openapi.gives(protocol.Completion, *errors, event=protocol.Completion),
    )  # fmt: skip
    app.add_api_route(
        "/v1/chat/completions", chat_completions, methods=["POST"], response_model=None,
        summary="Answer a conversation", openapi_extra=openapi.takes(protocol.ChatCompletionRequest),
        responses=openapi.gives(protocol.ChatCompletion, *errors, event=protocol.ChatChunk),
    )  # fmt: skip


def _add_plain_routes(app: FastAPI, serving: Serving) -> None:
    async def models() -> Response:
        return info.list_models(serving)

    async def model(request: Request) -> Response:
        return info.show_model(serving, request.path_params["model_id"])

    async def plan() -> Response:
        return info.show_plan(serving)

    async def tokenize(request: Request) -> Response:
        return await serving.until_stopped(info.tokenize(serving, request))

    async def detokenize(request: Request) -> Response:
        return await serving.until_stopped(info.detokenize(serving, request))

    async def health() -> Response:
        return info.health(serving)

    async def metrics() -> Response:
        return info.metrics(serving)

    async def version() -> Response:
        return info.version()

    def add(path: str, endpoint: Any, summary: str, shape: type | None, *errors: int, **more: Any) -> None:
        methods = more.pop("methods", ["GET"])
        app.add_api_route(
            path, endpoint, methods=methods, response_model=None, summary=summary,
            responses=openapi.gives(shape, *errors), **more,
        )  # fmt: skip
        if "GET" in methods:
            _add_head(app, path, endpoint)

    add("/v1/models", models, "List the served models", protocol.ModelList, 401)
    add(
        "/v1/models/{model_id:path}", model, "Show a served model", protocol.ModelCard, 401, 404,
        openapi_extra=openapi.takes_path("model_id"),
    )  # fmt: skip
    add("/v1/plan", plan, "How this server runs, and why", protocol.PlanAnswer, 401)
    add(
        "/tokenize", tokenize, "Text or messages to token ids", protocol.TokenizeAnswer, 400, 401, 404, 413, 415,
        methods=["POST"], openapi_extra=openapi.takes(protocol.TokenizeRequest),
    )  # fmt: skip
    add(
        "/detokenize", detokenize, "Token ids to text", protocol.DetokenizeAnswer, 400, 401, 404, 413, 415,
        methods=["POST"], openapi_extra=openapi.takes(protocol.DetokenizeRequest),
    )  # fmt: skip
    add("/health", health, "200 while the engine steps", None, 503, openapi_extra={"security": []})
    add("/ping", health, "The same as /health, behind the key", None, 401, 503)
    app.add_api_route("/ping", health, methods=["POST"], include_in_schema=False, response_model=None)
    add("/metrics", metrics, "Prometheus metrics", None, 401)
    add("/version", version, "The version of headrace", None, 401)


def _add_description(app: FastAPI, server_config: ServerConfig) -> None:
    @functools.cache
    def description() -> dict[str, Any]:
        return openapi.complete(app.openapi(), bool(server_config.api_key), server_config.root_path)

    async def openapi_json() -> Response:
        return json_response(description())

    async def docs() -> Response:
        return HTMLResponse(openapi.page(description(), f"{server_config.root_path}/openapi.json"))

    for path, endpoint in (("/openapi.json", openapi_json), ("/docs", docs)):
        app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False, response_model=None)
        _add_head(app, path, endpoint)


def _add_head(app: FastAPI, path: str, endpoint: Any) -> None:
    """The answer to GET without its body, which uvicorn leaves away."""
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)


def _exception_handlers() -> dict[int | type[Exception], Any]:
    async def ours(request: Request, error: HeadraceError) -> Response:
        return error_response(error)

    async def routing(request: Request, error: HTTPException) -> Response:
        place = f"{request.method[:20]} {request.scope['path'][:200]}"  # request.url is made of the Host header
        if error.status_code == 404:
            return error_response(NotFoundError(f"no such route: {place}"))
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "").replace("GET", "GET, HEAD")
            return error_response(MethodNotAllowedError(f"method not allowed: {place}"), {"allow": allowed})
        return error_response(RequestError(str(error.detail)))

    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(error)

    handlers: dict[int | type[Exception], ExceptionHandler | Any] = {
        HeadraceError: ours,
        HTTPException: routing,
        ClientDisconnect: gone,
        Exception: unexpected,
    }
    return handlers
