"""Turns a prompt and SamplingParams into requests for the engine core, and refuses what the model cannot run.

SamplingParams checks its own values; here are the checks that need the model's limits. Knows nothing of HTTP.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

from headrace.cache_groups import CacheLayout
from headrace.config import EngineConfig
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError, RequestError, quoted
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.pooling import Pooling
from headrace.request import EngineCoreRequest
from headrace.sampling_params import MAX_SEED, SamplingParams
from headrace.structured_outputs.conversion import of_params

NO_TEXT = "this model does not generate text: it makes vectors or scores (--runner pooling)"
NO_POOLING = "this model makes no vectors or scores: it generates text (--runner generate)"
MAX_CHARS_PER_TOKEN = 256
"""Most characters that one token of a plausible vocabulary covers."""
MEASURED_BYTES = 2**16
"""Texts that may be longer in UTF-8 are first tokenized part by part, only to count their tokens."""
MEASURED_CHARS = 2**15
"""Characters of such a part. The library holds Python's lock (GIL) for a time that grows with the tokens."""
MAX_PROMPT_LOGPROBS = 2**20
"""Most logprobs of prompt tokens that one request may ask for: some 70 MB while it runs, and as much JSON."""
MAX_PRIORITY = 2**31 - 1
MAX_CACHE_SALT_CHARS = 256


@dataclass(frozen=True)
class ModelLimits:
    """Holds what the model and the KV cache allow a request."""

    vocab_size: int
    """Rows of the model's embedding; a tokenizer may know fewer or more tokens."""
    max_model_len: int
    """Most tokens of prompt and output together that the model, the user and the KV cache allow."""
    eos_token_ids: tuple[int, ...]
    why: str = ""
    """What bounds max_model_len, if neither the model nor the user does."""
    pooling: Pooling | None = None
    """How the model makes vectors or scores; None: it generates."""

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: where something follows it, at least one is left for that."""
        return self.max_model_len - (self.pooling is None)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        layout: CacheLayout,
        num_pages: int,
        tokenizer: Tokenizer | None,
    ) -> ModelLimits:
        """Return the limits of an engine that has started with the resolved `config`. One sequence of max_model_len
        tokens must fit into the cache, except its last token, which is never computed."""
        configured = config.max_model_len or model_config.max_position_embeddings
        room = layout.longest(num_pages, configured, config.max_num_batched_tokens or 1) + 1
        why = f" (the KV cache has room for no more than {room - 1} tokens)" if room < configured else ""
        return cls(
            model_config.vocab_size, min(configured, room), eos_token_ids(model_config, tokenizer), why,
            model_config.pooling,
        )  # fmt: skip


def eos_token_ids(model_config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end an output: those that the model names and the tokenizer's."""
    eos = list(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token_id for token_id in eos if 0 <= token_id < model_config.vocab_size))


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a model's generation_config.json may set, for requests that do not."""


