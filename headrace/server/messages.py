"""Answers POST /v1/messages, Anthropic's API: its requests become chat requests, and outputs its messages.

All between is the one chat path (chat.py): template, tools, grammar, reading of answers. What that path cannot say is
refused by the name of its field. How errors and events are written is in replies.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import RequestError, quoted
from headrace.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from headrace.request import CompletionOutput, RequestOutput
from headrace.sampling_params import check_integer
from headrace.server.body import check_depth
from headrace.server.chat import ChatPlan, plan_chat
from headrace.server.chat_parsing import ChoiceParser, merged, read_new
from headrace.server.chat_prompt import RENDERED_INLINE_BYTES, is_slow_to_render, render_prompt
from headrace.server.generation import GenerationResponse, UsageCount
from headrace.server.message_shapes import (
    Block,
    BlockDelta,
    BlockDeltaEvent,
    BlockStart,
    BlockStop,
    ContentBlock,
    CountTokensRequest,
    Ending,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageParam,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    StreamEvent,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from headrace.server.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    PastFunctionCall,
    PastToolCall,
    Tool,
)
from headrace.server.replies import ANTHROPIC, json_response
from headrace.server.requests import answer_headers, receive
from headrace.server.serving import Serving
from headrace.server.tool_use import template_tools

CHANGES_EVERY_TIME = "x-anthropic-billing-header:"
"""How a first text of `system` begins that an agent writes anew in every request: with it no prompt would have a
beginning that is cached. It tells the model nothing, and is left out."""
ROLES = ("user", "assistant", "system")
THINKS = {"enabled": True, "disabled": False, "adaptive": None}
NAMES_HERE = {"thinking_token_budget": "thinking.budget_tokens", "reasoning_effort": "output_config.effort"}
"""fields of a chat request -> what they are made of"""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
CONTEXT_FULL = "model_context_window_exceeded"
"""How an answer ended that had fewer than max_tokens. Clients ask for what Anthropic's models may write, whatever the
context of the model that is served; so does Anthropic's own API end, and not refuse."""
INVALID_JSON = "INVALID_JSON"
"""The one key of a call's input whose JSON the model has not finished, as Anthropic's guide has clients send it back"""


async def answer_message(serving: Serving, http: Request) -> GenerationResponse:
    """Read a request, and return the response that will run it. Raises RequestError for an invalid one."""
    received = await receive(serving, http, MessagesRequest)
    request = received.fields
    chat, ignored = chat_request(request)
    check_integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    chat.stop, chat.stream = request.stop_sequences, request.stream
    chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    plan = await plan_chat(serving, http, chat, received.size, "msg")
    plan = replace(plan, generation=replace(plan.generation, most_tokens=request.max_tokens))
    unread = [NAMES_HERE.get(name, name) for name in plan.ignored]
    headers = answer_headers(serving, http, None, plan.generation, [*received.ignored, *ignored, *unread])
    headers["request-id"] = plan.generation.response_id  # the name under which Anthropic's clients look for it
    return GenerationResponse(serving, plan.generation, MessageAnswer(plan), bool(request.stream), headers)


async def count_tokens(serving: Serving, http: Request) -> Response:
    """Return the number of tokens of the prompt that a request would have."""
    received = await receive(serving, http, CountTokensRequest)
    chat, _ = chat_request(received.fields)
    serving.resolve_model(chat.model)
    most = 0 if is_slow_to_render(chat) else RENDERED_INLINE_BYTES
    rendered = await serving.work(
        http, received.size, lambda: render_prompt(serving, chat, template_tools(chat.tools)), most
    )
    return json_response(TokenCount(len(await serving.engine.tokenize(rendered.text, False))))


