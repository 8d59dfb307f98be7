"""Defines and checks what a user may ask of sampling. Field names and meanings are vLLM's.

Limits that depend on the model (vocabulary size, max_model_len) are checked by the engine's input processor.
"""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import msgspec

from headrace.errors import RequestError, quoted
from headrace.structured_params import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_ALLOWED_TOKEN_IDS = 2**20
"""More than any vocabulary has."""
MAX_SEED = 2**63 - 1
SAMPLING_EPS = 1e-5
"""Temperatures below this are greedy."""
NOT_HERE = {
    **dict.fromkeys(("logits_processors", "extra_args"), "headrace runs no code of the user's while it samples"),
    "truncate_prompt_tokens": "shorten the prompt's token ids yourself",
    "flat_logprobs": "logprobs are dictionaries, one a token",
    **dict.fromkeys(
        ("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
        "logprobs are those of the best tokens, at every position",
    ),
    "skip_reading_prefix_cache": "give the prompt a `cache_salt` of its own",
    "thinking_token_budget": "reasoning is text like any other here",
    "repetition_detection": "stop strings and max_tokens end an output",
}
"""Fields of vLLM's that change the output -> why they are refused if they are set."""
NO_MATTER = ("output_kind", "stream_interval", "skip_clone")
"""Fields of vLLM's that may have any value, because they do not change the output."""

COMPATIBLE_ONLY = frozenset(("best_of", "guided_decoding", *NOT_HERE, *NO_MATTER))
"""Fields that exist only so that programs written for vLLM run."""
COPIED = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
"""Fields whose values a clone must not share."""
_compatible_only = operator.attrgetter(*NOT_HERE, *NO_MATTER)
_ALL_NONE = (None,) * (len(NOT_HERE) + len(NO_MATTER))


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not isinstance(value, int | float) or not finite:
        raise RequestError(f"{name} must be a finite number, got {quoted(value)}", name)
    if value < low or (low_open and value == low) or value > high:
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {quoted(value)}", name)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise RequestError, naming the field, unless a value is an integer between `low` and `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer between {low} and {high}, got {quoted(value)}", name)


def _token_ids(name: str, value: object, limit: int) -> None:
    if isinstance(value, list) and len(value) > limit:
        raise RequestError(f"{name} may hold at most {limit} token ids, got {len(value)}", name)
    # Functions in C check the ids, of which there may be as many as the vocabulary has.
    if not isinstance(value, list) or {*map(type, value)} - {int} or min(value, default=0) < 0:
        raise RequestError(f"{name} must be a list of token ids (integers >= 0), got {quoted(value)}", name)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Holds the sampling parameters of one request. Raises RequestError naming field, value and what is accepted.
    Fields may be assigned to, as in vLLM: `LLM` checks them again, and takes a copy, when it is called."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    """A plain string is accepted too and becomes a list of one."""
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as max_model_len allows."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of best tokens whose logprobs come with each output token; its own always does."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Has no effect, as in vLLM, where it changes the text of slow tokenizers only."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    best_of: int | None = None
    """Of older vLLM. It must equal n, and becomes None."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must be; a dictionary of its fields is accepted too."""
    guided_decoding: Any = None
    """Of older vLLM: another name of structured_outputs, and becomes None."""
    logits_processors: Any = None
    extra_args: Any = None
    truncate_prompt_tokens: Any = None
    flat_logprobs: Any = None
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    skip_reading_prefix_cache: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    """This field and those above: see NOT_HERE."""
    output_kind: Any = None
    stream_interval: Any = None
    skip_clone: Any = None
    """This field and those above: see NO_MATTER."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                setattr(self, name, [] if value is None else [value])
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        self._drop_compatible_only()
        check_integer("n", self.n, 1, MAX_N)
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of must equal n ({self.n}) or be left out, got {self.best_of!r:.100}", "best_of")
        self.best_of = None
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            check_integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        self._check_stops()
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_token_constraints()
        self._check_structured_outputs()

    def clone(self) -> SamplingParams:
        """Return a copy that shares no list with this one. Raises RequestError if a field was assigned a wrong
        value."""
        other = copy.copy(self)
        for name in COPIED:
            setattr(other, name, copy.copy(getattr(self, name)))
        other.__post_init__()
        return other

    def _drop_compatible_only(self) -> None:
        if _compatible_only(self) == _ALL_NONE:
            return
        for name, why in NOT_HERE.items():
            value = getattr(self, name)
            if value is not None:
                if value:
                    raise RequestError(f"{name} is not supported, got {value!r:.100}: {why}", name)
                setattr(self, name, None)
        for name in NO_MATTER:
            setattr(self, name, None)

    def _check_stops(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            words = getattr(self, name)
            if isinstance(words, list) and len(words) > limit:
                raise RequestError(f"{name} may hold at most {limit} strings, got {len(words)}", name)
            if not isinstance(words, list) or any(not isinstance(w, str) or not w for w in words):
                raise RequestError(f"{name} must be a string or a list of non-empty strings, got {quoted(words)}", name)
            if any(len(w) > MAX_STOP_STRING_CHARS for w in words):
                raise RequestError(f"each string of {name} may have at most {MAX_STOP_STRING_CHARS} characters", name)
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=true, got detokenize=false", "stop")
        _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)

    def _check_token_constraints(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise RequestError(
                    f"logit_bias must map token ids to numbers, got {quoted(self.logit_bias)}", "logit_bias"
                )
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise RequestError(
                    f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", "logit_bias"
                )
            for token_id in self.logit_bias:
                if type(token_id) is not int or token_id < 0:
                    raise RequestError(
                        f"a key of logit_bias must be a token id (an integer >= 0), got {quoted(token_id)}",
                        "logit_bias",
                    )
            for bias in self.logit_bias.values():
                _number("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")

    def _check_structured_outputs(self) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, StructuredOutputsParams.of(value, name))
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError(
                    "guided_decoding is the older name of structured_outputs: give one", "guided_decoding"
                )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature < SAMPLING_EPS
