"""Runs one HTTP request on the engine, and sends its answer, whole or as server-sent events.

An `Answer` converts the engine's outputs to the shapes of an API; none is known here. If the client disconnects, its
requests are aborted at once. An error before the first byte has its own HTTP status; a later one becomes one event,
after which nothing follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType, structs
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.engine.beam_search import BeamSearch, BeamSearchParams, beam_output, likely_next
from headrace.engine.output_processor import OutputKind
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import HeadraceError, ServerStoppingError
from headrace.parsers.formats import ReasoningFormat
from headrace.request import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from headrace.server.auth import CLIENT
from headrace.server.protocol import StreamOptions
from headrace.server.replies import Wire, encoder, error_headers, error_of
from headrace.server.requests import Generation
from headrace.server.serving import Serving, new_id

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx would hold events back
]
PARSED_INLINE_CHARS = 2**14
"""Longer texts are parsed in a thread, so that other streams go on."""
POOLED_INLINE_BYTES = 2**15
"""So are more numbers of a model that pools written."""


class Answer(Protocol):
    """Converts the engine's outputs to the shapes of one API."""

    wire: Wire

    @property
    def parses(self) -> bool:
        """Return whether text is read for reasoning and calls, which takes time."""

    def whole(self, outputs: list[RequestOutput]) -> Struct:
        """Return the whole answer. `outputs`: one finished output for each prompt."""

    def events(self, prompt_index: int, output: RequestOutput) -> Sequence[Struct]:
        """Return the events for one increment; none if they have to wait for a later one."""

    def last_events(self) -> Sequence[Struct]:
        """Return the events that follow those of the last increment."""


class ReasoningCount:
    """Counts the tokens of reasoning, which stand between those that open and close it."""

    def __init__(self, opens: frozenset[int], closes: frozenset[int], begins_open: bool) -> None:
        self.tokens = 0
        self._opens = opens
        self._closes = closes
        self._begins_open = begins_open
        self._open: dict[int, bool] = {}
        """Choice index -> whether it is within reasoning."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: ReasoningFormat, opened: bool) -> ReasoningCount | None:
        """Return a count for a format; None if its end is no token of its own. `opened`: answers begin within it."""
        find = tokenizer.backend.token_to_id
        opens = frozenset(found for text in form.open if (found := find(text.strip())) is not None)
        closes = frozenset(found for text in form.close if (found := find(text.strip())) is not None)
        return cls(opens, closes, opened) if closes else None

    def add(self, choice: int, token_ids: list[int]) -> None:
        """Count further tokens of a choice."""
        is_open = self._open.get(choice, self._begins_open)
        for token_id in token_ids:
            if token_id in self._closes:
                is_open = False
            elif token_id in self._opens:
                is_open = True
            elif is_open:
                self.tokens += 1
        self._open[choice] = is_open


class UsageCount:
    """Counts the tokens of an answer as they come."""

    def __init__(self, options: StreamOptions | None) -> None:
        """`options`: whether a stream reports usage, and whether in every event."""
        self.wanted = options is not None and bool(options.include_usage)
        """Whether a stream ends with an event that has the usage."""
        self.completion_tokens: dict[int, int] = {}
        """Choice index -> tokens."""
        self._continuous = self.wanted and options is not None and bool(options.continuous_usage_stats)
        self.prompt_tokens: dict[int, int] = {}
        self.cached_tokens: dict[int, int] = {}
        self.reasoning: ReasoningCount | None = None
        """Set by an answer whose reasoning can be counted."""

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count the prompt of an output."""
        if prompt_index not in self.prompt_tokens:
            self.prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        if output.num_cached_tokens:
            self.cached_tokens[prompt_index] = output.num_cached_tokens

    def add_tokens(self, choice: int, token_ids: list[int]) -> None:
        """Count further tokens of a choice."""
        self.completion_tokens[choice] = self.completion_tokens.get(choice, 0) + len(token_ids)
        if self.reasoning is not None:
            self.reasoning.add(choice, token_ids)

    def in_event(self, prompt_index: int, choice: int) -> Usage | UnsetType | None:
        """Return the `usage` of an event: with continuous_usage_stats, what its choice has used so far."""
        if not self._continuous:
            return None if self.wanted else UNSET
        prompt, completion = self.prompt_tokens[prompt_index], self.completion_tokens.get(choice, 0)
        return Usage(prompt, completion, prompt + completion)

    def total(self) -> Usage:
        """Return the usage of the whole answer."""
        prompt, completion = sum(self.prompt_tokens.values()), sum(self.completion_tokens.values())
        cached = PromptTokensDetails(sum(self.cached_tokens.values()))
        usage = Usage(prompt, completion, prompt + completion, cached)
        if self.reasoning is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self.reasoning.tokens)
        return usage


