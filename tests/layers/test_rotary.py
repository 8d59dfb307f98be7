"""The rope table equals transformers' cosines and sines, for every type of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.kernels.table import REFERENCE_KERNELS
from headrace.layers.rotary import rope_table, table_of_step
from headrace.model_config import ModelConfig
from headrace.models.ropes import read_rope

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [1.0 + place / 4 for place in range(32)],
        "original_max_position_embeddings": 128,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
}


def table(raw: dict[str, Any]) -> torch.Tensor:
    """That of a config.json."""
    config = ModelConfig.from_dict(raw)
    rope = read_rope(config.fields)
    return rope_table(rope, config.head_dim, config.max_position_embeddings, torch.device("cpu"))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_table_equals_transformers(scaling: dict[str, Any], theta: float) -> None:
    reference = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    raw = reference.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    ours = table(raw)
    cos, sin = LlamaRotaryEmbedding(reference)(torch.zeros(1), torch.arange(512)[None])
    assert ours.shape == (512, 64)
    torch.testing.assert_close(ours, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1), rtol=0, atol=1e-4)


def test_old_spelling_of_the_type_is_read() -> None:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 32,
    }
    old, new = (table(base | {"rope_scaling": {key: "linear", "factor": 2.0}}) for key in ("type", "rope_type"))
    plain = table(base)
    assert torch.equal(old, new)
    torch.testing.assert_close(old[2::2], plain[1:16])


def test_each_of_three_positions_turns_frequencies_of_its_own() -> None:
    """In sections, as of Qwen2-VL, or in turns, as of Qwen3-VL."""
    angles, positions = torch.rand(32, 8) * 6, torch.randint(0, 32, (3, 5))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q, k, v = torch.randn(5, 4, 16).split((2, 1, 1), dim=1)
    for axes in ([0, 0, 0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 0]):
        cache, chosen = torch.zeros(2, 2, 4, 1, 16), torch.tensor(axes)
        taken = REFERENCE_KERNELS.step_angles(*table_of_step(cos_sin, positions, chosen))
        found = REFERENCE_KERNELS.rotary_and_cache(q, k, v, *taken, cache, torch.arange(5))
        turns = torch.polar(torch.ones(5, 8), angles[positions[chosen].T, torch.arange(8)])[:, None]
        for x, turned in ((q, found), (k, cache[0].flatten(0, 1)[:5])):
            expected = torch.complex(*x.chunk(2, dim=-1)) * turns
            torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))
    plain = table_of_step(cos_sin, positions[:1].expand(3, -1), chosen)[0]
    assert torch.equal(plain, cos_sin[positions[0]])
