"""Answers POST /v1/responses, and requests for what it has stored.

A request becomes a chat request (response_items.py), which the one chat path runs; response_answer.py writes the
answer. `previous_response_id` continues a conversation that the store holds.
"""

from __future__ import annotations

import asyncio
import time

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.server.auth import CLIENT
from headrace.server.chat import ChatPlan, plan_chat, reasoning_count, text_logprobs
from headrace.server.generation import GenerationResponse
from headrace.server.replies import ErrorObject, error_of, json_response
from headrace.server.requests import answer_headers, receive
from headrace.server.response_answer import ResponseAnswer, items_of
from headrace.server.response_items import chat_request, conversation, messages_of
from headrace.server.response_shapes import Deleted, ResponseObject, ResponsesRequest
from headrace.server.serving import Serving


async def answer_response(serving: Serving, http: Request) -> Response:
    """Read a request, and return the response that will run it. Raises RequestError for an invalid one."""
    received = await receive(serving, http, ResponsesRequest)
    request, client, store = received.fields, _client(http), serving.responses
    before = store.messages(client, request.previous_response_id) if request.previous_response_id else []
    if request.background and (request.stream or request.store is False or not store.max_bytes):
        raise RequestError("background needs store, and no stream", "background")
    said = conversation(request, before)
    messages = said if request.store is not False and store.max_bytes else None
    chat = chat_request(request, said)
    plan = await plan_chat(serving, http, chat, received.size, "resp")
    shown = _shown(request, plan, messages is not None)

    def ended(found: ResponseObject) -> None:
        if messages is not None and (not found.background or store.has(client, found.id)):
            store.put(client, found, [*messages, *messages_of(items_of(found))])

    logprobs = text_logprobs(serving, request.top_logprobs or 0) if chat.logprobs else None
    answer = ResponseAnswer(plan, shown, reasoning_count(serving, plan.parsing), ended, logprobs)
    unread = ["reasoning.effort" if name == "reasoning_effort" else name for name in plan.ignored]
    ignored = [*received.ignored, *unread, *(["store"] if request.store and messages is None else [])]
    headers = answer_headers(serving, http, None, plan.generation, ignored)
    generating = GenerationResponse(serving, plan.generation, answer, bool(request.stream), headers)
    if not request.background:
        return generating
    generating.client = client
    task = serving.spawn(_in_background(serving, client, generating, answer))
    store.put(client, shown, messages or [], task)
    return json_response(shown, headers)


async def show_response(serving: Serving, http: Request) -> Response:
    if http.query_params.get("stream", "false") not in ("false", "0"):
        raise RequestError("stream: a stored response is given whole", "stream")
    return json_response(serving.responses.response(_client(http), http.path_params["response_id"]))


async def delete_response(serving: Serving, http: Request) -> Response:
    response_id = http.path_params["response_id"]
    serving.responses.delete(_client(http), response_id)
    return json_response(Deleted(response_id))


async def cancel_response(serving: Serving, http: Request) -> Response:
    """End a response that is made in the background; one that has ended stays as it is."""
    client, response_id = _client(http), http.path_params["response_id"]
    shown, task = (serving.responses.response(client, response_id), serving.responses.task(client, response_id))
    if not shown.background:
        raise RequestError("only a response that is made in the background can be cancelled", "response_id")
    if task is not None:
        task.cancel()
        await asyncio.wait((task,))
    return json_response(serving.responses.response(client, response_id))


async def _in_background(serving: Serving, client: str, generating: GenerationResponse, answer: ResponseAnswer) -> None:
    """Make an answer that nobody waits for. How it ends is stored."""
    try:
        await asyncio.to_thread(answer.whole, await generating.collect())
    except asyncio.CancelledError:
        found = replace(answer.shown, status="cancelled")
    except Exception as error:
        _, body = error_of(error)
        assert isinstance(body, ErrorObject)
        found = answer.fail(body)
    else:
        return
    store = serving.responses
    if store.has(client, found.id):
        store.put(client, found, store.messages(client, found.id))


def _client(http: Request) -> str:
    client: str = http.scope.get(CLIENT, "")
    return client


def _shown(request: ResponsesRequest, plan: ChatPlan, stored: bool) -> ResponseObject:
    """Return the answer as it is before it begins."""
    params = plan.generation.params
    return ResponseObject(
        id=plan.generation.response_id,
        created_at=int(time.time()),
        model=plan.generation.model,
        status="queued" if request.background else "in_progress",
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        tools=request.tools or [],
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text={"format": {"type": "text"}} | (request.text or {}),
        reasoning={"effort": None, "summary": None} | (request.reasoning or {}),
        max_output_tokens=request.max_output_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=request.top_logprobs or 0,
        store=stored,
        background=bool(request.background),
        metadata=request.metadata or {},
        truncation=request.truncation or "disabled",
        user=request.user,
    )
