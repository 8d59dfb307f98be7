"""Answers POST /v1/completions: turns its fields into a Generation, and outputs into OpenAI's completion objects."""

from __future__ import annotations

import dataclasses
import time

from msgspec import UnsetType
from starlette.requests import Request

from headrace.request import CompletionOutput, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from headrace.server.constraints import constraint_of, is_constrained
from headrace.server.generation import Generation, GenerationResponse, UsageCount
from headrace.server.logprobs import TokenNames, completion_logprobs, joined, prompt_logprobs
from headrace.server.protocol import CompletionRequest
from headrace.server.replies import OPENAI
from headrace.server.requests import (
    answer_headers,
    beam_params,
    check_choices,
    check_common,
    check_copies,
    parse_prompts,
    receive,
    sampling_params,
)
from headrace.server.serving import Serving, new_id

DEFAULT_MAX_TOKENS = 16


async def answer_completion(serving: Serving, http: Request) -> GenerationResponse:
    """Read a request, and return the response that will run it. Raises RequestError for an invalid one."""
    received = await receive(serving, http, CompletionRequest)
    request = received.fields
    generation = await serving.work(
        http, received.size, lambda: _plan(serving, request), makes_grammar=is_constrained(request)
    )
    headers = answer_headers(serving, http, request.request_id, generation, received.ignored)
    answer = CompletionAnswer(serving, request, generation)
    return GenerationResponse(serving, generation, answer, bool(request.stream), headers)


def _plan(serving: Serving, request: CompletionRequest) -> Generation:
    model = serving.resolve_model(request.model)
    check_common(request)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.echo and max_tokens == 0:
        max_tokens = 1  # an echo of the prompt alone; its one token is dropped
    prompts = parse_prompts(request.prompt)
    check_choices(prompts, request.n)
    for_prompt = [k for k in (request.prompt_logprobs, request.logprobs if request.echo else None) if k is not None]
    params = sampling_params(
        request,
        serving.engine.default_sampling,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=max(for_prompt, default=None),
        detokenize=serving.engine.tokenizer is not None,
    )
    check_copies(params, len(prompts) * params.n)
    found = constraint_of(serving, request)
    grammar = "" if found is None else found.to_text()
    return Generation(
        response_id=new_id("cmpl"),
        model=model,
        prompts=prompts,
        params=params,
        add_special_tokens=request.add_special_tokens is not False,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        grammar=grammar,
        lora_request=serving.adapter_of(model),
        beams=beam_params(request, params, grammar),
    )


@dataclasses.dataclass(frozen=True)
class Echo:
    """Holds a prompt as the answer repeats it."""

    text: str = ""
    logprobs: CompletionLogprobs | None = None


class CompletionAnswer:
    """Implements generation.Answer for completions."""

    wire = OPENAI
    parses = False

    def __init__(self, serving: Serving, request: CompletionRequest, generation: Generation) -> None:
        tokenizer = serving.engine.tokenizer
        self.serving = serving
        self.request = request
        self.generation = generation
        self.names = TokenNames(bool(request.return_tokens_as_token_ids) or tokenizer is None)
        self.params: SamplingParams = generation.params
        self.echo_alone = bool(request.echo) and request.max_tokens == 0
        self.echo_logprobs = bool(request.echo) and request.logprobs is not None
        self.created = int(time.time())
        self.count = UsageCount(request.stream_options)
        self.echoes: dict[int, Echo] = {}
        """Prompt index -> its echo."""
        self.waiting: dict[int, list[RequestOutput]] = {}
        """Prompt index -> outputs that wait until the echo has its logprobs."""
        self.text_offsets: dict[int, int] = {}
        """Choice that has begun -> where in its text the next token begins."""

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        choices: list[CompletionChoice] = []
        for prompt_index, output in enumerate(outputs):
            self.count.add(prompt_index, output)
            echo = self._echo(prompt_index, output)
            for new in output.outputs:
                choice = self._choice(prompt_index * self.params.n + new.index, new, echo, len(echo.text))
                if self.request.prompt_logprobs is not None and output.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                if self.request.return_token_ids:
                    choice.prompt_token_ids = output.prompt_token_ids
                choices.append(choice)
        return self._completion(choices, self.count.total())

    def events(self, prompt_index: int, output: RequestOutput) -> list[Completion]:
        self.count.add(prompt_index, output)
        waiting = self.waiting.setdefault(prompt_index, [])
        waiting.append(output)
        if prompt_index not in self.echoes:
            if self.echo_logprobs and output.prompt_logprobs is None:
                return []  # another choice was faster than the one that scores the prompt
            self.echoes[prompt_index] = self._echo(prompt_index, output)
        self.waiting[prompt_index] = []
        return [self._event(prompt_index, one, new) for one in waiting for new in one.outputs]

    def _event(self, prompt_index: int, output: RequestOutput, new: CompletionOutput) -> Completion:
        index = prompt_index * self.params.n + new.index
        first = index not in self.text_offsets
        echo = self.echoes[prompt_index] if first else Echo()
        choice = self._choice(index, new, echo, len(echo.text) if first else self.text_offsets[index])
        logprobs = choice.logprobs
        self.text_offsets.setdefault(index, len(echo.text))
        if logprobs is not None and logprobs.tokens:
            self.text_offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        if self.request.return_token_ids and first:
            choice.prompt_token_ids = output.prompt_token_ids
        return self._completion([choice], self.count.in_event(prompt_index, index))

    def last_events(self) -> list[Completion]:
        return [self._completion([], self.count.total())] if self.count.wanted else []

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.generation.response_id, self.created, self.generation.model, choices, usage=usage)

    def _choice(self, index: int, new: CompletionOutput, echo: Echo, offset: int) -> CompletionChoice:
        """Return a choice of an answer. `offset`: where in the choice's text the new tokens begin."""
        if self.echo_alone:
            reason = None if new.finish_reason is None else "length"
            new = dataclasses.replace(new, text="", token_ids=[], logprobs=[], finish_reason=reason, stop_reason=None)
        self.count.add_tokens(index, new.token_ids)
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = completion_logprobs(new.token_ids, new.logprobs or [], offset, self.names)
            logprobs = logprobs if echo.logprobs is None else joined(echo.logprobs, logprobs)
        choice = CompletionChoice(index, echo.text + new.text, logprobs, new.finish_reason, new.stop_reason)
        if self.request.return_token_ids:
            choice.token_ids = new.token_ids
        return choice

    def _echo(self, prompt_index: int, output: RequestOutput) -> Echo:
        if not self.request.echo:
            return Echo()
        prompt, tokenizer = self.generation.prompts[prompt_index], self.serving.engine.tokenizer
        if isinstance(prompt, str):
            text = prompt
        elif tokenizer is None:
            text = ""
        else:
            text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=self.params.skip_special_tokens)
        if not self.echo_logprobs:
            return Echo(text)
        first_text = None if tokenizer is None else tokenizer.token_text
        entries = output.prompt_logprobs or []
        logprobs = completion_logprobs(output.prompt_token_ids, entries, 0, self.names, first_text)
        # The tokens may hold more than the text, and do so at its beginning: <s>, and the space before the first word.
        excess = logprobs.text_offset[-1] + len(logprobs.tokens[-1]) - len(text)
        logprobs.text_offset = [max(0, offset - max(0, excess)) for offset in logprobs.text_offset]
        return Echo(text, logprobs)
