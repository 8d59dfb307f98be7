"""What `speculative_config` takes, in vLLM's words, and how it says what it does not take."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.speculation import Speculation

TAKEN: list[tuple[dict[str, Any], Speculation | None]] = [
    ({}, None),
    ({"method": "ngram", "num_speculative_tokens": 4}, Speculation("ngram", 4)),
    (
        {"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        Speculation("ngram", 5, prompt_lookup_min=4, prompt_lookup_max=4),
    ),
    (
        {"model": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": None},
        Speculation("ngram", 2, prompt_lookup_min=2, prompt_lookup_max=2),
    ),
    ({"model": "m", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}, Speculation("draft_model", 5, "m")),
    (
        {"method": "eagle3", "model": "m", "num_speculative_tokens": 2, "revision": "r", "enforce_eager": True},
        Speculation("eagle3", 2, "m", "r"),
    ),
    ({"model": "of/EAGLE3-Llama", "num_speculative_tokens": 1}, Speculation("eagle3", 1, "of/EAGLE3-Llama")),
    ({"model": "eagle/llama-1b", "num_speculative_tokens": 1}, Speculation("draft_model", 1, "eagle/llama-1b")),
    ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, Speculation("mtp", 1)),
    ({"method": "deepseek_mtp"}, Speculation("mtp", 1, adaptive=True)),
    ({"method": "ngram"}, Speculation("ngram", 5, adaptive=True)),
    ({"model": "m", "num_speculative_tokens": 4, "adaptive": True}, Speculation("draft_model", 4, "m", adaptive=True)),
]


@pytest.mark.parametrize(("given", "expected"), TAKEN, ids=lambda value: str(value)[:60])
def test_what_is_taken(given: dict[str, Any], expected: Speculation | None) -> None:
    assert Speculation.of(given) == expected
    config = EngineConfig(speculative_config=given)
    assert config.speculation == expected
    assert config.decode_len == 1 + (expected.num_tokens if expected else 0)


def test_fewer_guesses_and_none_are_among_the_lengths_where_these_adapt() -> None:
    assert Speculation("ngram", 5).lengths == (5,)
    assert Speculation("ngram", 5, adaptive=True).lengths == (0, 3, 5)
    assert Speculation("mtp", 1, adaptive=True).lengths == (0, 1)
    assert EngineConfig(speculative_config={"method": "ngram"}).decode_lens == (1, 4, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methd": "ngram"}, "speculative_config has no field 'methd'; accepted: method, model,"),
        ({"method": 3}, "speculative_config.method is 3; accepted: a text"),
        ({"num_speculative_tokens": 2}, "speculative_config.method is None; accepted: ngram, draft_model, eagle,"),
        ({"method": "guess"}, "speculative_config.method is 'guess'; accepted: ngram, draft_model, eagle, eagle3, mtp"),
        ({"method": "medusa", "model": "m"}, "method 'medusa' is not served: its heads guess each token without"),
        ({"method": "mlp_speculator", "model": "m"}, "method 'mlp_speculator' is not served"),
        ({"method": "ngram", "adaptive": False}, "num_speculative_tokens must be given where adaptive is false: 1 to"),
        ({"method": "ngram", "adaptive": 1}, "adaptive is 1; accepted: true or false"),
        ({"method": "ngram", "num_speculative_tokens": True}, "tokens is True; accepted: a whole number"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "tokens is '5'; accepted: a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; accepted: 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "num_speculative_tokens is 17; accepted: 1 to 16"),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "speculative_config.prompt_lookup_min is 4; accepted: at most prompt_lookup_max, which is 2",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 99},
            "speculative_config.prompt_lookup_min is 99; accepted: 1 to 16",
        ),
        (
            {"method": "ngram", "model": "m", "num_speculative_tokens": 1},
            "model is 'm'; accepted: none with method",
        ),
        ({"method": "eagle3", "num_speculative_tokens": 1}, "model is None; accepted: a folder or Hugging Face id"),
        (
            {"model": "m", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size is 2; accepted: 1 or tensor_parallel_size, which is 1",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(speculative_config=given)
    assert message in str(caught.value)
