"""Offers what `headrace eval` asks its questions: an engine of its own, or a running server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.bench.client import ClientError, HttpClient
from headrace.cli.bench.options import ServeBenchOptions
from headrace.cli.bench.serve import server_facts
from headrace.config import EngineConfig, ServerConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.conversation import render_chat, shown_messages
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.evaluate.session import Model, Reply
from headrace.evaluate.tasks import Message, as_text
from headrace.hub import resolve_tokenizer_folder
from headrace.parsers.output_parser import parse
from headrace.parsers.reasoning import begins_open
from headrace.parsers.table import REASONING_FORMATS
from headrace.request import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.output_formats import AUTO, NONE, OutputFormats, check_parser_names, choose_formats

BUSY = (429, 503)
"""Statuses of a server that can take no more just now."""
BUSY_SECONDS, MOST_BUSY_SECONDS = 0.5, 600.0
ANSWER_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Says how a model is asked."""

    generation: dict[str, Any]
    """Fields of SamplingParams, which are those of a request to a server."""
    chat: bool
    """Through the model's chat template; without, the prompt is plain text."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_parser: str = AUTO
    max_concurrency: int = 256
    max_length: int | None = None
    """Tokens of a window that is scored; None: as many as the model's context has room for."""

    def __post_init__(self) -> None:
        check_parser_names(ServerConfig(reasoning_parser=self.reasoning_parser))

    def window_length(self, max_model_len: int) -> int:
        """Return the length of a window: beside it there is room for the token before it, and the one that a request
        generates. Raises ConfigError for a length that has no room."""
        most = max_model_len - 2
        if self.max_length is not None and self.max_length > most:
            raise ConfigError(f"--max-length must be at most {most} (2 less than the context), got {self.max_length}")
        return self.max_length or most


def prefix_of(tokenizer: Tokenizer | None) -> int:
    """Return the token that stands before a text: BOS, else EOS. Raises ConfigError where there is neither."""
    found = None if tokenizer is None else tokenizer.bos_token_id
    if found is None and tokenizer is not None:
        found = tokenizer.eos_token_id
    if found is None:
        raise ConfigError("perplexity needs a tokenizer that has a BOS or an EOS token")
    return found


class EngineModel:
    """Implements Model with an engine of this command's own."""

    def __init__(self, engine: AsyncEngine, asking: Asking) -> None:
        self.engine, self._asking = engine, asking
        self._gate = asyncio.Semaphore(asking.max_concurrency)
        self._names = itertools.count()
        family = engine.model_config.fields.text("model_type", "")
        parsers = ServerConfig(reasoning_parser=asking.reasoning_parser)
        marked = asking.chat or asking.reasoning_parser != AUTO
        self._formats = choose_formats(parsers, family, engine.tokenizer) if marked else OutputFormats()

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ConfigError("a task needs the model's tokenizer: leave out --skip-tokenizer-init")
        return self.engine.tokenizer

    async def complete(self, conversation: Sequence[Message]) -> Reply:
        prompt, reasoning_open = as_text(conversation), None
        reasoning = self._formats.reasoning
        if self._asking.chat:
            template = self._tokenizer().template_for(with_tools=False)
            kwargs = self._asking.template_kwargs
            prompt = render_chat(template, shown_messages(conversation, template), None, True, kwargs, False)
            if reasoning is not None:
                reasoning_open = begins_open(reasoning, prompt, template.source, kwargs)
        params = SamplingParams(**self._asking.generation)
        choice = (await self._run(prompt, params, not self._asking.chat)).outputs[0]
        if reasoning is None:
            return Reply(choice.text, None, choice.finish_reason)
        cut = choice.finish_reason == "length"
        answer = parse(choice.text, None, reasoning, reasoning_open=reasoning_open, cut=cut)
        return Reply(answer.content or "", answer.reasoning, choice.finish_reason)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer().encode(text, add_special_tokens=False)

    @property
    def prefix_token_id(self) -> int:
        return prefix_of(self.engine.tokenizer)

    @property
    def window_length(self) -> int:
        return self._asking.window_length(self.engine.max_model_len)

    async def score(self, ids: list[int]) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        entries = [*((await self._run(ids, params, False)).prompt_logprobs or ())]
        return [entry[token].logprob for token, entry in zip(ids[1:], entries[1:], strict=True) if entry is not None]

    async def _run(self, prompt: str | list[int], params: SamplingParams, special: bool) -> RequestOutput:
        async with self._gate:
            ids = await self.engine.prepare([prompt], params, special)
            last: RequestOutput | None = None
            name = f"eval-{next(self._names)}"
            kept = self._formats.kept
            async for batch in self.engine.generate(ids, params, name, output_kind="final", kept=kept):
                last = batch[-1][1]
        if last is None:
            raise HeadraceError("the engine ended a request without an output")
        return last