def chat_request(request: CountTokensRequest) -> tuple[ChatCompletionRequest, list[str]]:
    """Return the chat request that asks for the same, and the names of what has no effect in it. Raises RequestError
    for what it cannot say."""
    if not request.messages:
        raise RequestError("messages must not be empty", "messages")
    messages = _system(request.system)
    for place, given in enumerate(request.messages):
        messages += _messages(given, f"messages[{place}]")
    continues = request.messages[-1].role == "assistant"  # the answer goes on with the text of the last message
    choice, parallel = _tool_choice(request.tool_choice)
    thinking, config = request.thinking or {}, request.output_config or {}
    kind = thinking.get("type")
    if thinking and (not isinstance(kind, str) or kind not in THINKS):
        raise RequestError(f"thinking.type must be one of {', '.join(THINKS)}, got {quoted(kind)}", "thinking")
    budget = thinking.get("budget_tokens")
    if budget is not None:
        check_integer("thinking.budget_tokens", budget, 1, 2**31 - 1)
    effort, form = config.get("effort"), config.get("format")
    if not isinstance(effort, str | None) or not isinstance(form, dict | None):
        raise RequestError("output_config must have a text as effort and an object as format", "output_config")
    if form is not None:
        if form.get("type") != "json_schema":
            found = quoted(form.get("type"))
            raise RequestError(f"output_config.format.type must be 'json_schema', got {found}", "output_config")
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}
    chat = ChatCompletionRequest(
        model=request.model,
        messages=messages,
        tools=[_tool(given, f"tools[{place}]") for place, given in enumerate(request.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=THINKS[kind] if isinstance(kind, str) else None,
        thinking_token_budget=budget if kind == "enabled" else None,
        reasoning_effort=effort,
        response_format=form,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return chat, ["thinking.budget_tokens"] if budget is not None and kind != "enabled" else []


def _system(given: str | list[Block] | None) -> list[ChatMessage]:
    if not given:
        return []
    if isinstance(given, str):
        return [ChatMessage("system", given)]
    texts = [_text(block, f"system[{place}]") for place, block in enumerate(given)]
    if texts[0].startswith(CHANGES_EVERY_TIME):
        del texts[0]
    return [ChatMessage("system", "\n\n".join(texts))] if texts else []


def _messages(given: MessageParam, where: str) -> list[ChatMessage]:
    """Return a message of Anthropic's as those of a chat: results of tools are messages of their own there."""
    if given.role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {quoted(given.role)}", f"{where}.role")
    if isinstance(given.content, str):
        return [ChatMessage(given.role, given.content)]
    blocks = [(block, f"{where}.content[{place}]") for place, block in enumerate(given.content)]
    if given.role == "system":
        return [ChatMessage("system", "\n\n".join(_text(*block) for block in blocks))]
    return [_said(blocks)] if given.role == "assistant" else [*_asked(blocks)]


def _asked(blocks: Sequence[tuple[Block, str]]) -> Iterator[ChatMessage]:
    """Yield the messages that a user's blocks are."""
    parts: list[ContentPart | str] = []
    for block, where in blocks:
        if block.get("type") != "tool_result":
            parts.append(ContentPart("text", _text(block, where)))
            continue
        content = block.get("content") or ""
        if isinstance(content, list):
            texts = [_text(inner, f"{where}.content[{place}]") for place, inner in enumerate(content)]
            content = "\n".join(texts)
        if not isinstance(content, str):
            raise RequestError(f"{where}.content must be text or blocks, got {quoted(content)}", f"{where}.content")
        yield ChatMessage("tool", content, tool_call_id=_string(block, "tool_use_id", where))
    if parts or not blocks:
        yield ChatMessage("user", parts or "")


def _said(blocks: Sequence[tuple[Block, str]]) -> ChatMessage:
    """Return the message that an assistant's blocks are."""
    texts, thoughts, calls = list[str](), list[str](), list[PastToolCall]()
    for block, where in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise RequestError(f"{where}.input must be an object, got {quoted(arguments)}", f"{where}.input")
            function = PastFunctionCall(_string(block, "name", where), arguments)
            calls.append(PastToolCall(function, _string(block, "id", where)))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind != "redacted_thinking":  # which nobody but its maker can read
            texts.append(_text(block, where))
    content = "\n".join(texts) if texts or not calls else None
    return ChatMessage("assistant", content, tool_calls=calls or None, reasoning="".join(thoughts) or None)


def _text(block: Block, where: str) -> str:
    """Return the text of a block. Raises RequestError for any other kind of block."""
    kind = block.get("type")
    if kind == "image" or kind == "document":
        raise RequestError(f"{where}: blocks of type {quoted(kind)} are not yet supported", where)
    if kind != "text":
        raise RequestError(f"{where}.type is not known: {quoted(kind)}", f"{where}.type")
    return _string(block, "text", where)


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a text, got {quoted(value)}", f"{where}.{name}")
    return value


def _tool(given: dict[str, Any], where: str) -> Tool:
    """Return a tool as chat requests have it. Raises RequestError for one of Anthropic's own."""
    kind, schema = given.get("type") or "custom", given.get("input_schema")
    if kind != "custom":
        raise RequestError(f"{where}.type must be 'custom': {quoted(kind)} is a tool of Anthropic's own", "tools")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.input_schema must be a JSON Schema (an object), got {quoted(schema)}", "tools")
    check_depth("tools", schema)
    function = {"name": _string(given, "name", where), "parameters": schema}
    return Tool(function | {name: given[name] for name in ("description", "strict") if given.get(name) is not None})


def _tool_choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """Return tool_choice and parallel_tool_calls of a chat request."""
    if given is None:
        return None, None
    kind = given.get("type")
    parallel = False if given.get("disable_parallel_tool_use") is True else None
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {quoted(kind)}", "tool_choice")
    return CHOICES[kind], parallel


def _signature(thought: str) -> str:
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()


class MessageAnswer:
    """Implements generation.Answer for messages."""

    wire = ANTHROPIC

    def __init__(self, plan: ChatPlan) -> None:
        self.generation = plan.generation
        self.parser = None if plan.parsing is None else ChoiceParser(plan.parsing)
        self.count = UsageCount(None)
        self.begun = False
        self.content: list[ContentBlock] = []
        """blocks that are complete"""
        self.block: ContentBlock | None = None
        """that is still being written"""
        self.texts: list[str] = []
        """its pieces"""

    @property
    def parses(self) -> bool:
        """Return whether text is read for reasoning and calls."""
        return self.parser is not None

    def whole(self, outputs: list[RequestOutput]) -> Message:
        self.events(0, outputs[0])
        ending = self._ending(outputs[0].outputs[0])
        return self._message(self.content, ending.stop_reason, ending.stop_sequence)

    def events(self, prompt_index: int, output: RequestOutput) -> list[StreamEvent]:
        self.count.add(0, output)
        events: list[StreamEvent] = []
        if not self.begun:
            self.begun = True
            events.append(MessageStart(self._message([])))
        for new in output.outputs:
            self.count.add_tokens(0, new.token_ids)
            for event in merged(read_new(self.parser, new)):
                events += self._part(event)
            if new.finish_reason is not None:
                events += [*self._closed(), MessageDelta(self._ending(new), self._usage()), MessageStop()]
        return events

    def last_events(self) -> list[StreamEvent]:
        return []

    def _part(self, event: Event) -> Iterator[StreamEvent]:
        """Yield the events for a part of the answer; a part of another kind than the one before begins a block."""
        delta: BlockDelta
        match event:
            case Content(text):
                if not isinstance(self.block, TextBlock):
                    yield from self._opened(TextBlock(""))
                delta = TextBlockDelta(text)
            case Reasoning(text):
                if not isinstance(self.block, ThinkingBlock):
                    yield from self._opened(ThinkingBlock("", ""))
                delta = ThinkingDelta(text)
            case CallStart(_, name, id):
                yield from self._opened(ToolUseBlock(id or "", name, {}))
                return
            case Arguments(_, text):
                delta = InputJsonDelta(text)
        self.texts.append(text)
        yield BlockDeltaEvent(len(self.content), delta)

    def _opened(self, block: ContentBlock) -> Iterator[StreamEvent]:
        yield from self._closed()
        self.block, self.texts = block, []
        yield BlockStart(len(self.content), block)

    def _closed(self) -> Iterator[StreamEvent]:
        """Yield the events that end the open block, if there is one."""
        block, text, index = self.block, "".join(self.texts), len(self.content)
        match block:
            case TextBlock():
                self.content.append(TextBlock(text))
            case ThinkingBlock():
                yield BlockDeltaEvent(index, SignatureDelta(_signature(text)))
                self.content.append(ThinkingBlock(text, _signature(text)))
            case ToolUseBlock():
                self.content.append(ToolUseBlock(block.id, block.name, _input(text)))
            case None:
                return
        self.block = None
        yield BlockStop(index)

    def _ending(self, new: CompletionOutput) -> Ending:
        if isinstance(new.stop_reason, str):
            return Ending("stop_sequence", new.stop_reason)
        reason = new.finish_reason or "stop"
        if reason == "stop" and self.parser is not None and self.parser.has_calls:
            reason = "tool_calls"
        if reason == "length" and self.count.total().completion_tokens < (self.generation.most_tokens or 0):
            return Ending(CONTEXT_FULL, None)
        return Ending(STOP_REASONS.get(reason, "end_turn"), None)

    def _usage(self) -> MessageUsage:
        total, cached = self.count.total(), self.count.cached_tokens.get(0, 0)
        return MessageUsage(total.prompt_tokens - cached, total.completion_tokens, cached)

    def _message(
        self, content: list[ContentBlock], stop_reason: str | None = None, stop_sequence: str | None = None
    ) -> Message:
        generation = self.generation
        return Message(generation.response_id, generation.model, content, self._usage(), stop_reason, stop_sequence)


def _input(arguments: str) -> Any:
    """Return the object that a call's arguments are."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}
