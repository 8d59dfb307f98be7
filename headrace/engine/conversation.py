"""Shows a chat template a conversation in the form that it reads: content as text, arguments of calls as objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.engine.chat_template import ChatTemplate
from headrace.errors import RequestError, quoted

TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of a message's parts that are text -> the field with it."""


def shown_messages(messages: Sequence[Any], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return a conversation in the form that templates read, without fields that are null: many only ask if one is
    there. Raises RequestError for what is no message, and for content that is not text."""
    return [_shown(f"messages[{index}]", message, template) for index, message in enumerate(messages)]


def _shown(where: str, message: Any, template: ChatTemplate) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and content, got {quoted(message)}", "messages")
    found = {name: value for name, value in message.items() if value is not None}
    found["content"] = shown_content(where, message.get("content"), bool(message.get("tool_calls")), template)
    return _with_calls(found, lambda call: shown_call(call, template))


def shown_content(where: str, content: Any, has_calls: bool, template: ChatTemplate) -> str | None:
    """Return a message's content as `content_text` does; None in place of none beside calls, if the template asks."""
    return None if content is None and has_calls and template.tells_null_content else content_text(where, content)


def content_text(where: str, content: Any) -> str:
    """Return a message's content as text, with a line for each of its parts. Raises RequestError for what is not
    text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where}.content must be a text or a list of parts, got {quoted(content)}", "messages")
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, Mapping):
            kind = str(part.get("type"))
            if kind not in TEXT_FIELDS:
                why = f"is of type {quoted(kind)}; this model takes text only"
                raise RequestError(f"{where}.content[{number}] {why}", "messages")
            part = part.get(TEXT_FIELDS[kind])
            if not isinstance(part, str):
                raise RequestError(f"{where}.content[{number}] has no {TEXT_FIELDS[kind]}", "messages")
        elif not isinstance(part, str):
            raise RequestError(f"{where}.content[{number}] must be a text or a part, got {quoted(part)}", "messages")
        texts.append(part)
    return "\n".join(texts)


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
    """Return what ChatTemplate.render does; an empty list of tools is none. A template that goes through the keys of
    arguments, and fails because they stayed text, sees an object with this text. One that shows a message of the system
    only at the beginning sees later ones as the user's."""
    options = tools or None, add_generation_prompt, kwargs, continue_final_message
    if any(message.get("role") == "system" for message in messages[1:]) and not template.shows_late_system:
        messages = _one_system(messages)
    try:
        return template.render(messages, *options)
    except RequestError:
        wrapped = [_with_calls(message, _wrapped) for message in messages]
        if wrapped == messages:
            raise
    return template.render(wrapped, *options)


def _one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which the first alone may be the system's: its further ones there are joined to it, and later
    ones to what the user says beside them."""
    found: list[dict[str, Any]] = []
    became = False  # whether the last one holds words of the system that are now the user's
    for message in messages:
        role = message.get("role")
        late = role == "system" and bool(found)
        if late and not (len(found) == 1 and found[0].get("role") == "system"):
            role = "user"
        joins = late or (became and role == "user")
        if joins and found[-1].get("role") == role:
            found[-1] = {**found[-1], "content": f"{found[-1].get('content') or ''}\n\n{message.get('content') or ''}"}
        else:
            found.append({**message, "role": role} if late else message)
        became = role == "user" and (late or (joins and became))
    return found


def _wrapped(call: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(call)
    if isinstance(text := call.get("arguments"), str):
        found["arguments"] = {"arguments": text}
    if isinstance(function := call.get("function"), Mapping):
        found["function"] = _wrapped(function)
    return found


def _with_calls(message: dict[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return a message with its tool calls changed. What is none is left to the template, which tells."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [change(one) if isinstance(one, Mapping) else one for one in calls]}
