"""The table of families: what it accepts, and what it says of the rest. It loads no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig
from headrace.models.registry import MODELS, ROPE_FIELDS, attention_spec, resolve

RAW: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


def windows(**changes: Any) -> tuple[int | None, ...]:
    made = config(**changes)
    return resolve(made).windows(made)


def test_loads_no_torch() -> None:
    code = "import sys, headrace.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_architecture_names_the_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM, MistralForCausalLM"):
        resolve(config(architectures=["GPT2LMHeadModel"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; accepted: silu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type is 'longrope'; accepted: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "`rope_scaling` of type linear lacks factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "`rope_parameters` differs between layers"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5; accepted: 1.0"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3; must divide"),
        ({"num_key_value_heads": None}, "`num_key_value_heads` is missing"),
        ({"head_dim": 15}, "`head_dim` is 15; must be even"),
        ({"num_hidden_layers": 0}, "`num_layers` is 0"),
        ({"layer_types": ["full_attention", "mamba"]}, "`layer_types` is"),
        ({"dtype": "float8_e4m3fn"}, "`dtype` is 'float8_e4m3fn'; accepted: float16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not supported; supported: none"),
    ],
)
def test_unsupported_features_name_field_value_and_what_is_accepted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(config(**changes))


def test_windows_follow_each_family() -> None:
    sliding = {"sliding_window": 8, "use_sliding_window": True}
    assert windows(sliding_window=8) == (None,) * 4
    assert windows(**sliding) == (None,) * 4  # max_window_layers is 28 by default
    assert windows(**sliding, max_window_layers=2) == (None, None, 8, 8)
    mixed = ["sliding_attention", "full_attention"] * 2
    assert windows(**sliding, layer_types=mixed) == (8, None, 8, None)
    assert windows(architectures=["MistralForCausalLM"], sliding_window=8) == (8,) * 4
    assert windows(architectures=["MistralForCausalLM"], sliding_window=None) == (None,) * 4
    assert windows(architectures=["MistralForCausalLM"]) == (4096,) * 4
    assert windows(architectures=["LlamaForCausalLM"], sliding_window=8) == (None,) * 4


def test_attention_spec_of_a_rank() -> None:
    facts: dict[str, Any] = {"block_size": 16, "dtype": "float32", "device_type": "cpu"}
    spec = attention_spec(config(), tp_size=4, **facts)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (1, 1, 16, 0.25)
    assert spec.sliding_window is None
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide num_attention_heads"):
        attention_spec(config(), tp_size=3, **facts)


def test_rope_types_have_formulas_and_entries_have_classes() -> None:
    import importlib

    from headrace.layers.rotary import FREQUENCIES

    assert set(FREQUENCIES) == set(ROPE_FIELDS)
    for entry in MODELS:
        assert hasattr(importlib.import_module(entry.module), entry.class_name)
