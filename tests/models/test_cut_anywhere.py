"""Families whose layers keep more than keys of all tokens give transformers' tokens however the engine cuts its work:
recurrent states from snapshots, past as many keys as an index chooses; from the prefix cache, in chunks, after
preemption, with blocks of any size."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import best_tokens, save_tiny_model

from headrace import LLM, SamplingParams

NEW_TOKENS = 12
Best = Callable[[tuple[int, ...], tuple[int, ...]], list[int]]
"""`best_tokens` of transformers' model, each answer once"""
MODELS = {
    "states": ("Qwen3NextForCausalLM", "hybrid"),
    "own index": ("DeepseekV32ForCausalLM", "sparse-groups"),
    "shared index": ("GlmMoeDsaForCausalLM", "shared-index"),
}
LOOKED_UP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "few pages": {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 14},
    "blocks of 1": {"block_size": 1},
    "blocks of 64": {"block_size": 64},
    "blocks of 64, alone": {"block_size": 64, "max_num_seqs": 1},
    "guesses": {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 14, "speculative_config": LOOKED_UP},
}
OF_STATES = ("blocks of 64, alone", "guesses")
"""What goes back to a snapshot in a way of its own"""


def prompts() -> list[list[int]]:
    """Most begin alike, for longer than a chunk of the scan; some see fewer keys than an index chooses, or come to see
    more."""
    random = torch.Generator().manual_seed(2)
    shared = torch.randint(3, 101, (90,), generator=random).tolist()
    cuts = ((90, 3), (90, 30), (70, 1), (0, 2), (0, 5), (64, 9))
    return [shared[:cut] + torch.randint(3, 101, (own,), generator=random).tolist() for cut, own in cuts]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Best]]:
    @cache
    def made(name: str) -> tuple[Path, Best]:
        folder = tmp_path_factory.mktemp("model")
        theirs = save_tiny_model(*MODELS[name], folder)
        return folder, cache(lambda prompt, answer: best_tokens(theirs, [*prompt], [*answer]))

    return made


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, id=f"{name}, {way}")
        for name in MODELS
        for way, settings in SETTINGS.items()
        if name == "states" or way not in OF_STATES
    ],
)
def test_tokens_are_those_of_transformers(
    name: str, settings: dict[str, Any], models: Callable[[str], tuple[Path, Best]]
) -> None:
    folder, best = models(name)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    common = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 4}
    with LLM(str(folder), **{**common, **settings}) as llm:
        for _ in range(2):  # cold, then warm
            for prompt, output in zip(prompts(), llm.generate(asked, params, use_tqdm=False), strict=True):
                found = output.outputs[0].token_ids
                assert list(found) == best(tuple(prompt), tuple(found))
        stats = llm.stats()
    assert (stats.drafts.num_tokens > stats.drafts.num_accepted > 0) == ("speculative_config" in settings)
    assert stats.prefix_cache_hits > 0
    assert stats.num_free_blocks == stats.num_blocks
