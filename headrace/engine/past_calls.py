"""Shows a chat template the tool calls of a conversation in the form that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.engine.chat_template import ChatTemplate
from headrace.errors import RequestError


def with_objects(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return a conversation whose tool calls are as `shown_call` returns them."""
    return _with_calls(messages, lambda call: shown_call(call, template))


def shown_call(
    call: Mapping[str, Any], template: ChatTemplate, decode: Callable[[bytes], Any] = msgspec.json.decode
) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, and its name and arguments where the template reads them.

    OpenAI's clients send arguments as JSON text. What is none, such as those of a call that was cut short, stays text,
    as an agent shows the model its own mistakes. `decode` may raise RequestError, which is handed on.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    given = function.get("arguments")
    function = {**function, "arguments": _object(given, decode) if isinstance(given, str) else given or {}}
    return {**call, "function": function, **(function if template.reads_bare_calls else {})}


def _object(given: str, decode: Callable[[bytes], Any]) -> dict[str, Any] | str:
    try:
        found = decode(given.encode()) if given.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return given
    return found if isinstance(found, dict) else given


def render_chat(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any],
    continue_final_message: bool,
) -> str:
    """Return what ChatTemplate.render does. A template that goes through the keys of arguments, and fails because they
    stayed text, sees an object with this text."""
    options = tools, add_generation_prompt, kwargs, continue_final_message
    try:
        return template.render(messages, *options)
    except RequestError:
        wrapped = _with_calls(messages, _wrapped)
        if wrapped == messages:
            raise
    return template.render(wrapped, *options)


def _wrapped(call: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(call)
    if isinstance(text := call.get("arguments"), str):
        found["arguments"] = {"arguments": text}
    if isinstance(function := call.get("function"), Mapping):
        found["function"] = _wrapped(function)
    return found


def _with_calls(
    messages: list[dict[str, Any]], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a conversation with its tool calls changed. What is none is left to the template, which tells."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list | tuple):
            message = {**message, "tool_calls": [change(one) if isinstance(one, Mapping) else one for one in calls]}
        changed.append(message)
    return changed
