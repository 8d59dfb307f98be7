"""Models of every family, many with sliding windows in all layers or in some: prompts in chunks, prefixes from the
cache, preemption and blocks that go back change no token of transformers' own, whatever the size of a block."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest
import torch
from tiny_configs import BASE, VARIANTS, best_tokens, save_tiny_model

from headrace import LLM, SamplingParams
from tests.distributed.thread_ranks import THREADS

NEW_TOKENS = 24
EOS = BASE["eos_token_id"]


SLIDING = [("MistralForCausalLM", "sliding"), ("Qwen2ForCausalLM", "upper-sliding")]
OTHERS = [
    (name, next(iter(variants)))
    for name, variants in VARIANTS.items()
    if name not in dict(SLIDING) and not name.endswith("ForConditionalGeneration")
]
ROOMY = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
"""whose requests are admitted with all that they will ever need, so that none is preempted"""
SMALL = ("CwmForCausalLM", "VaultGemmaForCausalLM")
"""whose windows take so little that less room is given"""
BLOCK_SIZES = (16, 1, 64)
"""by the name, whatever other families there are; no prompts have a whole block of 64 tokens in common"""
KEEPERS = {
    "LlamaForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "Qwen3_5ForCausalLM", "DeepseekV2ForCausalLM",
}  # fmt: skip
"""Families that among them keep all that layers keep: keys of all tokens, of windows, of both; sinks; latents; states.
The others, which keep the same, are in `make test-all`. One that keeps another thing is to be named here."""


def case_of(case: tuple[str, str], block_size: int, ranks: int, runs: bool) -> object:
    return pytest.param(case, block_size, ranks, marks=() if runs else pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "block_size", "ranks"),
    [
        *(case_of(case, 16, ranks, ranks == 1) for case in SLIDING for ranks in (1, 2)),  # two: distributed/, too
        *(case_of(case, BLOCK_SIZES[crc32(case[0].encode()) % 3], 1, case[0] in KEEPERS) for case in OTHERS),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_tokens_are_transformers_own(case: tuple[str, str], block_size: int, ranks: int, tmp_path: Path) -> None:
    reference = save_tiny_model(*case, tmp_path)
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 100, (40,), generator=generator).tolist()
    lengths = (3, 50, 17, 33, 64, 9)
    prompts = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
    prompts += [shared + [place] * place for place in range(1, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    with LLM(
        str(tmp_path), dtype="float32", device="cpu", skip_tokenizer_init=True, tensor_parallel_size=ranks,
        block_size=block_size, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=96,
        num_gpu_blocks_override=10 if case[0] in SMALL and block_size == 16 else max(3, 192 // block_size),
        **({"executor": THREADS} if ranks > 1 else {}),
    ) as llm:  # fmt: skip
        found, again = (
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)
        )
        assert all(len(tokens) == NEW_TOKENS for tokens in found)
        assert found == [best_tokens(reference, *both, never=EOS) for both in zip(prompts, found, strict=True)]
        assert again == found
        stats = llm.stats()
        assert stats.prefix_cache_hits > 0 or block_size > 16
        assert stats.num_preemptions > 0 or ranks > 1 or block_size != 16 or case[0] in ROOMY