class GenerationResponse(Response):
    """Runs a request when it is sent: the ASGI response of both generating routes."""

    def __init__(
        self, serving: Serving, generation: Generation, answer: Answer, stream: bool, headers: dict[str, str]
    ) -> None:
        super().__init__()
        self.serving = serving
        self.generation = generation
        self.answer = answer
        self.stream = stream
        self.extra_headers = _encoded(headers)
        self.client = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.serving.stopping:
            await self._send_error(send, ServerStoppingError())
            return
        self.client = scope.get(CLIENT, "")
        await self.serving.until_disconnect(receive, self._stream(send) if self.stream else self._whole(send))

    async def _whole(self, send: Send) -> None:
        try:
            outputs = await self.collect()
            slow = self._is_slow(outputs)
            body = await asyncio.to_thread(self._body, outputs) if slow else self._body(outputs)
        except (asyncio.CancelledError, Exception) as error:
            if self._is_disconnect(error):
                raise
            await self._send_error(send, error)
            return
        await self._send_json(send, 200, body)

    async def _stream(self, send: Send) -> None:
        started, scores = False, self.generation.params.prompt_logprobs is not None
        try:
            async with aclosing(self._run("delta")) as increments:
                async for batch in increments:
                    scored = scores and any(output.prompt_logprobs is not None for _, output in batch)
                    events = await asyncio.to_thread(self._events, batch) if scored else self._events(batch)
                    if not events:
                        continue
                    if not started:
                        started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": SSE_HEADERS + self.extra_headers}
                        )
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            if not started:
                raise HeadraceError("the engine answered nothing")
            last = b"".join(map(self.answer.wire.event, self.answer.last_events())) + self.answer.wire.done
        except (asyncio.CancelledError, Exception) as error:
            if self._is_disconnect(error):
                raise
            if not started:
                await self._send_error(send, error)
                return
            last = self.answer.wire.failed(self._failure(error)[1])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _is_disconnect(self, error: BaseException) -> bool:
        """Return whether nobody waits for an answer. Such an error is raised again where it was caught: a function that
        raises its own argument is held by the error's traceback and holds the error, and so keeps the whole request
        until the garbage collector finds the two, which stalls every stream."""
        return isinstance(error, asyncio.CancelledError) and not self.serving.stopping

    def _failure(self, error: BaseException) -> tuple[int, Struct]:
        """Return status and body for an error."""
        return error_of(ServerStoppingError() if isinstance(error, asyncio.CancelledError) else error, self.answer.wire)

    async def _send_error(self, send: Send, error: BaseException) -> None:
        self.extra_headers += _encoded(error_headers(error))
        status, body = self._failure(error)
        await self._send_json(send, status, encoder.encode(body))

    def _is_slow(self, outputs: list[RequestOutput]) -> bool:
        """Return whether there are logprobs, maybe a million, or a long text to parse: a thread writes such an answer,
        so that other streams go on."""
        params = self.generation.params
        if params.logprobs is not None or params.prompt_logprobs is not None:
            return True
        if sum(len(part.data) for output in outputs for part in output.outputs[0].pooled) > POOLED_INLINE_BYTES:
            return True
        chars = sum(len(choice.text) for output in outputs for choice in output.outputs)
        return self.answer.parses and chars > PARSED_INLINE_CHARS

    def _events(self, batch: list[tuple[int, RequestOutput]]) -> bytes:
        write = self.answer.wire.event
        return b"".join([write(event) for index, output in batch for event in self.answer.events(index, output)])

    def _body(self, outputs: list[RequestOutput]) -> bytes:
        return encoder.encode(self.answer.whole(outputs))

    async def _send_json(self, send: Send, status: int, body: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers + self.extra_headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def collect(self) -> list[RequestOutput]:
        """Return one output for each prompt, with all of its choices."""
        if self.generation.beams is not None:
            return await self._search(self.generation.beams)
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._run("final")) as batches:
            async for batch in batches:
                outputs.update(batch)
        return [outputs[index] for index in range(len(self.generation.prompts))]

    async def _search(self, beams: BeamSearchParams) -> list[RequestOutput]:
        """Return the outputs that a search with beams finds for each prompt."""
        generation, engine = self.generation, self.serving.engine
        prompts = await engine.prepare(generation.prompts, generation.params, generation.add_special_tokens)
        limits = engine.limits
        searches = [
            BeamSearch(ids, replace(beams, max_tokens=min(beams.max_tokens, limits.max_model_len - len(ids))),
                       frozenset(limits.eos_token_ids))
            for ids in prompts
        ]  # fmt: skip
        cached = [0] * len(searches)
        while going := [place for place, search in enumerate(searches) if search.open]:
            of = [place for place in going for _ in searches[place].open]
            opened = [beam.tokens for place in going for beam in searches[place].open]
            found: dict[int, RequestOutput] = {}
            async with aclosing(self._run("final", opened, searches[going[0]].step())) as batches:
                async for batch in batches:
                    found.update(batch)
            for place in going:
                mine = [found[index] for index, owner in enumerate(of) if owner == place]
                cached[place] = cached[place] or mine[0].num_cached_tokens
                searches[place].advance([likely_next(output) for output in mine])
        return [
            beam_output(search, generation.params, engine.tokenizer, count)
            for search, count in zip(searches, cached, strict=True)
        ]

    async def _run(
        self, output_kind: OutputKind, opened: list[list[int]] | None = None, step: SamplingParams | None = None
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Run all prompts, or what a search has `opened` for a `step`; yield batches of (prompt index, output). Raises
        RequestError or QueueFullError before anything runs, if one of the prompts cannot."""
        generation, engine, params = self.generation, self.serving.engine, step or self.generation.params
        prompts = opened or await self._prepared(params)
        if generation.most_tokens is not None:
            longest = min(generation.most_tokens, engine.limits.max_model_len - max(map(len, prompts)))
            params = structs.replace(params, max_tokens=longest)
        with engine.queue.reserve(len(prompts) * params.n, sum(map(len, prompts)) * params.n) as reservation:
            outputs = engine.generate(
                prompts,
                params,
                generation.response_id if step is None else new_id(generation.response_id),
                priority=generation.priority,
                cache_salt=generation.cache_salt,
                output_kind=output_kind,
                kept=generation.kept,
                client=self.client,
                reservation=reservation,
                grammar=generation.grammar,
                pools=generation.pools,
                lora_request=generation.lora_request,
            )
            async with aclosing(outputs) as batches:
                async for batch in batches:
                    yield batch

    async def _prepared(self, params: SamplingParams) -> list[list[int]]:
        generation = self.generation
        if generation.pools:
            return [prompt for prompt in generation.prompts if isinstance(prompt, list)]
        return await self.serving.engine.prepare(generation.prompts, params, generation.add_special_tokens)


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
