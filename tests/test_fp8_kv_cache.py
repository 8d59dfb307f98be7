"""The demo model over an fp8 KV cache: nearly the same tokens, half the bytes, and blocks that may be found again."""

from __future__ import annotations

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError

PROMPTS = [
    "Once upon a time, there was a little",
    "The big dog ran to the",
    "One day, Lily and her mom",
    "Tom had a red",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPEN = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[0])
"""The same tokens, but nobody can know beforehand how many."""


def tokens(llm: LLM, prompts: list[str] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of positions up to the first that differs; after it the texts are other texts."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return same / sum(map(len, ours))


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], int]:
    """(tokens with the model's own cache, bytes of a block)"""
    with LLM("demo", dtype="float32", kv_cache_dtype="bfloat16") as llm:
        return tokens(llm), llm._core.facts.workers[0].layout.page_bytes


@pytest.mark.parametrize(("kind", "least"), [("fp8", 0.5), ("fp8_e5m2", 0.3)])
def test_tokens_and_capacity(kind: str, least: float, plain: tuple[list[list[int]], int]) -> None:
    expected, block_bytes = plain
    with LLM("demo", dtype="float32", kv_cache_dtype=kind) as llm:
        facts = llm._core.facts.workers[0]
        assert facts.layout.page_bytes * 2 == block_bytes
        assert any("moves hidden states by" in note for note in facts.notes)
        found = tokens(llm)
        assert agreement(found, expected) >= least
        assert tokens(llm) == found  # out of the prefix cache


def test_neither_prefix_cache_nor_preemption_changes_tokens() -> None:
    shared = "Once upon a time, there was a little girl named Lily. She had a big red ball and a small blue cup. "
    prompts = [shared + prompt for prompt in PROMPTS]
    with LLM("demo", dtype="float32", kv_cache_dtype="fp8", enable_prefix_caching=False) as llm:
        expected = tokens(llm, prompts)
    with LLM("demo", dtype="float32", kv_cache_dtype="fp8", max_model_len=128, num_gpu_blocks_override=11) as llm:
        for _ in range(2):
            assert tokens(llm, prompts, OPEN) == expected
        assert llm.stats().num_preemptions > 0


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, .*fp8_e4m3, fp8_e5m2; got 'int8'"):
        LLM("demo", kv_cache_dtype="int8")
