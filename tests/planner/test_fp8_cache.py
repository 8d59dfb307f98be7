"""An fp8 KV cache after a load: kept, given back, or refused to whoever named it; what is said of one that is kept."""

from __future__ import annotations

import math

import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.planner.fp8_cache import MOST_FOR_THROUGHPUT, cached_bytes, describe_lossy_cache, settled_cache
from headrace.step import WorkerFacts

CONFIG = EngineConfig(dtype="bfloat16", kv_cache_dtype="fp8_e4m3")


def ranks(*errors: float, remedy: str = "") -> list[WorkerFacts]:
    return [
        WorkerFacts(
            "cuda", "a GPU", 2**30, 0, same_layout(16, 1 << 20), 0, "ANY", kv_cache_error=error, kv_cache_remedy=remedy
        )
        for error in errors
    ]


def test_a_cached_number_takes_the_bytes_of_its_type() -> None:
    sizes = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
    assert {name: cached_bytes(name) for name in sizes} == sizes


@pytest.mark.parametrize("asked", [True, False])
def test_a_cache_that_moves_little_is_kept(asked: bool) -> None:
    assert settled_cache(CONFIG, asked, ranks(0.02, MOST_FOR_THROUGHPUT)) is None


@pytest.mark.parametrize("errors", [(0.02, 0.15), (math.nan, 0.02), (0.02, math.nan), (math.inf,)])
def test_the_worst_rank_gives_back_what_the_objective_alone_asked_for(errors: tuple[float, ...]) -> None:
    found = settled_cache(CONFIG, False, ranks(*errors, remedy="bfloat16"))
    config, decision = found
    assert config == CONFIG.replace(kv_cache_dtype="bfloat16")
    assert (decision.value, decision.runner_up, decision.source) == ("bfloat16", "fp8_e4m3", "measured")


def test_who_asks_gets_more_but_not_everything() -> None:
    assert settled_cache(CONFIG, True, ranks(0.2)) is None
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8_e4m3: .* by 40\.0%: .*; use bfloat16"):
        settled_cache(CONFIG, True, ranks(0.4, remedy="bfloat16"))


def test_a_start_says_what_a_rounded_cache_holds_and_moves() -> None:
    assert describe_lossy_cache(CONFIG, ranks(0.02, 0.053), 1000) == (
        "The KV cache is lossy: fp8_e4m3 holds 16,000 tokens where bfloat16 would hold 8,000, of 64 KiB each on a rank "
        "instead of 128, read in 1/2 of the time; it moves hidden states by 5.3%"
    )
    assert describe_lossy_cache(CONFIG.replace(kv_cache_dtype="bfloat16"), ranks(0.0), 1000) == ""
