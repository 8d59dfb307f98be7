"""Turns what the Responses API calls items into the messages of a chat, and its fields into a chat request.

What the model thinks, says and calls in a row are items of their own there, and one message here. Instructions and the
system's and developer's first messages are joined, since many templates take one such message, at the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.sampling_params import check_integer
from headrace.server.body import check_depth
from headrace.server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    PastFunctionCall,
    PastToolCall,
    Tool,
)
from headrace.server.response_shapes import Item, ResponsesRequest

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
FIRST = ("system", "developer")
ALIKE = (
    "model", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "priority", "cache_salt",
    "chat_template_kwargs", "stream",
)  # fmt: skip
"""fields that a chat request has too"""
REFUSED = ("prompt", "conversation")
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name. The second has no effect: reasoning is sent in the clear, and taken back so."""


def conversation(request: ResponsesRequest, before: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a request's conversation, which begins with `before`. Raises RequestError for an item of another kind."""
    given = [ChatMessage("user", request.input)] if isinstance(request.input, str) else messages_of(request.input)
    if not given and not before:
        raise RequestError("input must not be empty", "input")
    return [*before, *given]


def chat_request(request: ResponsesRequest, messages: list[ChatMessage]) -> ChatCompletionRequest:
    """Return the chat request that asks for the same in a conversation. Raises RequestError for what it cannot say."""
    for name in REFUSED:
        if getattr(request, name) is not None:
            raise RequestError(f"{name} is not yet supported", name)
    included = request.include or ()
    if other := [name for name in included if name not in INCLUDED]:
        raise RequestError(f"include: {quoted(other[0])} is not supported; accepted: {', '.join(INCLUDED)}", "include")
    if request.top_logprobs and LOGPROBS not in included:
        raise RequestError(f"top_logprobs needs include to name {LOGPROBS!r}", "top_logprobs")
    if request.truncation not in (None, "disabled", "auto"):
        raise RequestError(f"truncation must be 'disabled' or 'auto', got {quoted(request.truncation)}", "truncation")
    if request.max_output_tokens is not None:
        check_integer("max_output_tokens", request.max_output_tokens, 1, 2**31 - 1)
    reasoning = request.reasoning or {}
    effort = reasoning.get("effort")
    if not isinstance(effort, str | None):
        raise RequestError(f"reasoning.effort must be a text, got {quoted(effort)}", "reasoning")
    return ChatCompletionRequest(
        messages=_with_instructions(request.instructions, messages),
        tools=_tools(request.tools or (), "tools") or None,
        response_format=_format((request.text or {}).get("format")),
        reasoning_effort=effort,
        max_completion_tokens=request.max_output_tokens,
        logprobs=LOGPROBS in included or None,
        top_logprobs=request.top_logprobs,
        **{name: getattr(request, name) for name in ALIKE},
    )


def messages_of(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the messages that items are. Raises RequestError for an item that is none of a chat."""
    messages: list[ChatMessage] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type") or "message"
        if kind == "message":
            role, content = _string(item, "role", where), item.get("content")
            if role != "assistant":
                messages.append(ChatMessage(role, _parts(content, where)))
                continue
            said = _turn(messages)
            said.content = f"{said.content or ''}{_text(content, where)}"
        elif kind == "reasoning":
            thought = _text(item.get("content") or item.get("summary") or "", where)
            said = _turn(messages)
            said.reasoning = f"{said.reasoning or ''}{thought}" or None
        elif kind == "function_call":
            name = full_name(_string(item, "name", where), item.get("namespace"))
            function = PastFunctionCall(name, _string(item, "arguments", where))
            said = _turn(messages)
            said.tool_calls = [*(said.tool_calls or ()), PastToolCall(function, _string(item, "call_id", where))]
        elif kind == "function_call_output":
            output = _text(item.get("output"), where)
            messages.append(ChatMessage("tool", output, tool_call_id=_string(item, "call_id", where)))
        else:
            raise RequestError(f"{where}: items of type {quoted(kind)} are not supported", f"{where}.type")
    return messages


def _turn(messages: list[ChatMessage]) -> ChatMessage:
    """Return the assistant's message that the next item belongs to."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage("assistant"))
    return messages[-1]


def _with_instructions(instructions: str | None, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages of which the first alone, if any, is the system's."""
    first = next((place for place, one in enumerate(messages) if one.role not in FIRST), len(messages))
    texts = [instructions] if instructions else []
    for message in messages[:first]:
        parts = message.content if isinstance(message.content, list) else [message.content or ""]
        texts += [part if isinstance(part, str) else part.text or "" for part in parts]
    return [*([ChatMessage("system", "\n\n".join(texts))] if texts else []), *messages[first:]]


def _parts(content: Any, where: str) -> str | list[ContentPart | str]:
    if isinstance(content, str):
        return content
    return [ContentPart("text", text) for text in _texts(content, where)]


def _text(content: Any, where: str) -> str:
    return content if isinstance(content, str) else "".join(_texts(content, where))


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of parts. Raises RequestError for a part that is no text."""
    if not isinstance(content, list):
        raise RequestError(f"{where} must hold a text or parts, got {quoted(content)}", where)
    texts = []
    for place, part in enumerate(content):
        at = f"{where}.content[{place}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(_string(part, "refusal", at))
        elif kind in TEXTS:
            texts.append(_string(part, "text", at))
        else:
            raise RequestError(f"{at}: parts of type {quoted(kind)} are not yet supported", at)
    return texts


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a text, got {quoted(value)}", f"{where}.{name}")
    return value


def full_name(name: str, namespace: Any) -> str:
    """Return the name by which the model calls a function: one of a namespace has both in it."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def namespaces(tools: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return full name -> namespace and name of the functions that stand in a namespace. `tools` have been read."""
    groups = [(group["name"], group["tools"]) for group in tools if group.get("type") == "namespace"]
    return {full_name(one["name"], space): (space, one["name"]) for space, ones in groups for one in ones}


def _tools(given: Sequence[Any], where: str, namespace: str | None = None) -> list[Tool]:
    """Return tools as chat requests have them. Raises RequestError for one that is no function of the client's, nor a
    namespace of such: nobody here runs OpenAI's own."""
    found: list[Tool] = []
    for place, tool in enumerate(given):
        at = f"{where}[{place}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            space, inner = _string(tool, "name", at), tool.get("tools")
            if not isinstance(inner, list):
                raise RequestError(f"{at}.tools must be a list of functions, got {quoted(inner)}", "tools")
            found += _tools(inner, f"{at}.tools", space)
        elif kind == "function":
            check_depth("tools", tool)
            function = {name: value for name, value in tool.items() if name != "type" and value is not None}
            found.append(Tool(function | {"name": full_name(_string(tool, "name", at), namespace)}))
        else:
            raise RequestError(f"{at}.type must be 'function', got {quoted(kind)}, which nothing here runs", "tools")
    return found


def _format(given: Any) -> Any:
    """Return the response_format that `text.format` is."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