def sampling_defaults(config: EngineConfig, model_config: ModelConfig) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json sets. Raises ConfigError for values that are
    invalid."""
    if config.generation_config != "auto":
        return {}
    found = {name: model_config.generation[name] for name in DEFAULTED if model_config.generation.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}; --generation-config vllm ignores the file") from None
    return found


class InputProcessor:
    """Converts requests and checks them. Every method raises RequestError, naming field, value and limit, for an
    invalid one."""

    def __init__(self, limits: ModelLimits, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._with_priority = config.scheduling_policy == "priority"
        self._seeds = random.Random(config.seed)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids. A text that is too long for the model is refused without tokenizing all of it."""
        if self._tokenizer is None:
            raise RequestError("prompt must be a list of token ids, as the server runs without tokenizer", "prompt")
        room = self.limits.max_model_len
        if len(text) > room * MAX_CHARS_PER_TOKEN:
            raise self._too_long(f"at least {-(-len(text) // MAX_CHARS_PER_TOKEN)}")
        if 4 * len(text) > max(MEASURED_BYTES, 2 * room):  # a character may be four tokens
            self._measure(self._tokenizer, text)
        return self._tokenizer.encode(text, add_special_tokens)

    def _measure(self, tokenizer: Tokenizer, text: str) -> None:
        """Raise RequestError for a text of too many tokens. Each cut between parts may add some to the count."""
        count, most = 0, self.limits.max_model_len + 1
        for start in range(0, len(text), MEASURED_CHARS):
            count += len(tokenizer.encode(text[start : start + MEASURED_CHARS], add_special_tokens=False))
            if count > most:
                raise self._too_long(f"more than {count - most + self.limits.max_model_len}")
            most += MAX_CHARS_PER_TOKEN

    def prepare(self, prompt: str | list[int], params: SamplingParams, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt that `process` will accept. Called for all prompts of an HTTP request before
        any of them runs."""
        ids = self.tokenize(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        self.check_prompt(ids)
        if self.limits.pooling is None:
            self._max_tokens(len(ids), params)
        return ids

    def check_together(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Check what the prompts of one HTTP request, of so many tokens in all, ask for together."""
        if params.prompt_logprobs is None:
            return
        wanted = num_prompt_tokens * (params.prompt_logprobs + 1)
        if wanted > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs (or echo with logprobs) of {params.prompt_logprobs} for {num_prompt_tokens} prompt "
                f"tokens are {wanted} values; one request may ask for {MAX_PROMPT_LOGPROBS}",
                "prompt_logprobs",
            )

    def process(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        parent: str = "",
        grammar: str | None = None,
        pools: str = "",
        lora_request: LoRARequest | None = None,
    ) -> list[EngineCoreRequest]:
        """Return `params.n` requests of one choice each, with ids `REQUEST_ID-i` and consecutive seeds. `client`,
        `parent`, `pools` and `lora_request`: see EngineCoreRequest. `grammar`: what holds the output; None: what
        `params` ask for."""
        if bool(pools) != (self.limits.pooling is not None):
            raise RequestError(NO_TEXT if not pools else NO_POOLING, "model")
        self.check_prompt(prompt_token_ids, segments=bool(pools))
        self._check_params(params)
        self._check_envelope(request_id, priority, cache_salt)
        max_tokens = 1 if pools else self._max_tokens(len(prompt_token_ids), params)
        stops = [*params.stop_token_ids, *(() if params.ignore_eos else self.limits.eos_token_ids)]
        bad_words = self._bad_words(params.bad_words)
        if grammar is None:
            grammar = self._grammar(params)
        elif grammar:
            self._vocabulary_marks()
        _check_something_is_left(params, stops, bad_words)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        # The core works without strings, and only the first of n needs to score the prompt. All has been checked, so
        # that these copies need not be.
        first = copy.copy(params)
        first.n, first.stop, first.bad_words, first.structured_outputs = 1, [], [], None
        others = copy.copy(first)
        others.prompt_logprobs = None
        return [
            EngineCoreRequest(
                request_id=f"{request_id}-{i}",
                prompt_token_ids=prompt_token_ids,
                params=first if i == 0 else others,
                max_tokens=max_tokens,
                seed=_wrapped(seed + i),
                stop_token_ids=list(dict.fromkeys(stops)),
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=cache_salt,
                client=client,
                parent=parent,
                grammar=grammar,
                pools=pools,
                lora_request=lora_request,
            )
            for i in range(params.n)
        ]

    def _grammar(self, params: SamplingParams) -> str:
        """Return the grammar that parameters ask for, as text; empty if they ask for none. Making one takes time."""
        if params.structured_outputs is None:
            return ""
        return of_params(params.structured_outputs, self._vocabulary_marks()).to_text()

    def _vocabulary_marks(self) -> dict[str, int]:
        """Return the tokens that are marks to a grammar. Raises RequestError where nothing can be held to one."""
        if self._tokenizer is not None and self.limits.eos_token_ids:
            return self._tokenizer.marks
        has_end = bool(self.limits.eos_token_ids)
        why = "the server runs without a tokenizer" if has_end else "the model has no token that ends an output"
        raise RequestError(f"output cannot be held to a grammar: {why}", "structured_outputs")

    def check_prompt(self, ids: list[int], segments: bool = False) -> None:
        """Check token ids; with `segments`, those of a pair's second text may be id + vocab_size."""
        wrong_type = RequestError("prompt must be a text or a list of token ids (integers)", "prompt")
        if not isinstance(ids, list):
            raise wrong_type
        if not ids:
            raise RequestError("prompt must not be empty: it needs at least one token", "prompt")
        if len(ids) > self.limits.longest_prompt:  # checked before the ids are, of which there may be millions
            raise self._too_long(str(len(ids)))
        if {*map(type, ids)} != {int}:
            raise wrong_type
        second = segments and self.limits.pooling is not None and self.limits.pooling.segments
        most = max(0, max(ids) - self.limits.vocab_size) if second else max(ids)
        self._check_ids("prompt", [min(ids), most])

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        allowed = params.allowed_token_ids or []
        if len(allowed) > self.limits.vocab_size:
            raise RequestError(
                f"allowed_token_ids has {len(allowed)} ids, and the model's vocabulary {self.limits.vocab_size}",
                "allowed_token_ids",
            )
        self._check_ids("allowed_token_ids", [min(allowed), max(allowed)] if allowed else [])
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise RequestError(f"{name} needs a tokenizer, but the server runs without one", name)

    def _check_ids(self, name: str, ids: list[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.limits.vocab_size:
                raise RequestError(
                    f"{name} has token id {quoted(token_id)}, which is not in the model's vocabulary "
                    f"(0 to {self.limits.vocab_size - 1})",
                    name,
                )

    def _check_envelope(self, request_id: str, priority: int, cache_salt: str | None) -> None:
        if not _is_text(request_id):
            raise RequestError("request_id must be valid text", "request_id")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority must be an integer of at most {MAX_PRIORITY}, got {quoted(priority)}", "priority"
            )
        if priority and not self._with_priority:
            raise RequestError(
                f"priority is {priority}, but the server schedules by arrival (--scheduling-policy fcfs)", "priority"
            )
        if cache_salt is not None and not (_is_text(cache_salt) and 0 < len(cache_salt) <= MAX_CACHE_SALT_CHARS):
            raise RequestError(f"cache_salt must be a text of 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        room = self.limits.max_model_len - prompt_len
        if params.max_tokens is None:
            if params.min_tokens > room:
                raise RequestError(
                    f"min_tokens is {params.min_tokens}, but after a prompt of {prompt_len} tokens the context leaves "
                    f"room for {room}{self.limits.why}",
                    "min_tokens",
                )
            return room
        if params.max_tokens > room:
            raise RequestError(
                f"This model's maximum context length is {self.limits.max_model_len} tokens{self.limits.why}. However, "
                f"you requested {prompt_len + params.max_tokens} tokens ({prompt_len} in the prompt, "
                f"{params.max_tokens} in the completion). Please reduce the length of the prompt or max_tokens.",
                "max_tokens",
            )
        return params.max_tokens

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token ids of each word, as it is written at the beginning of a text and after a space."""
        if self._tokenizer is None:
            return []
        found: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found and max(ids) < self.limits.vocab_size:
                    found.append(ids)
        return found

    def _too_long(self, count: str) -> RequestError:
        left = ", of which at least one must be left for the completion" if self.limits.pooling is None else ""
        return RequestError(
            f"This model's maximum context length is {self.limits.max_model_len} tokens{self.limits.why}{left}. "
            f"However, your prompt has {count} tokens. Please reduce its length.",
            "prompt",
        )


def _check_something_is_left(params: SamplingParams, stops: list[int], bad_words: list[list[int]]) -> None:
    """Refuse allowed_token_ids of which the other parameters forbid all for the first token."""
    if params.allowed_token_ids is None:
        return
    forbidden = {ids[0] for ids in bad_words if len(ids) == 1} | (set(stops) if params.min_tokens else set())
    if forbidden.issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves nothing to sample: bad_words, and stop tokens before min_tokens "
            f"({params.min_tokens}), forbid them all",
            "allowed_token_ids",
        )


def _is_text(value: object) -> bool:
    """Return whether a value is text that UTF-8 can represent (JSON lets half a surrogate pair through)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrapped(seed: int) -> int:
    """Return a seed wrapped into a signed 64-bit integer."""
    return (seed + MAX_SEED + 1) % 2**64 - MAX_SEED - 1
