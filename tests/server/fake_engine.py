"""An engine of scripted tokens behind AsyncEngine's interface, and what the server's tests share.

Prompts are checked by the real input processor, and tokens become text in the real detokenizer; every answer is the
engine's `text`, cut to max_tokens. No core, no executor.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from llguidance import LLMatcher
from starlette.applications import Starlette

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.input_processor import InputProcessor, ModelLimits
from headrace.engine.metrics import EngineMetrics
from headrace.engine.queue_bound import QueueBound, Reservation
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import EngineDeadError, HeadraceError
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.request import CompletionOutput, Logprob, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.app import build_app
from headrace.structured_outputs.vocabulary import vocabulary
from tests.engine import fakes

TEXT = "Once upon a time there was a wheel."
MODEL = "tiny"
MAX_MODEL_LEN = 256
EOS = 2


@cache
def byte_level_tokenizer() -> Tokenizer:
    """One token a byte."""
    return make_tokenizer()


def make_tokenizer(template: str | None = None, special: tuple[str, ...] = ()) -> Tokenizer:
    """One token a byte, and one for each special text."""
    with tempfile.TemporaryDirectory() as folder:
        path = fakes.model_folder(Path(folder))
        backend = fakes.byte_tokenizer()
        backend.add_special_tokens(list(special))
        backend.save(str(path / "tokenizer.json"))
        return Tokenizer.from_folder(path, template)


class FakeEngine:
    """`delay`: seconds before each token. `fail_at`: the token before which `error` is raised in every request. `text`:
    what the model says."""

    def __init__(
        self, *, with_tokenizer: bool = True, text: str = TEXT, tokenizer: Tokenizer | None = None,
        max_model_len: int = MAX_MODEL_LEN, **config: Any,
    ) -> None:  # fmt: skip
        self.config = EngineConfig(model=MODEL, **config)
        self.tokenizer = (tokenizer or byte_level_tokenizer()) if with_tokenizer else None
        self.text = text
        self.model_config = ModelConfig.from_dict(fakes.MODEL_CONFIG)
        self.max_model_len = max_model_len
        self.vocab_size = fakes.VOCAB_SIZE
        self.default_sampling: dict[str, Any] = {}
        self.metrics = EngineMetrics(MODEL, max_model_len, {})
        self.queue = QueueBound(self.config, [self.metrics])
        self.decisions: list[Any] = []
        self.expected: Any = None
        self.memory: Any = None
        self.kv_cache_tokens = 4096
        self.delay = 0.0
        self.cached = 0
        self.tokens_a_step = 1
        self.random_steps: random.Random | None = None
        """Steps bring 1 to 16 tokens at random."""
        self.num_engines = 1
        self.fail_at: int | None = None
        self.error: Exception = EngineDeadError("the engine core died")
        self.dead = False
        self.special = True
        """what prompts were last prepared with"""
        self.prompts: dict[tuple[int, ...], str | list[int]] = {}
        self.requests: list[dict[str, Any]] = []
        self.adapters: list[LoRARequest | None] = []
        self.active: set[str] = set()
        self.aborted: list[str] = []
        self.limits = ModelLimits(self.vocab_size, max_model_len, (EOS,))
        self.inputs = InputProcessor(self.limits, self.config, self.tokenizer)

    def check_health(self) -> None:
        if self.dead:
            raise self.error

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.inputs.tokenize(text, add_special_tokens)

    async def prepare(
        self, prompts: list[str | list[int]], params: SamplingParams, add_special_tokens: bool = True
    ) -> list[list[int]]:
        if self.dead:
            raise self.error
        self.special = add_special_tokens
        ids = [self.inputs.prepare(prompt, params, add_special_tokens) for prompt in prompts]
        self.prompts |= {tuple(found): prompt for found, prompt in zip(ids, prompts, strict=True)}
        self.inputs.check_together(sum(map(len, ids)), params)
        return ids

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: str = "delta",
        kept: AbstractSet[int] = frozenset(),
        client: str = "",
        reservation: Reservation | None = None,
        grammar: str | None = None,
        pools: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
        """One increment of each prompt in turn."""
        self.adapters.append(lora_request)
        if self.dead:
            raise self.error
        streams = {}
        try:
            for index, ids in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
                max_tokens = self.inputs.process(name, ids, params, arrival_time=0.0, priority=priority,
                                                 cache_salt=cache_salt, grammar=grammar)[0].max_tokens  # fmt: skip
                prompt = self.prompts.get(tuple(ids), ids)
                self.requests.append({"id": name, "prompt": prompt, "ids": ids, "params": params,
                                      "salt": cache_salt, "priority": priority, "special": self.special,
                                      "client": client, "parent": request_id, "grammar": grammar,
                                      "kept": kept})  # fmt: skip
                self.active.add(name)
                self.queue.sent(params.n, params.n * len(ids), reservation)
                self.metrics.stats.num_received += params.n  # and none of it waits
                self.metrics.stats.num_received_tokens += params.n * len(ids)
                streams[index] = name, self._say(ids, params, max_tokens, output_kind, kept)
            while streams:
                batch = []
                for index, (name, stream) in list(streams.items()):
                    batch.append((index, await anext(stream)))
                    if batch[-1][1].finished:
                        self.active.discard(name)
                        del streams[index]
                yield batch
        except HeadraceError:
            self.active -= {name for name, _ in streams.values()}
            raise
        finally:
            left = [name for name, _ in streams.values() if name in self.active]
            self.active.difference_update(left)
            self.aborted += left

    async def _say(
        self, ids: list[int], params: SamplingParams, max_tokens: int, output_kind: str, kept: AbstractSet[int]
    ) -> AsyncIterator[RequestOutput]:
        script = byte_level_tokenizer().encode(self.text) if self.tokenizer is None else self.tokenizer.encode(
            self.text, add_special_tokens=False)  # fmt: skip
        if params.ignore_eos:
            script = (script * (max_tokens // len(script) + 1))[:max_tokens]
        said, reason = script[:max_tokens], "length" if len(script) >= max_tokens else "stop"
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, ids, params, kept)
        start, stop = 0, None
        while start < len(said) and stop is None:
            step = self._step(output_kind, len(said))
            if self.delay:
                await asyncio.sleep(self.delay * (1 if output_kind == "delta" else len(said)))
            if self.fail_at is not None and start + step > self.fail_at:
                raise self.error
            now, text = said[start : start + step], ""
            last = start + step >= len(said)
            if detokenizer is not None:
                text, num_kept, stop = detokenizer.append(now)
                now, last = now[:num_kept], last or stop is not None
                text += detokenizer.finish() if last and stop is None else ""
            choices = [
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=now,
                    logprobs=None if params.logprobs is None else [self._logprob(t, params.logprobs) for t in now],
                    finish_reason=("stop" if stop is not None else reason) if last else None,
                    stop_reason=stop,
                )
                for index in range(params.n)
            ]
            scored = None
            if params.prompt_logprobs is not None and start == 0:
                scored = [None, *(self._logprob(t, params.prompt_logprobs) for t in ids[1:])]
            yield RequestOutput("", None, ids, choices, last, prompt_logprobs=scored, num_cached_tokens=self.cached)
            start += step

    def _step(self, output_kind: str, whole: int) -> int:
        if output_kind == "final":
            return whole
        return self.tokens_a_step if self.random_steps is None else self.random_steps.randint(1, 16)

    def _logprob(self, token_id: int, k: int) -> dict[int, Logprob]:
        """The token itself is the second best of all: rank 2."""
        others = [(token_id + 1 + i) % 250 + 3 for i in range(k)]
        text = (lambda t: None) if self.tokenizer is None else self.tokenizer.token_text
        entry = {token_id: Logprob(-1.0, 2, text(token_id))}
        for rank, other in enumerate(others, 1):
            entry.setdefault(other, Logprob(-0.5 if rank == 1 else -1.0 - rank, rank, text(other)))
        return entry


def accepts(engine: FakeEngine, grammar: str, text: str) -> bool:
    """Whether a whole answer may be this text."""
    assert engine.tokenizer is not None
    matcher = LLMatcher(vocabulary(engine.tokenizer, engine.vocab_size, (EOS,)), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def make_app(engine: FakeEngine | None = None, **server: Any) -> Starlette:
    return build_app(engine or FakeEngine(), ServerConfig(**server), [MODEL, "alias"])  # type: ignore[arg-type]


def send(app: Starlette, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, in this process."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(go())


def post(app: Starlette, path: str, body: Any, **request: Any) -> httpx.Response:
    return send(app, "POST", path, json=body, **request)


def complete(app: Starlette, **fields: Any) -> httpx.Response:
    return post(app, "/v1/completions", {"prompt": "Hello", **fields})


def chat(app: Starlette, **fields: Any) -> httpx.Response:
    return post(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **fields})


def events(response: httpx.Response) -> list[Any]:
    """What a stream said; the string `[DONE]` if that is its end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    found = []
    for part in parts[:-1]:
        assert part.startswith("data: ")
        data = part.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """What a stream said whose events have names: each says its own as its type."""
    found = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The OpenAI error object, its shape checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert len(body["error"]["message"]) < 1000
    return body["error"]