@asynccontextmanager
async def engine_model(config: EngineConfig, asking: Asking) -> AsyncIterator[Model]:
    """Load a model, and yield it; end its engine afterwards."""
    engine = await AsyncEngine.start(config)
    try:
        yield EngineModel(engine, asking)
    finally:
        await engine.shutdown()


class ServerModel:
    """Implements Model with a running server."""

    def __init__(self, client: HttpClient, name: str, length: int | None, tokenizer: Tokenizer | None, asking: Asking):
        """`name`: what requests call the model. `length`: its context, if the server says it. `tokenizer`: for texts
        whose tokens are scored."""
        self.name = name
        self._client, self._length, self._texts, self._asking = client, length, tokenizer, asking
        self._gate = asyncio.Semaphore(asking.max_concurrency)

    async def complete(self, conversation: Sequence[Message]) -> Reply:
        body: dict[str, Any] = {"model": self.name, **self._asking.generation}
        if self._asking.chat:
            body |= {"messages": [*conversation]}
            body |= {"chat_template_kwargs": kwargs} if (kwargs := self._asking.template_kwargs) else {}
            choice = await self._post("/v1/chat/completions", body)
            message: dict[str, Any] = choice["message"]
        else:
            choice = await self._post("/v1/completions", body | {"prompt": as_text(conversation)})
            message = {"content": choice["text"]}
        text, finish_reason = message.get("content") or "", choice.get("finish_reason")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if self._asking.reasoning_parser not in (AUTO, NONE):
            form = REASONING_FORMATS[self._asking.reasoning_parser]
            answer = parse(text, None, form, cut=finish_reason == "length")
            text, reasoning = answer.content or "", answer.reasoning or reasoning
        return Reply(text, reasoning, finish_reason)

    def tokenize(self, text: str) -> list[int]:
        if self._texts is None:
            raise ConfigError("perplexity of a server's model needs --tokenizer: the model's folder or hub id")
        return self._texts.encode(text, add_special_tokens=False)

    @property
    def prefix_token_id(self) -> int:
        return prefix_of(self._texts)

    @property
    def window_length(self) -> int:
        if self._length is None:
            if self._asking.max_length is None:
                raise ConfigError("the server does not say how long its context is: give --max-length")
            return self._asking.max_length
        return self._asking.window_length(self._length)

    async def score(self, ids: list[int]) -> list[float]:
        body = {"model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        choice = await self._post("/v1/completions", body)
        values: list[float] = choice["logprobs"]["token_logprobs"][1 : len(ids)]
        if len(values) != len(ids) - 1:
            raise HeadraceError(f"the server echoes {len(values)} log-probabilities for {len(ids) - 1} tokens")
        return values

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the first choice of the answer, however busy the server is for a while."""
        data = json.dumps(body).encode()
        async with self._gate:
            waited = 0.0
            while True:
                status, answer = await self._client.post(path, data)
                if status not in BUSY or waited >= MOST_BUSY_SECONDS:
                    break
                await asyncio.sleep(BUSY_SECONDS)
                waited += BUSY_SECONDS
        said = " ".join(answer[:300].decode(errors="replace").split())
        if status in (400, 413, 422):
            raise RequestError(f"the server refuses it (HTTP {status}): {said}")
        try:
            choice: dict[str, Any] = json.loads(answer)["choices"][0]
        except (ValueError, LookupError, TypeError):
            raise ClientError(f"{path} answers HTTP {status}: {said}") from None
        return choice


@asynccontextmanager
async def server_model(
    base_url: str, api_key: str | None, name: str | None, tokenizer: str | None, asking: Asking
) -> AsyncIterator[Model]:
    """Find out what a server serves, and yield its model. Raises ClientError where none answers."""
    url = base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    facts = await server_facts(url, headers, ServeBenchOptions(base_url=url, model=name))
    texts = Tokenizer.from_folder(resolve_tokenizer_folder(tokenizer)) if tokenizer else None
    client = HttpClient(url, headers, ANSWER_SECONDS)
    try:
        yield ServerModel(client, facts.model, facts.max_model_len, texts, asking)
    finally:
        client.close()
