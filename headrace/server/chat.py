"""Answers POST /v1/chat/completions: turns messages into a Generation, and outputs into chat completion objects."""

from __future__ import annotations

import time

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from headrace.errors import RequestError, quoted
from headrace.request import CompletionOutput, RequestOutput
from headrace.sampling_params import MAX_LOGPROBS, check_integer
from headrace.server.chat_prompt import RENDERED_INLINE_BYTES, render_prompt, template_reads
from headrace.server.constraints import constraint_of, is_constrained
from headrace.server.generation import Generation, GenerationResponse, UsageCount
from headrace.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from headrace.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    Delta,
    Usage,
)
from headrace.server.requests import answer_headers, check_choices, check_common, check_copies, receive, sampling_params
from headrace.server.serving import Serving, new_id


async def answer_chat(serving: Serving, http: Request) -> GenerationResponse:
    """Read a request, and return the response that will run it. Raises RequestError for an invalid one."""
    received = await receive(serving, http, ChatCompletionRequest)
    request = received.fields
    plain = not request.tools and not request.chat_template_kwargs  # these may make a template slow
    most = RENDERED_INLINE_BYTES if plain and not is_constrained(request) else 0
    generation = await serving.work(received.size, lambda: _plan(serving, request), most)
    ignored = [*received.ignored, *_without_effect(serving, request)]
    headers = answer_headers(serving, http, request.request_id, generation, ignored)
    answer = ChatAnswer(serving, request, generation)
    return GenerationResponse(serving, generation, answer, bool(request.stream), headers)


def _plan(serving: Serving, request: ChatCompletionRequest) -> Generation:
    model = serving.resolve_model(request.model)
    check_common(request)
    for name, low, high in (("max_tokens", 1, 2**31 - 1), ("max_completion_tokens", 1, 2**31 - 1),
                            ("top_logprobs", 0, MAX_LOGPROBS)):  # fmt: skip
        if (value := getattr(request, name)) is not None:
            check_integer(name, value, low, high)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    check_choices([""], request.n)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = sampling_params(
        request,
        serving.engine.default_sampling,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        detokenize=True,
    )
    check_copies(params, params.n)
    grammar = constraint_of(serving, request, params)
    text = render_prompt(serving, request, _tools_wanted(request))
    return Generation(
        response_id=new_id("chatcmpl"),
        model=model,
        prompts=[text],
        params=params,
        add_special_tokens=bool(request.add_special_tokens),  # the template has written them
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        grammar="" if grammar is None else grammar.to_text(),
    )


def _tools_wanted(request: ChatCompletionRequest) -> bool:
    """Return whether the model is shown the tools: `none` hides them, `auto` leaves the choice to the model."""
    choice = request.tool_choice
    if choice is None or choice == "auto":
        return True
    if choice == "none":
        return False
    if choice == "required" or isinstance(choice, dict):
        raise RequestError("tool_choice can be 'none' or 'auto': forcing a call is not yet supported", "tool_choice")
    raise RequestError(f"tool_choice must be 'none' or 'auto', got {quoted(choice)}", "tool_choice")


def _without_effect(serving: Serving, request: ChatCompletionRequest) -> list[str]:
    """Return the fields that have no effect. Tools are among them: a call that the model writes stays text."""
    found = ["tools"] if request.tools and _tools_wanted(request) else []
    if request.reasoning_effort is not None and not template_reads(serving, "reasoning_effort", bool(found)):
        found.append("reasoning_effort")
    return found


class ChatAnswer:
    """Implements generation.Answer for chat completions."""

    def __init__(self, serving: Serving, request: ChatCompletionRequest, generation: Generation) -> None:
        tokenizer = serving.engine.tokenizer
        self.request = request
        self.generation = generation
        self.names = TokenNames(
            bool(request.return_tokens_as_token_ids), None if tokenizer is None else tokenizer.token_bytes
        )
        self.created = int(time.time())
        self.count = UsageCount(request.stream_options)
        self.begun: set[int] = set()
        self.echoed = _echoed(request)
        request.messages = []  # the prompt holds their text, so they need no memory while the answer is made

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        output = outputs[0]
        self.count.add(0, output)
        choices = []
        for new in output.outputs:
            self.count.completion_tokens[new.index] = len(new.token_ids)
            choice = ChatChoice(
                new.index,
                AssistantMessage(self.echoed + new.text),
                self._logprobs(new),
                new.finish_reason,
                new.stop_reason,
                new.token_ids if self.request.return_token_ids else UNSET,
            )
            choices.append(choice)
        completion = ChatCompletion(
            self.generation.response_id, self.created, self.generation.model, choices, usage=self.count.total()
        )
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            completion.prompt_token_ids = output.prompt_token_ids
        return completion

    def events(self, prompt_index: int, output: RequestOutput) -> list[ChatChunk]:
        self.count.add(prompt_index, output)
        events: list[ChatChunk] = []
        for new in output.outputs:
            if new.index not in self.begun:
                self.begun.add(new.index)
                opening = ChatChunkChoice(new.index, Delta(role="assistant", content=self.echoed))
                ids = output.prompt_token_ids if self.request.return_token_ids else UNSET
                events.append(self._event(opening, ids))
            tokens = self.count.completion_tokens
            tokens[new.index] = tokens.get(new.index, 0) + len(new.token_ids)
            if new.token_ids or new.text:
                part = ChatChunkChoice(new.index, Delta(content=new.text), self._logprobs(new))
                if self.request.return_token_ids:
                    part.token_ids = new.token_ids
                events.append(self._event(part))
            if new.finish_reason is not None:
                end = ChatChunkChoice(new.index, Delta(), None, new.finish_reason, new.stop_reason)
                events.append(self._event(end))
        return events

    def usage_event(self) -> ChatChunk:
        return self._chunk([], self.count.total())

    def _event(self, choice: ChatChunkChoice, prompt_token_ids: list[int] | UnsetType = UNSET) -> ChatChunk:
        chunk = self._chunk([choice], self.count.in_event(0, choice.index))
        chunk.prompt_token_ids = prompt_token_ids
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(self.generation.response_id, self.created, self.generation.model, choices, usage=usage)

    def _logprobs(self, new: CompletionOutput) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(new.token_ids, new.logprobs or [], self.request.top_logprobs or 0, self.names)


def _echoed(request: ChatCompletionRequest) -> str:
    """Return the assistant's last message where `echo` (vLLM's) asks for it: the answer continues that message."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    content = last.content or ""
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
