"""Reads `speculative_config`: who guesses the next tokens, and how many. Fields and methods have vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

NGRAM, DRAFT_MODEL, EAGLE, EAGLE3, MTP = "ngram", "draft_model", "eagle", "eagle3", "mtp"
METHODS = (NGRAM, DRAFT_MODEL, EAGLE, EAGLE3, MTP)
REFUSED = {
    "medusa": "its heads guess each token without knowing the one before, and fewer guesses are right than of eagle3",
    "mlp_speculator": "eagle3 heads have taken its place, of whose guesses more are right",
    "suffix": "ngram looks the end of a sequence up in the whole sequence, which is what it adds within one request",
}
"""Methods of vLLM's that will not be served -> why."""
LOOKUP = 5
"""Tokens of an n-gram where nobody says how many, as in vLLM."""
MOST_LOOKUP = 16
MOST_TOKENS = 16
"""Most guesses for a request and step: each is one more token of every step."""
KEPT_TOKENS = 1024
"""Most tokens whose hidden states are kept until a head reads them."""
USUAL_TOKENS = {NGRAM: 5, MTP: 1}
USUAL = 3
"""Most guesses where nobody says how many, by method: a text that repeats itself goes on for long, and the layers that
a model brings to predict tokens were trained for the next one."""
FIELDS: dict[str, type] = {
    "method": str, "model": str, "num_speculative_tokens": int, "prompt_lookup_min": int, "prompt_lookup_max": int,
    "draft_tensor_parallel_size": int, "revision": str, "quantization": str, "adaptive": bool,
}  # fmt: skip
IGNORED = (
    "enforce_eager", "disable_padded_drafter_batch", "disable_by_batch_size", "disable_logprobs", "max_model_len",
    "use_local_argmax_reduction", "attention_backend", "moe_backend", "dtype",
)  # fmt: skip
"""Fields of vLLM's that change no token, and for which there is nothing to choose here."""


@dataclass(frozen=True)
class Speculation:
    """Holds what guesses the tokens behind those that are known."""

    method: str
    num_tokens: int
    """Guesses for each request and step, the most if they are `adaptive`."""
    model: str = ""
    """Folder or Hugging Face id of what guesses, if the model does not bring it."""
    revision: str | None = None
    quantization: str | None = None
    """As the engine's own, for what guesses."""
    prompt_lookup_min: int = LOOKUP
    """Fewest tokens that an n-gram must have in common with the end of a sequence."""
    prompt_lookup_max: int = LOOKUP
    """Most tokens that are compared."""
    adaptive: bool = False
    """Whether each step has as many guesses as are expected to pay, which may be none."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the numbers of guesses that a step may have."""
        most = self.num_tokens
        return tuple(sorted({0, -(-most // 2), most})) if self.adaptive else (most,)

    @staticmethod
    def of(given: Mapping[str, Any], tp_size: int = 1) -> Speculation | None:
        """Return what a `speculative_config` asks for; None: it is empty, and nothing is guessed. Raises ConfigError
        naming the field, its value and what is accepted."""
        fields: dict[str, Any] = {name: v for name, v in given.items() if v is not None and name not in IGNORED}
        if not fields:
            return None
        for name, value in fields.items():
            _check_type(name, value)
        method = _method(fields)
        if (ranks := fields.get("draft_tensor_parallel_size", 1)) not in (1, tp_size):
            raise _wrong("draft_tensor_parallel_size", ranks, f"1 or tensor_parallel_size, which is {tp_size}")
        adaptive = fields.get("adaptive", "num_speculative_tokens" not in fields)
        if not adaptive and "num_speculative_tokens" not in fields:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be given where adaptive is false: 1 to {MOST_TOKENS}"
            )
        fields = {"num_speculative_tokens": USUAL_TOKENS.get(method, USUAL), **fields}
        least, most = _lookup(fields)
        return Speculation(
            method,
            _within(fields, "num_speculative_tokens", MOST_TOKENS),
            "" if method == NGRAM else fields.get("model", ""),
            fields.get("revision"),
            fields.get("quantization"),
            least,
            most,
            adaptive,
        )


def _check_type(name: str, value: Any) -> None:
    kind = FIELDS.get(name)
    if kind is None:
        raise ConfigError(
            f"speculative_config has no field {name!r:.80}; accepted: {', '.join(FIELDS)}; accepted without effect: "
            f"{', '.join(IGNORED)}"
        )
    if type(value) is not kind:
        raise _wrong(name, value, {str: "a text", int: "a whole number", bool: "true or false"}[kind])


def _method(fields: Mapping[str, Any]) -> str:
    """Return the method. `ngram` and `[ngram]` as a model, and names of families before `_mtp`, are vLLM's spellings
    too; a model without a method is what its name says, or a draft model."""
    model = fields.get("model", "")
    named = NGRAM if model in (NGRAM, "[ngram]") else DRAFT_MODEL if model else ""
    kind = next((kind for kind in (EAGLE3, EAGLE) if kind in Path(model).name.lower()), named)
    method: str = fields.get("method", kind)
    method = MTP if method.endswith("_mtp") else method
    if method in REFUSED:
        raise ConfigError(f"speculative_config.method {method!r} is not served: {REFUSED[method]}")
    if method not in METHODS:
        raise _wrong("method", method or None, ", ".join(METHODS))
    if method == NGRAM and named == DRAFT_MODEL:
        raise _wrong("model", model, "none with method ngram, which guesses from the sequence itself")
    if method in (DRAFT_MODEL, EAGLE, EAGLE3) and not model:
        raise _wrong("model", None, f"a folder or Hugging Face id with method {method}")
    return method


def _lookup(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the fewest and the most tokens of an n-gram; one that is left out is as the other."""
    low, high = "prompt_lookup_min", "prompt_lookup_max"
    sizes = {low: fields.get(low, fields.get(high, LOOKUP)), high: fields.get(high, fields.get(low, LOOKUP))}
    least, most = (_within(sizes, name, MOST_LOOKUP) for name in sizes)
    if least > most:
        raise _wrong(low, least, f"at most {high}, which is {most}")
    return least, most


def _within(fields: Mapping[str, Any], name: str, most: int) -> int:
    value: int = fields[name]
    if not 1 <= value <= most:
        raise _wrong(name, value, f"1 to {most}")
    return value


def _wrong(name: str, value: Any, accepted: str) -> ConfigError:
    return ConfigError(f"speculative_config.{name} is {value!r:.200}; accepted: {accepted}")
