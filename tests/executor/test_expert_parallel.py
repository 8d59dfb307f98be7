"""Two ranks that hold whole experts say what one rank says, with prompts in parts and a prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_configs import save_tiny_model

from headrace import LLM, SamplingParams
from headrace.distributed.mesh import Group
from headrace.errors import ConfigError
from headrace.layers.moe import own_experts

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 64,
    "max_num_batched_tokens": 32, "cpu_threads": 1,
}  # fmt: skip


@pytest.mark.slow
def test_tokens_are_the_same(tmp_path: Path) -> None:
    save_tiny_model("DeepseekV3ForCausalLM", "queries-too", tmp_path)  # latents, and a shared expert beside the routed
    params = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [[5, 6, 7] * 15, [9, 8], [5, 6, 7] * 12]
    said = []
    for ranks in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}):
        with LLM(str(tmp_path), **ranks, **SETTINGS) as llm:
            said.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert said[0] == said[1]


def test_every_expert_has_one_place() -> None:
    for number, ranks in ((8, 2), (7, 3), (128, 8), (5, 5)):
        held = [own_experts(number, Group(rank, ranks)) for rank in range(ranks)]
        assert [expert for own in held for expert in own] == list(range(number))
        assert max(map(len, held)) - min(map(len, held)) <= 1
    assert own_experts(4, Group()) == range(4)
    with pytest.raises(ConfigError, match=r"spreads 4 experts, .* x data_parallel_size must be at most 4, got 8"):
        own_experts(4, Group(0, 8))
