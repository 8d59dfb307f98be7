"""Descriptions list the tensors that a model has: beside the modules that serve it, and beside transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from driver import make_context
from tiny_configs import BASE, CASES, VARIANTS, tiny_config

from headrace.errors import UnsupportedModelError
from headrace.layers.layer import Layer
from headrace.model_config import Fields, ModelConfig
from headrace.model_spec import ModelSpec
from headrace.models.loader import build_model
from headrace.models.registry import DESCRIBED, SERVED, describe, resolve


@pytest.mark.parametrize(("architecture", "variant"), CASES, ids=lambda value: value)
def test_a_served_family_is_described_tensor_by_tensor(architecture: str, variant: str) -> None:
    config = ModelConfig.from_dict(tiny(architecture, **VARIANTS[architecture][variant]))
    context = make_context(config)
    model = build_model(config, context)
    slots = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Layer):
            layer.create_weights(torch.device("meta"))
            slots.update(layer.slots(path))
    asked = {name: slot.shape for name, slot in slots.items() if not slot.optional and ".layers." in name}
    described = {
        f"model.layers.{i}.{parameter.name}": parameter.shape
        for i, layer in enumerate(describe(config).layers)
        for parameter in layer.parameters
    }
    assert described == asked


def tiny(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return {**tiny_config(architecture, changes).to_dict(), "architectures": [architecture]}


LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
UNSERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "KimiK25ForConditionalGeneration": ("DeepseekV3ForCausalLM", {**LATENT, "num_nextn_predict_layers": 0}),
    "Llama4ForConditionalGeneration": (
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40,
            "head_dim": 12,
            "attention_chunk_size": 8,
        },
    ),
}
"""architecture -> (transformers' class, fields)"""


@pytest.mark.parametrize("architecture", UNSERVED)
def test_a_family_without_modules_has_as_many_numbers_as_transformers_gives_it(architecture: str) -> None:
    name, changes = UNSERVED[architecture]
    raw = tiny(name, **changes)
    with torch.device("meta"):
        reference = getattr(transformers, name)(getattr(transformers, name).config_class(**{**BASE, **changes}))
    biases = sum(buffer.numel() for name, buffer in reference.named_buffers() if name.endswith("correction_bias"))
    assert numbers(spec_of(architecture, raw)) == reference.num_parameters() + biases


def spec_of(architecture: str, raw: dict[str, Any]) -> ModelSpec:
    return DESCRIBED[architecture].spec(Fields(raw, architecture))


def numbers(spec: ModelSpec) -> int:
    ends = spec.hidden_size * spec.vocab_size * (1 if spec.tied_embeddings else 2) + spec.hidden_size
    return ends + sum(layer.weights for layer in spec.layers)


def test_what_is_described_and_has_no_modules_is_refused_in_one_line_that_says_so() -> None:
    assert "DeepseekV32ForCausalLM" in DESCRIBED.keys() - SERVED.keys()
    raw = {**tiny("LlamaForCausalLM"), "architectures": ["DeepseekV32ForCausalLM"]}
    with pytest.raises(
        UnsupportedModelError, match=r"'DeepseekV32ForCausalLM' .*headrace plan.*LlamaForCausalLM"
    ) as error:
        resolve(ModelConfig.from_dict(raw))
    assert "\n" not in str(error.value)
