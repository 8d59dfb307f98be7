"""Renders chat messages into a prompt with the model's template, for chat completions and /tokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.engine.chat_template import ChatTemplate
from headrace.engine.conversation import content_text, render_chat, shown_call, shown_content
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import RequestError, quoted
from headrace.parsers.formats import ReasoningFormat
from headrace.parsers.reasoning import begins_open
from headrace.server.body import check_depth
from headrace.server.json_pieces import decode_json
from headrace.server.protocol import (
    ROLES,
    ChatCompletionRequest,
    ChatMessage,
    PastToolCall,
    TokenizeRequest,
)
from headrace.server.serving import Serving

RENDERED_INLINE_BYTES = 8192
"""Longer bodies, and conversations with tools, are rendered in a thread, so that they do not hold up other streams."""
MAX_TEMPLATE_KWARGS = 32
RESERVED_KWARGS = frozenset(("self", "messages", "tools", "add_generation_prompt", "chat_template"))
"""Names that a request sets by fields of their own, or not at all. The engine's template refuses further ones."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""
MODE = "thinking_mode"
"""The same where the model may also be left to choose, as MiniMax-M3's is by default."""
THINKING_TYPES = {"enabled": True, "disabled": False}
NEAREST_EFFORT = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
MAX_MARKUP_CHARS = 256
"""More than a template writes between the beginning of a message and its text."""


class Rendered(NamedTuple):
    """Holds a prompt, and what it was made with."""

    text: str
    template: ChatTemplate
    kwargs: Mapping[str, Any]


def is_slow_to_render(request: ChatCompletionRequest | TokenizeRequest) -> bool:
    """Return whether a request has what may make a template slow, however short the request is."""
    return bool(request.tools or request.chat_template_kwargs)


def render_prompt(
    serving: Serving, request: ChatCompletionRequest | TokenizeRequest, tools: list[dict[str, Any]] | None
) -> Rendered:
    """Return the prompt of a request's conversation, in which the model is shown `tools`. Raises RequestError if it is
    invalid, or the template fails."""
    if request.chat_template is not None:
        raise RequestError(
            "chat_template is not accepted in a request; start the server with --chat-template", "chat_template"
        )
    template = _tokenizer(serving).template_for(bool(tools))
    kwargs = _template_kwargs(serving, request, template)
    add_generation_prompt = request.add_generation_prompt is not False
    if not request.messages:
        raise RequestError("messages must not be empty", "messages")
    messages = [_template_message(index, message, template) for index, message in enumerate(request.messages)]
    text = render_chat(template, messages, tools, add_generation_prompt, kwargs, bool(request.continue_final_message))
    return Rendered(text, template, kwargs)


def reasoning_open(rendered: Rendered, form: ReasoningFormat, request: ChatCompletionRequest) -> bool:
    """Return whether the answer begins within reasoning: as the end of the prompt says, or that of the message that is
    to be continued."""
    if not request.continue_final_message:
        return begins_open(form, rendered.text, rendered.template.source, rendered.kwargs)
    content = message_text(request.messages[-1])
    tail = rendered.text[-len(content) - MAX_MARKUP_CHARS :]
    opened, closed = (
        max((tail.rfind(mark.strip()) for mark in marks), default=-1) for marks in (form.open, form.close)
    )
    return opened > closed


def unread_fields(request: ChatCompletionRequest, template: ChatTemplate) -> list[str]:
    """Return the fields about thinking that have no effect, as the template does not read them."""
    switched = bool(_switched(template, True))
    found = [name for name in SWITCHES if getattr(request, name) is not None and not switched]
    effort = request.reasoning_effort
    if effort is not None and "reasoning_effort" not in template.variables and not (switched and effort == "none"):
        found.append("reasoning_effort")
    return found


def _tokenizer(serving: Serving) -> Tokenizer:
    tokenizer = serving.engine.tokenizer
    if tokenizer is None:
        raise RequestError("this server runs without tokenizer and takes token ids only", "messages")
    return tokenizer


