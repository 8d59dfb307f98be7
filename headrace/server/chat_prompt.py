"""Renders chat messages into a prompt with the model's template, for chat completions and /tokenize."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.engine.tokenizer import Tokenizer
from headrace.errors import RequestError, quoted
from headrace.server.body import check_depth
from headrace.server.json_pieces import decode_json
from headrace.server.protocol import ROLES, ChatCompletionRequest, ChatMessage, ContentPart, TokenizeRequest, Tool
from headrace.server.serving import Serving

RENDERED_INLINE_BYTES = 8192
"""Longer bodies, and conversations with tools, are rendered in a thread, so that they do not hold up other streams."""
MAX_TOOLS = 1024
MAX_TEMPLATE_KWARGS = 32
RESERVED_KWARGS = frozenset(("self", "messages", "tools", "add_generation_prompt", "chat_template"))
"""Names that a request sets by fields of their own, or not at all. The engine's template refuses further ones."""


def render_prompt(serving: Serving, request: ChatCompletionRequest | TokenizeRequest, tools_wanted: bool) -> str:
    """Return the prompt of a request's conversation. Raises RequestError if it is invalid, or the template fails."""
    tokenizer = _tokenizer(serving)
    if request.chat_template is not None:
        raise RequestError(
            "chat_template is not accepted in a request; start the server with --chat-template", "chat_template"
        )
    kwargs = _template_kwargs(request.chat_template_kwargs)
    add_generation_prompt = request.add_generation_prompt is not False
    if not request.messages:
        raise RequestError("messages must not be empty", "messages")
    messages = [_template_message(index, message) for index, message in enumerate(request.messages)]
    tools = _template_tools(request.tools) if tools_wanted else None
    effort = request.reasoning_effort
    if effort is not None and template_reads(serving, "reasoning_effort", bool(tools)):
        kwargs = {"reasoning_effort": effort} | kwargs
    template = tokenizer.template_for(bool(tools))
    return template.render(messages, tools, add_generation_prompt, kwargs, bool(request.continue_final_message))


def template_reads(serving: Serving, name: str, with_tools: bool) -> bool:
    """Return whether the model's template uses a variable."""
    return name in _tokenizer(serving).template_for(with_tools).variables


def _tokenizer(serving: Serving) -> Tokenizer:
    tokenizer = serving.engine.tokenizer
    if tokenizer is None:
        raise RequestError("this server runs without tokenizer and takes token ids only", "messages")
    return tokenizer


def _template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    name = "chat_template_kwargs"
    kwargs = given or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise RequestError(f"{name} may hold at most {MAX_TEMPLATE_KWARGS} entries, got {len(kwargs)}", name)
    for key in kwargs:
        if key in RESERVED_KWARGS or not key.isidentifier():
            raise RequestError(f"{name} may not set {quoted(key)}", name)
    check_depth(name, kwargs)
    return kwargs


def _template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools may hold at most {MAX_TOOLS} entries, got {len(tools)}", "tools")
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(f"tools[{index}].type must be 'function', got {quoted(tool.type)}", "tools")
        if not isinstance(tool.function.get("name"), str) or not tool.function["name"]:
            raise RequestError(f"tools[{index}].function.name is required", "tools")
        check_depth("tools", tool.function)
    return [{"type": tool.type, "function": tool.function} for tool in tools]


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that templates expect: content as text, arguments of tool calls as objects."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        roles = ", ".join(ROLES)
        raise RequestError(f"{where}.role must be one of {roles}, got {quoted(message.role)}", f"{where}.role")
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content may be null for the assistant only, got role {message.role!r}", "messages")
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(where, message.content),
    }
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(where, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _text(where: str, content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        text = {"text": part.text, "input_text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            known = part.type in ("text", "input_text", "refusal")
            why = f"has no {part.type}" if known else f"is of type {quoted(part.type)}; this model takes text only"
            raise RequestError(f"{where}.content[{number}] {why}", "messages")
        texts.append(text)
    return "\n".join(texts)


def _arguments(where: str, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a tool call as an object. OpenAI's clients send them as JSON text."""
    if isinstance(given, str):
        try:
            given = decode_json(given.encode()) if given.strip() else {}
        except RequestError as error:
            raise RequestError(f"{where}.tool_calls: {error}", "messages") from None
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            given = None
        if not isinstance(given, dict):
            raise RequestError(f"{where}.tool_calls: arguments must be a JSON object as text", "messages")
    check_depth(f"{where}.tool_calls", given)
    return given or {}
