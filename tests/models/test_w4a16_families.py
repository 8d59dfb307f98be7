"""Families with experts, as compressed-tensors packs them: 4-bit integers, a tensor for each linear of each expert."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from driver import Driver
from safetensors.torch import save_file
from test_stacked_experts import compressed, int4
from tiny_configs import VARIANTS, tiny_config

from headrace.model_config import ModelConfig
from headrace.models.registry import describe

FAMILIES = (
    "Llama4ForCausalLM", "Dots1ForCausalLM", "Ernie4_5_MoeForCausalLM", "GraniteMoeSharedForCausalLM",
    "GraniteMoeHybridForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "OlmoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
)  # fmt: skip
PROMPTS = [[5], [17, 3, 99], list(range(20, 45))]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tokens_are_those_of_the_weights_that_integers_stand_for(architecture: str, tmp_path: Path) -> None:
    config = tiny_config(architecture, next(iter(VARIANTS[architecture].values()))).to_dict()
    config |= {"architectures": [architecture]}
    spec = describe(ModelConfig.from_dict(config))
    generator = torch.Generator().manual_seed(5)
    plain = {
        name: torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    plain |= {f"model.{one.name}": torch.ones(one.shape) for one in spec.norm_parameters}
    packed = dict(plain)
    for number, layer in enumerate(spec.layers):
        for one in layer.parameters:
            name, values = f"model.layers.{number}.{one.name}", torch.randn(one.shape, generator=generator)
            if one.kind == "linear":
                made, wide = int4(1.5 * values[None] * one.shape[1] ** -0.5)
                packed |= {f"{name}{key}": tensor if key == "_shape" else tensor[0] for key, tensor in made.items()}
                packed[f"{name}_shape"] = torch.tensor(one.shape)
                values = wide[0]
            else:
                values = values * (0.3 if len(one.shape) > 1 else 0.1) + (len(one.shape) == 1)
                packed[name] = values
            plain[name] = values
    quantization = compressed(
        "pack-quantized", type="int", num_bits=4, strategy="group", group_size=8, symmetric=False
    ) | {"ignore": ["lm_head"]}
    for folder, tensors, more in (("plain", plain, {}), ("packed", packed, {"quantization_config": quantization})):
        (tmp_path / folder).mkdir()
        kept = {
            name: one.contiguous()
            for name, one in tensors.items()
            if name != "lm_head.weight" or not spec.tied_embeddings
        }
        save_file(kept, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
    driver = Driver(tmp_path / "packed")
    assert any(note.startswith("Quantization") and "and the experts of" in note for note in driver.model.notes)
    found = driver.greedy(PROMPTS, 12)
    assert found == Driver(tmp_path / "plain").greedy(PROMPTS, 12)
    assert len({*map(tuple, found)}) > 1
