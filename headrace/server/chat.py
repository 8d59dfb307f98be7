"""Answers POST /v1/chat/completions: turns messages into a Generation, and outputs into chat completion objects."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from headrace.errors import RequestError
from headrace.request import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import MAX_LOGPROBS, SamplingParams, check_integer
from headrace.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Usage,
)
from headrace.server.chat_grammar import bounds_thoughts, chat_grammar
from headrace.server.chat_parsing import ChoiceParser, Parsing, deltas_of, message_of, read_new
from headrace.server.chat_prompt import (
    RENDERED_INLINE_BYTES,
    is_slow_to_render,
    message_text,
    reasoning_open,
    render_prompt,
    unread_fields,
)
from headrace.server.constraints import is_constrained
from headrace.server.generation import Generation, GenerationResponse, ReasoningCount, UsageCount
from headrace.server.logprobs import TextLogprobs, TokenNames, chat_logprobs, prompt_logprobs
from headrace.server.output_formats import WITHOUT_FORMAT
from headrace.server.protocol import ChatCompletionRequest
from headrace.server.replies import OPENAI
from headrace.server.requests import (
    answer_headers,
    beam_params,
    check_choices,
    check_common,
    check_copies,
    receive,
    sampling_params,
)
from headrace.server.serving import Serving, new_id
from headrace.server.tool_use import ToolUse, may_hold_calls, read_tool_use


@dataclass(frozen=True)
class ChatPlan:
    """Holds what a request asks of the engine, and how its answer is read."""

    generation: Generation
    parsing: Parsing | None
    ignored: list[str]
    """Fields that have no effect."""


async def answer_chat(serving: Serving, http: Request) -> GenerationResponse:
    """Read a request, and return the response that will run it. Raises RequestError for an invalid one."""
    received = await receive(serving, http, ChatCompletionRequest)
    request = received.fields
    plan = await plan_chat(serving, http, request, received.size, "chatcmpl")
    headers = answer_headers(serving, http, request.request_id, plan.generation, [*received.ignored, *plan.ignored])
    answer = ChatAnswer(serving, request, plan)
    return GenerationResponse(serving, plan.generation, answer, bool(request.stream), headers)


async def plan_chat(
    serving: Serving, http: Request, request: ChatCompletionRequest, size: int, id_prefix: str
) -> ChatPlan:
    """Return what a request asks of the engine; answers' ids begin with `id_prefix`. `size`: bytes of its body. Raises
    RequestError for an invalid one."""
    most = 0 if is_slow_to_render(request) else RENDERED_INLINE_BYTES
    makes_grammar = is_constrained(request) or may_hold_calls(request)
    return await serving.work(http, size, lambda: _plan(serving, request, id_prefix), most, makes_grammar)


def _plan(serving: Serving, request: ChatCompletionRequest, id_prefix: str) -> ChatPlan:
    model = serving.resolve_model(request.model)
    check_common(request)
    params = _params(serving, request)
    use = read_tool_use(request)
    rendered = render_prompt(serving, request, None if use is None else use.shown)
    form = serving.formats.reasoning
    opened = form is not None and reasoning_open(rendered, form, request)
    parsing = _parsing(serving, request, use, opened)
    grammar = chat_grammar(serving, request, use, rendered, opened)
    generation = Generation(
        response_id=new_id(id_prefix),
        model=model,
        prompts=[rendered.text],
        params=params,
        add_special_tokens=bool(request.add_special_tokens),  # the template has written them
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        grammar=grammar,
        beams=beam_params(request, params, grammar),
        lora_request=serving.adapter_of(model),
        kept=frozenset() if parsing is None else serving.formats.kept,
    )
    # Of a model whose calls nothing finds, they stay text.
    unfound = ["tools"] if use is not None and (parsing is None or parsing.tool is None) else []
    if request.thinking_token_budget is not None and not bounds_thoughts(serving):
        unfound.append("thinking_token_budget")
    return ChatPlan(generation, parsing, [*unfound, *unread_fields(request, rendered.template)])


def _params(serving: Serving, request: ChatCompletionRequest) -> SamplingParams:
    for name, low, high in (("max_tokens", 1, 2**31 - 1), ("max_completion_tokens", 1, 2**31 - 1),
                            ("top_logprobs", 0, MAX_LOGPROBS), ("thinking_token_budget", 0, 2**31 - 1)):  # fmt: skip
        if (value := getattr(request, name)) is not None:
            check_integer(name, value, low, high)
    if request.top_logprobs and not request.logprobs:
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
    return params


def _parsing(serving: Serving, request: ChatCompletionRequest, use: ToolUse | None, opened: bool) -> Parsing | None:
    """Return how the answer is read; None if it is content and nothing else."""
    formats = serving.formats
    tool = None if use is None else formats.tool or (WITHOUT_FORMAT if use.forced else None)
    reasoning = None if request.separate_reasoning is False else formats.reasoning
    if tool is None and reasoning is None:
        return None
    return Parsing(
        tool,
        reasoning,
        opened,
        () if use is None else use.tools,
        named=use is not None and use.named is not None,
        parallel=use is None or use.parallel,
        include_reasoning=request.include_reasoning is not False,
        stream_reasoning=request.stream_reasoning is not False,
        calls_before=sum(len(message.tool_calls or ()) for message in request.messages),
    )


def reasoning_count(serving: Serving, parsing: Parsing | None) -> ReasoningCount | None:
    """Return a count of the tokens of an answer's reasoning; None if they cannot be told apart."""
    tokenizer = serving.engine.tokenizer
    if parsing is None or parsing.reasoning is None or tokenizer is None:
        return None
    return ReasoningCount.of(tokenizer, parsing.reasoning, parsing.reasoning_open)


