"""The table of families: what it accepts, and what it says of the rest. It loads no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.feed_forwards import Experts
from headrace.hub import DEMO_FOLDER
from headrace.model_config import ModelConfig
from headrace.models.registry import DESCRIBED, MODELS, OWN_NAMES, find_entry
from headrace.models.ropes import ROPE_FIELDS
from headrace.models.served import attention_specs, describe, read_served_config, resolve
from headrace.planner.catalogue import catalogue

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


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"]}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3_30B_A3B: dict[str, Any] = catalogue()["qwen3-30b-a3b"].config | {
    "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "initializer_range": 0.02,
    "max_window_layers": 48, "model_type": "qwen3_moe", "rope_scaling": None, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "use_cache": True,
}  # fmt: skip
"""with the fields that say nothing of what is computed"""


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


def windows(**changes: Any) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in describe(config(**changes)).layers)


BLOOM = {"architectures": ["BloomForCausalLM"], "n_embed": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
TEXT = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
AYA = {
    "architectures": ["AyaVisionForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"hidden_size": 32},
}
IDEFICS = {"architectures": ["IdeficsForVisionText2Text"], **TEXT, "vision_config": {"depth": 32}}
SPEECH = {"architectures": ["SpeechForConditionalGeneration"], "text_config": TEXT, "audio_config": {}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (BLOOM, "architecture 'BloomForCausalLM' is not served yet"),
        (
            AYA,
            "architecture 'AyaVisionForConditionalGeneration' is a vision-language model, which is not served yet",
        ),
        (IDEFICS, "architecture 'IdeficsForVisionText2Text' is a vision-language model, which is not served yet"),
        (SPEECH, "architecture 'SpeechForConditionalGeneration' is a model of more than text, which is not served yet"),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_a_folder_of_another_family_is_refused_by_its_architecture(
    raw: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Whose config.json has other fields, so that what is missing of ours would say nothing."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(str(tmp_path))
    assert str(caught.value).startswith(said)
    assert "; served: LlamaForCausalLM, MistralForCausalLM" in str(caught.value)


def test_a_refusal_names_the_nearest_family_and_what_it_does_not_know() -> None:
    like_qwen = {**QWEN3_30B_A3B, "architectures": ["Qwen9MoeForCausalLM"], "expert_gate": "swish", "twists": 3}
    said = "nearest is Qwen3MoeForCausalLM, which knows nothing of `expert_gate`, `twists`; served"
    with pytest.raises(UnsupportedModelError, match=said):
        resolve(ModelConfig.from_dict(like_qwen))
    said = (
        "nearest is Qwen3MoeForCausalLM, which knows nothing of `twists` and refuses the value of `hidden_act`; served"
    )
    with pytest.raises(UnsupportedModelError, match=said):
        resolve(ModelConfig.from_dict({**like_qwen, "expert_gate": None, "hidden_act": "twisted"}))
    with pytest.raises(UnsupportedModelError, match="'FalconH1ForCausalLM' is not served yet: it has Mamba-2 layers"):
        resolve(config(architectures=["FalconH1ForCausalLM"]))
    with pytest.raises(UnsupportedModelError, match="'JambaForCausalLM' is not served yet: it has Mamba layers"):
        resolve(config(architectures=["JambaForCausalLM"]))


def test_a_served_family_is_read_and_every_other_architecture_refused() -> None:
    assert read_served_config(DEMO_FOLDER).architecture == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModelError, match="architecture 'BloomForCausalLM' is not served yet"):
        resolve(config(architectures=["BloomForCausalLM"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, '`hidden_act` is "mish"; must be one of silu, swish, gelu, gelu_pytorch_tanh'),
        ({"rope_scaling": {"rope_type": "xrope"}}, "rope type is 'xrope'; accepted: default, linear"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "`rope_scaling` of type longrope lacks short_factor, long_factor",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7 + ["x"], "long_factor": [1.0] * 8}},
            "`rope_scaling.short_factor` is",
        ),
        ({"rope_scaling": {"type": "linear"}}, "`rope_scaling` of type linear lacks factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "`rope_parameters` is .*must be one set for all layers",
        ),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5; must be 1.0"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3; must divide"),
        ({"num_key_value_heads": None}, "`num_key_value_heads` is missing"),
        ({"head_dim": 15}, "`head_dim` is 15; must be even"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"layer_types": ["full_attention", "mamba"]}, "`layer_types` is"),
        ({"layer_types": ["full_attention"] * 5}, "`layer_types` is.*must be full_attention or.*each of the 4 layers"),
        ({"layer_types": 4}, "`layer_types` is 4; must be a list of texts"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, '`rope_scaling.factor` is "2"; must be a finite'),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 1e308}}, "`rope_scaling.beta_fast` is 1e.308; must be"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": "x"}}, '`rope_scaling.mscale` is "x"; must be a finite'),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r'`rope_scaling.rope_type` is \["yarn"\]; must be a text'),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            "`rope_scaling.high_freq_factor` is 0.5; must be at least low_freq_factor .1.",
        ),
        ({"use_sliding_window": "yes"}, '`use_sliding_window` is "yes"; must be true or false'),
        ({"use_sliding_window": True, "sliding_window": -8}, "`sliding_window` is -8; must be an integer from 1"),
        ({"max_window_layers": "all"}, '`max_window_layers` is "all"; must be an integer from 0'),
        ({"dtype": "float8_e4m3fn"}, "`dtype` is 'float8_e4m3fn'; accepted: float16"),
        (GEMMA4, "`hidden_size_per_layer_input` is 256; must be 0 or null"),
        (GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}, "`num_kv_shared_layers` is 2; must"),
        (
            GEMMA4 | {"hidden_size_per_layer_input": None, "use_bidirectional_attention": "all"},
            '`use_bidirectional_attention` is "all"; must be null or vision',
        ),
        ({"quantization_config": {"quant_method": "gguf"}}, "'gguf' is not served; served: compressed-tensors, fp8"),
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


def test_windows_of_the_sparse_families() -> None:
    qwen2 = {"architectures": ["Qwen2MoeForCausalLM"], **SPARSE, "shared_expert_intermediate_size": 8}
    sliding = {"sliding_window": 8, "use_sliding_window": True}
    assert windows(**qwen2, sliding_window=0, use_sliding_window=False) == (None,) * 4
    assert windows(**qwen2, **sliding) == (8, None, 8, None)
    assert windows(**qwen2, **sliding, max_window_layers=2) == (8, None, None, None)
    assert windows(**qwen2, **sliding, layer_types=["full_attention"] * 3 + ["sliding_attention"])[3] == 8
    qwen3 = {"architectures": ["Qwen3MoeForCausalLM"], **SPARSE}
    assert windows(**qwen3, sliding_window=8) == (None,) * 4
    assert windows(**qwen3, **sliding) == (8,) * 4
    mixtral = {"architectures": ["MixtralForCausalLM"], **SPARSE, "num_local_experts": 4}
    assert windows(**mixtral) == (None,) * 4
    assert windows(**mixtral, sliding_window=8) == (8,) * 4


def test_which_layers_are_sparse_and_what_of() -> None:
    def sparse(raw: dict[str, Any]) -> list[bool]:
        return [bool(layer.feed_forward.num_experts) for layer in describe(ModelConfig.from_dict(raw)).layers]

    def experts(raw: dict[str, Any]) -> Experts:
        blocks = [layer.feed_forward for layer in describe(ModelConfig.from_dict(raw)).layers]
        (found,) = {block for block in blocks if isinstance(block, Experts)}
        return found

    spec = experts(QWEN3_30B_A3B)
    sizes = (spec.num_experts, spec.experts_per_token, spec.expert_intermediate_size, spec.renormalize)
    assert sizes == (128, 8, 768, True)
    assert sparse(QWEN3_30B_A3B) == [True] * 48
    assert spec.intermediate_size == 0
    qwen2 = RAW | {"architectures": ["Qwen2MoeForCausalLM"], **SPARSE, "shared_expert_intermediate_size": 40}
    odd = qwen2 | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert sparse(odd) == [False, True, False, False]
    spec = experts(odd)
    assert (spec.intermediate_size, spec.renormalize) == (40, False)
    renamed = {key: value for key, value in qwen2.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert experts(renamed).num_experts == 6
    mixtral = RAW | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    assert (experts(mixtral).expert_intermediate_size, experts(mixtral).renormalize) == (96, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "`num_experts_per_tok` is 9; must be an integer from 1 to 4"),
        ({"num_experts_per_tok": "2"}, '`num_experts_per_tok` is "2"; must be an integer from 1 to 4'),
        ({"num_experts": 0}, "`num_experts` is 0; must be an integer from 1"),
        ({"num_experts": None}, "lacks `num_experts`|`num_experts` is null"),
        ({"moe_intermediate_size": None}, "`moe_intermediate_size` is missing"),
        ({"moe_intermediate_size": 0}, "`moe_intermediate_size` is 0; must be an integer from 1"),
        ({"shared_expert_intermediate_size": 0}, "`shared_expert_intermediate_size` is 0"),
        ({"decoder_sparse_step": 0}, "`decoder_sparse_step` is 0; must be an integer from 1"),
        ({"mlp_only_layers": [None]}, r"`mlp_only_layers` is \[null\]; must be a list of integers"),
        ({"norm_topk_prob": "no"}, '`norm_topk_prob` is "no"; must be true or false'),
        ({"qkv_bias": False}, "`qkv_bias` is False; accepted: true"),
    ],
)
def test_sparse_models_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    base = {"architectures": ["Qwen2MoeForCausalLM"], **SPARSE, "shared_expert_intermediate_size": 8}
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(config(**base | changes))


def test_attention_specs_of_a_rank() -> None:
    facts: dict[str, Any] = {"block_size": 16, "dtype": "float32", "device_type": "cpu"}
    (spec, *_) = attention_specs(config(), tp_size=4, **facts)
    assert spec is not None
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale) == (1, 1, 16, 0.25)
    assert spec.sliding_window is None
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide num_attention_heads"):
        attention_specs(config(), tp_size=3, **facts)


def test_an_installed_package_may_bring_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "brought-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[headrace.models]\nBrought = brought:ENTRY\nLost = nowhere:ENTRY\n")
    (tmp_path / "brought.py").write_text(
        "from headrace.models.descriptions import llama\nfrom headrace.models.entry import ModelEntry\n"
        "from headrace.models.registry import LLAMA\n"
        "ENTRY = ModelEntry('Brought', llama, *LLAMA)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve(config(architectures=["Brought"])).architecture == "Brought"
    with pytest.raises(UnsupportedModelError, match=r"'Lost': nowhere:ENTRY .* cannot be loaded: No module named"):
        resolve(config(architectures=["Lost"]))
    with pytest.raises(UnsupportedModelError, match=r"'Unknown' is not served yet; nearest is .*; served"):
        resolve(config(architectures=["Unknown"]))


def test_files_may_name_an_architecture_as_its_own_code_does() -> None:
    for own, theirs in OWN_NAMES.items():
        assert find_entry(own) == replace(DESCRIBED[theirs], architecture=own)


def test_rope_types_have_formulas_and_entries_have_classes() -> None:
    import importlib

    from headrace.layers.rotary import FREQUENCIES

    assert set(FREQUENCIES) == set(ROPE_FIELDS)
    for entry in MODELS:
        assert not entry.module or hasattr(importlib.import_module(entry.module), entry.class_name)
