"""Runs one request on the engine and writes its answer, whole or as server-sent events, straight to ASGI.

Knows nothing of the shapes: an `Answer` turns the engine's outputs into bytes. A client that leaves aborts its
requests at once; an error before the first byte has its own status, a later one becomes one event and no [DONE].
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Literal, Protocol, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError, ServerStoppingError
from headrace.request import CompletionOutput, RequestOutput
from headrace.server.auth import CLIENT
from headrace.server.protocol import PromptTokensDetails, Usage
from headrace.server.replies import error_body, error_headers
from headrace.server.requests import Generation
from headrace.server.serving import Serving

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """One API's way of writing what the engine said."""

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """`outputs`: one finished output a prompt."""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Server-sent events for one increment; none if they have to wait for a later one."""

    def last_events(self) -> bytes:
        """What follows the last increment, before [DONE]."""


@dataclasses.dataclass
class UsageCount:
    """Token counts of a streamed answer, as they grow."""

    prompt_tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    cached_tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    completion_tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    """by choice index"""

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self.prompt_tokens:
            self.prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        if output.num_cached_tokens:
            self.cached_tokens[prompt_index] = output.num_cached_tokens

    def of_choice(self, prompt_index: int, choice: int) -> Usage:
        """For continuous_usage_stats: what this choice has used so far."""
        prompt, completion = self.prompt_tokens[prompt_index], self.completion_tokens.get(choice, 0)
        return Usage(prompt, completion, prompt + completion)

    def total(self) -> Usage:
        prompt, completion = sum(self.prompt_tokens.values()), sum(self.completion_tokens.values())
        cached = PromptTokensDetails(sum(self.cached_tokens.values()))
        return Usage(prompt, completion, prompt + completion, cached)


class GenerationResponse(Response):
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
            await self._send_json(send, *error_body(ServerStoppingError()))
            return
        self.client = scope.get(CLIENT, "")
        await self.serving.until_disconnect(receive, self._stream(send) if self.stream else self._whole(send))

    async def _whole(self, send: Send) -> None:
        try:
            outputs, write = await self._collect(), self.answer.whole
            status, body = 200, await asyncio.to_thread(write, outputs) if self._scores else write(outputs)
        except asyncio.CancelledError:
            if not self.serving.stopping:
                raise
            status, body = error_body(ServerStoppingError())
        except Exception as error:
            status, body = error_body(error)
            self.extra_headers += _encoded(error_headers(error))
        await self._send_json(send, status, body)

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
            last = self.answer.last_events() + DONE
        except asyncio.CancelledError:
            if not self.serving.stopping:
                raise
            status, last = error_body(ServerStoppingError())
            last = b"data: " + last + b"\n\n" if started else last
        except Exception as error:
            status, last = error_body(error)
            self.extra_headers += _encoded(error_headers(error))
            last = b"data: " + last + b"\n\n" if started else last
        if started:
            await send({"type": "http.response.body", "body": last, "more_body": False})
        else:
            await self._send_json(send, status, last)

    @property
    def _scores(self) -> bool:
        """There may be a million logprobs: a thread writes them, so that others' tokens go on."""
        params = self.generation.params
        return params.logprobs is not None or params.prompt_logprobs is not None

    def _events(self, batch: list[tuple[int, RequestOutput]]) -> bytes:
        return b"".join([self.answer.events(index, output) for index, output in batch])

    async def _send_json(self, send: Send, status: int, body: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers + self.extra_headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _collect(self) -> list[RequestOutput]:
        """One output a prompt, with all of its choices."""
        latest: dict[int, RequestOutput] = {}
        choices: dict[int, dict[int, CompletionOutput]] = {}
        async with aclosing(self._run("final")) as increments:
            async for batch in increments:
                for index, output in batch:
                    before = latest.get(index)
                    if before is not None and output.prompt_logprobs is None:
                        output.prompt_logprobs = before.prompt_logprobs
                    latest[index] = output
                    choices.setdefault(index, {}).update({choice.index: choice for choice in output.outputs})
        return [
            dataclasses.replace(latest[index], outputs=[choices[index][i] for i in sorted(choices[index])])
            for index in range(len(self.generation.prompts))
        ]

    async def _run(
        self, output_kind: Literal["delta", "final"]
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """Raises RequestError, or QueueFullError, before anything runs where one of the prompts cannot."""
        generation, engine = self.generation, self.serving.engine
        params, response_id = generation.params, generation.response_id
        prompts = await engine.prepare(generation.prompts, params, generation.add_special_tokens)
        several = len(prompts) > 1
        with engine.queue.reserve(len(prompts) * params.n, sum(map(len, prompts)) * params.n) as reservation:
            streams = [
                engine.generate(
                    prompt,
                    params,
                    f"{response_id}-{index}" if several else response_id,
                    priority=generation.priority,
                    cache_salt=generation.cache_salt,
                    output_kind=output_kind,
                    client=self.client,
                    parent=response_id,
                    reservation=reservation,
                )
                for index, prompt in enumerate(prompts)
            ]
            async with aclosing(_merge(streams)) as batches:
                async for batch in batches:
                    yield batch


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _merge(
    streams: list[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """What the streams say, in batches of all that is there. The first error ends them all."""
    if len(streams) == 1:
        async with aclosing(cast("AsyncGenerator[RequestOutput, None]", streams[0])) as stream:
            async for output in stream:
                yield [(0, output)]
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=2 * len(streams))

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(cast("AsyncGenerator[RequestOutput, None]", stream)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    tasks: list[asyncio.Task[None]] = []
    running = len(streams)
    try:
        for index, started in enumerate(streams):
            tasks.append(asyncio.create_task(pump(index, started)))
            await asyncio.sleep(0)  # it checks and sends its prompt, which may be long: one in each turn of the loop
        while running:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            batch = [(index, item) for index, item in items if isinstance(item, RequestOutput)]
            if batch:
                yield batch
            for _, item in items:
                if isinstance(item, Exception):
                    raise item
                running -= item is None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