def text_logprobs(serving: Serving, k: int) -> TextLogprobs:
    """Return what finds the logprobs of an answer's texts, with those of the k best tokens for each of theirs."""
    tokenizer = serving.engine.tokenizer
    if tokenizer is None:
        return TextLogprobs(k, TokenNames(False), frozenset())
    markup = tokenizer.special_ids.union(tokenizer.marks.values())
    return TextLogprobs(k, TokenNames(False, tokenizer.token_bytes), markup)


@dataclass
class _OpenChoice:
    """Holds a choice of a stream that is parsed, and what was not sent yet of tokens that have decided nothing."""

    parser: ChoiceParser
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


class ChatAnswer:
    """Implements generation.Answer for chat completions."""

    wire = OPENAI

    def __init__(self, serving: Serving, request: ChatCompletionRequest, plan: ChatPlan) -> None:
        tokenizer = serving.engine.tokenizer
        self.request = request
        self.generation = plan.generation
        self.parsing = plan.parsing
        self.names = TokenNames(
            bool(request.return_tokens_as_token_ids), None if tokenizer is None else tokenizer.token_bytes
        )
        self.created = int(time.time())
        self.count = UsageCount(request.stream_options)
        self.count.reasoning = reasoning_count(serving, plan.parsing)
        self.begun: set[int] = set()
        self.open: dict[int, _OpenChoice] = {}
        self.echoed = _echoed(request)
        request.messages = []  # the prompt holds their text, so they need no memory while the answer is made

    @property
    def parses(self) -> bool:
        """Return whether text is read for reasoning and calls."""
        return self.parsing is not None

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        output = outputs[0]
        self.count.add(0, output)
        choices = []
        for new in output.outputs:
            self.count.add_tokens(new.index, new.token_ids)
            message, finish_reason = self._message(new)
            choice = ChatChoice(
                new.index,
                message,
                self._logprobs(new.token_ids, new.logprobs),
                finish_reason,
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
            self.count.add_tokens(new.index, new.token_ids)
            parts = self._plain(new) if self.parsing is None else self._parsed(new, self.parsing)
            events += map(self._event, parts)
        return events

    def last_events(self) -> list[ChatChunk]:
        return [self._chunk([], self.count.total())] if self.count.wanted else []

    def _message(self, new: CompletionOutput) -> tuple[AssistantMessage, str | None]:
        """Return the message of a whole choice, and how it ended."""
        if self.parsing is None:
            return AssistantMessage(self.echoed + new.text), new.finish_reason
        parser, reason = ChoiceParser(self.parsing), new.finish_reason or "stop"
        found = [*parser.feed(new.text), *parser.finish(reason, new.stop_reason)]
        message = message_of(found, self.parsing.reasoning is not None)
        if self.echoed:
            message.content = self.echoed + (message.content or "")
        return message, parser.finish_reason(reason)

    def _plain(self, new: CompletionOutput) -> list[ChatChunkChoice]:
        """Return the chunks for an increment of a choice that is all content."""
        parts = []
        if new.token_ids or new.text:
            part = ChatChunkChoice(new.index, Delta(content=new.text), self._logprobs(new.token_ids, new.logprobs))
            if self.request.return_token_ids:
                part.token_ids = new.token_ids
            parts.append(part)
        if new.finish_reason is not None:
            parts.append(ChatChunkChoice(new.index, Delta(), None, new.finish_reason, new.stop_reason))
        return parts

    def _parsed(self, new: CompletionOutput, parsing: Parsing) -> list[ChatChunkChoice]:
        """Return the chunks for an increment of a choice: one for each part of the answer, and one for its end. Token
        ids and logprobs go with the first; those of tokens that decide nothing yet go with a later one."""
        choice = self.open.get(new.index)
        if choice is None:
            choice = self.open[new.index] = _OpenChoice(ChoiceParser(parsing))
        choice.token_ids += new.token_ids
        choice.logprobs += new.logprobs or ()
        parts = [ChatChunkChoice(new.index, delta) for delta in deltas_of(read_new(choice.parser, new))]
        if new.finish_reason is not None:
            reason = choice.parser.finish_reason(new.finish_reason)
            parts.append(ChatChunkChoice(new.index, Delta(), None, reason, new.stop_reason))
        if parts:
            parts[0].logprobs = self._logprobs(choice.token_ids, choice.logprobs)
            if self.request.return_token_ids:
                parts[0].token_ids = choice.token_ids
            choice.token_ids, choice.logprobs = [], []
        return parts

    def _event(self, choice: ChatChunkChoice, prompt_token_ids: list[int] | UnsetType = UNSET) -> ChatChunk:
        chunk = self._chunk([choice], self.count.in_event(0, choice.index))
        chunk.prompt_token_ids = prompt_token_ids
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(self.generation.response_id, self.created, self.generation.model, choices, usage=usage)

    def _logprobs(self, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(token_ids, logprobs or [], self.request.top_logprobs or 0, self.names)


def _echoed(request: ChatCompletionRequest) -> str:
    """Return the assistant's last message where `echo` (vLLM's) asks for it: the answer continues that message."""
    last = request.messages[-1]
    return message_text(last) if request.echo and last.role == "assistant" else ""