def _switched(template: ChatTemplate, thinks: bool) -> dict[str, Any]:
    """Return the variables of a template by which thinking is turned on or off."""
    known = dict.fromkeys(SWITCHES, thinks) | {MODE: "enabled" if thinks else "disabled"}
    return {name: value for name, value in known.items() if name in template.variables}


def _template_kwargs(
    serving: Serving, request: ChatCompletionRequest | TokenizeRequest, template: ChatTemplate
) -> dict[str, Any]:
    """Return the variables of a template: the server's defaults, over them what fields of the request say, and over
    these its `chat_template_kwargs`."""
    name = "chat_template_kwargs"
    given = request.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise RequestError(f"{name} may hold at most {MAX_TEMPLATE_KWARGS} entries, got {len(given)}", name)
    for key in given:
        if key in RESERVED_KWARGS or not key.isidentifier():
            raise RequestError(f"{name} may not set {quoted(key)}", name)
    check_depth(name, given)
    fields: dict[str, Any] = {}
    if request.reasoning_effort is not None and "reasoning_effort" in template.variables:
        fields["reasoning_effort"] = _known_effort(request.reasoning_effort, template)
    if (thinks := _wants_thinking(request)) is not None:
        fields |= _switched(template, thinks)
    return serving.config.default_chat_template_kwargs | fields | given


def _known_effort(effort: str, template: ChatTemplate) -> str:
    """Return an effort as the model was trained to read it: one that its template does not name is the nearest of low,
    medium and high."""
    named = f"'{effort}'" in template.source or f'"{effort}"' in template.source
    return effort if named else NEAREST_EFFORT.get(effort, effort)


def _wants_thinking(request: ChatCompletionRequest | TokenizeRequest) -> bool | None:
    """Return whether a request turns thinking on or off, in any spelling; None if it says nothing of it."""
    if request.enable_thinking is not None:
        return request.enable_thinking
    given = request.thinking
    if isinstance(given, dict) and isinstance(kind := given.get("type"), str):
        given = THINKING_TYPES.get(kind, given)
    if given is None:
        return False if request.reasoning_effort == "none" else None
    if not isinstance(given, bool):
        raise RequestError(
            f"thinking must be true, false, {{'type': 'enabled'}} or {{'type': 'disabled'}}, got {quoted(given)}",
            "thinking",
        )
    return given


def _template_message(index: int, message: ChatMessage, template: ChatTemplate) -> dict[str, Any]:
    """Return a message in the form that templates expect: content as text, arguments of tool calls as objects."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        roles = ", ".join(ROLES)
        raise RequestError(f"{where}.role must be one of {roles}, got {quoted(message.role)}", f"{where}.role")
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content may be null for the assistant only, got role {message.role!r}", "messages")
    content = shown_content(where, msgspec.to_builtins(message.content), bool(message.tool_calls), template)
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [_template_call(where, call, template) for call in message.tool_calls]
    if reasoning := message.reasoning or message.reasoning_content:
        # gpt-oss's template has a third name, and refuses it beside content
        names = ("reasoning", "reasoning_content", *(() if content else ("thinking",)))
        found |= {name: reasoning for name in names if name in template.keys}
    return found


def message_text(message: ChatMessage) -> str:
    """Return the text of a message that a template was shown."""
    return content_text("", msgspec.to_builtins(message.content))


def _template_call(where: str, call: PastToolCall, template: ChatTemplate) -> dict[str, Any]:
    """Return a tool call as a template reads it. Raises RequestError for arguments beyond the limits."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    try:
        found = shown_call({"id": call.id, "type": call.type, "function": function}, template, decode_json)
    except RequestError as error:
        raise RequestError(f"{where}.tool_calls: {error}", "messages") from None
    check_depth(f"{where}.tool_calls", found["function"]["arguments"])
    return found
