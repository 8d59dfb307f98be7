"""Shapes: parameters and cache counted from config.json, part by part."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.models.registry import SERVED
from headrace.parameters import total
from headrace.planner.catalogue import catalogue, find_model
from headrace.planner.shapes import ModelShape, shape_of
from headrace.quantization.checkpoint_format import read_format
from headrace.quantization.formats import FORMATS, find_format
from headrace.quantization.linear_rules import PARTS


def parts_in(shape: ModelShape, weight_format: str) -> tuple[str, ...]:
    """Which parts are in a format when `weight_format` is asked for."""
    return tuple(part for part in PARTS if shape.part_format(part, weight_format).name != "bf16")


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}

FIELDS: dict[str, Any] = {
    **LLAMA,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_layer_start_index": 0,
    "shared_expert_intermediate_size": 48,
    "n_routed_experts": 4,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"] * 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = (
    "Mixtral", "GptOss", "MiniMax", "Olmoe", "Deepseek", "Qwen3Next", "Kimi", "MistralLarge", "Mistral4",
    "Llama4", "Dots1", "HYV3", "SolarOpen", "Mellum", "FlexOlmo", "AXK1", "HunYuanMoE", "Afmoe", "Phimoe",
)  # fmt: skip
"""how architectures begin that have experts and no Moe in their names"""
"""of any family that headrace serves"""
OWN: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 3},
    "AXK1ForCausalLM": {"n_group": 1, "topk_group": 1},
    "AfmoeForCausalLM": {"num_dense_layers": 0},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    "Gemma4ForConditionalGeneration": {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
}
"""fields that no other family has so"""


def shape(**changes: Any) -> ModelShape:
    return shape_of({**LLAMA, **changes}, "tiny")


def test_a_llama_by_hand() -> None:
    found = shape()
    (group,) = found.groups
    attention, mlp = group.mixer, group.feed_forward
    assert total((*attention.parameters, *mlp.parameters), "linear") == total(group.mixer.parameters) + total(
        mlp.parameters
    )
    assert found.num_layers * attention.cached_values == 96
    assert (group.count, total(group.layer.norm_parameters)) == (3, 128)
    assert total(group.mixer.parameters) == 64 * 64 + 2 * 64 * 16 + 64 * 64
    assert total(attention.parameters, split="kv_heads") == 2 * 64 * 16
    assert (total(attention.parameters, split="whole"), total(attention.parameters, "plain")) == (0, 0)
    assert (attention.kind, attention.head_dim, attention.window, attention.cached_values) == ("gqa", 8, None, 32)
    assert (total(mlp.parameters), mlp.num_experts, mlp.intermediate_size) == (3 * 64 * 160, 0, 160)
    assert found.embedding_weights == found.head_weights == 64_000
    assert found.total_weights == 2 * 64_000 + 3 * (total(group.mixer.parameters) + total(mlp.parameters) + 128) + 64
    assert found.active_weights == found.total_weights - 64_000 + 64
    assert (found.dtype, found.weight_format, found.spec.max_position_embeddings) == ("float16", "bf16", 512)
    assert not found.is_moe
    assert not found.is_mla


@pytest.mark.parametrize("architecture", SERVED)
def test_every_family_that_is_served_can_be_counted(architecture: str) -> None:
    found = shape_of({**FIELDS, **OWN.get(architecture, {}), "architectures": [architecture]}, "tiny")
    assert found.num_layers == 3
    assert found.is_moe == (architecture.startswith(EXPERTS) or "Moe" in architecture)
    for layer in {group.layer for group in found.groups} if found.is_moe else ():
        assert (layer.feed_forward.num_experts, layer.feed_forward.experts_per_token) == (4, 2)
        assert layer.weights - layer.active_weights == 2 * layer.expert_weights


def test_biases_and_norms_of_heads_are_counted_and_stay_plain() -> None:
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
    assert total(shape_of(config, "tiny").groups[0].mixer.parameters, "plain") == 64 + 2 * 16
    config = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
    group = shape_of(config, "tiny").groups[0]
    assert total(group.mixer.parameters, "plain") == total(group.mixer.parameters, split="whole") == 16


def test_windows_split_the_layers_into_groups() -> None:
    gemma, oss, scout = find_model("gemma-3-27b"), find_model("gpt-oss-120b"), find_model("llama-4-scout")
    assert [(g.count, g.mixer.window) for g in gemma.groups] == [(52, 1024), (10, None)]
    assert [(g.count, g.mixer.window) for g in oss.groups] == [(18, 128), (18, None)]
    assert [(g.count, g.mixer.window) for g in scout.groups] == [(36, 8192), (12, None)]
    maverick = find_model("llama-4-maverick")
    assert {(g.count, g.mixer.window, g.feed_forward.num_experts) for g in maverick.groups} == {
        (24, 8192, 0),
        (12, 8192, 128),
        (12, None, 128),
    }


def test_latent_attention_caches_one_latent_for_all_heads() -> None:
    v3, v32 = find_model("deepseek-v3"), find_model("deepseek-v3.2")
    assert v3.is_mla
    assert v3.is_moe
    attention = v3.groups[0].mixer
    assert (attention.cached_values, attention.num_kv_heads, attention.sparse_top_k) == (576, 1, None)
    down = 7168 * (1536 + 576) + 1536 + 512
    up = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert (total(attention.parameters), total(attention.parameters, split="whole")) == (down + up, down)
    sparse = v32.groups[0].mixer
    assert (sparse.cached_values, sparse.sparse_top_k) == (576 + 128, 2048)
    assert total(sparse.parameters) - total(attention.parameters) == 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    assert [(g.count, g.feed_forward.num_experts, g.feed_forward.intermediate_size) for g in v3.groups] == [
        (3, 0, 18432),
        (58, 256, 2048),
    ]


def test_what_publishers_say_a_token_uses() -> None:
    for name, billions in {
        "deepseek-v3": 36.6,  # "Activation parameters: 36.6B (including 0.9B for the output Head)"
        "gpt-oss-120b": 5.13,
        "gpt-oss-20b": 3.61,
        "mixtral-8x7b": 12.8,  # 12.9 with the embedding, of which one row is read
    }.items():
        assert find_model(name).active_weights / 1e9 == pytest.approx(billions, rel=0.01), name


def test_the_layer_for_further_tokens_and_the_vision_encoder_are_extra() -> None:
    v3, gemma, kimi = find_model("deepseek-v3"), find_model("gemma-3-27b"), find_model("kimi-k2.5")
    assert v3.spec.draft_weights == v3.extra_weights
    assert v3.extra_weights / 1e9 == pytest.approx(11.6, rel=0.01)  # DeepSeek: "11.5B unique parameters"
    assert (gemma.spec.draft_weights, kimi.spec.draft_weights) == (0, 0)
    assert gemma.extra_weights / 1e6 == pytest.approx(423, rel=0.01)
    assert kimi.extra_weights / 1e6 == pytest.approx(471, rel=0.01)


def test_the_format_of_the_checkpoint_and_what_it_leaves_alone() -> None:
    assert find_model("llama-3.1-8b").weight_format == "bf16"
    assert find_model("deepseek-r1").weight_format == "fp8"
    oss, kimi = find_model("gpt-oss-20b"), find_model("kimi-k2.5")
    assert (oss.weight_format, parts_in(oss, "mxfp4")) == ("mxfp4", ("experts",))
    assert (kimi.weight_format, parts_in(kimi, "int4")) == ("int4", ("experts",))
    assert parts_in(kimi, "fp8") == PARTS
    assert kimi.bytes_per_weight("int4") == 0.5625  # 32 weights share a scale of two bytes
    assert kimi.bytes_per_weight("fp8") == FORMATS["fp8"].bytes_per_weight


@pytest.mark.parametrize(
    ("left_alone", "parts"),
    [
        (["lm_head"], PARTS),
        (["model.layers.2.mlp.gate", "lm_head"], PARTS),  # the router's name starts like a projection's
        (["re:.*self_attn.*"], ("dense", "experts")),
        (["model.layers.*.self_attn", "model.layers.*.mlp.router"], ("dense", "experts")),
        (["re:.*shared_experts.*", "re:.*self_attn.*"], ("experts",)),
        (["model.layers.2.self_attn.q_proj"], ("dense", "experts")),
    ],
)
def test_lists_of_what_was_left_alone(left_alone: list[str], parts: tuple[str, ...]) -> None:
    assert (*read_format({"quant_method": "fp8", "modules_to_not_convert": left_alone}).parts(4),) == parts


def test_a_format_that_cannot_be_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r'`quantization_config.bits` is "4"; must be an integer'):
        shape(quantization_config={"quant_method": "awq", "bits": "4"})
    with pytest.raises(ConfigError, match="quant_method 'bitsandbytes' is not served"):
        shape(quantization_config={"quant_method": "bitsandbytes"})


@pytest.mark.parametrize("front", ["model.", "model.language_model."])
def test_parts_in_formats_of_their_own(front: str) -> None:
    names = {f"{front}layers.*.self_attn.q_proj": "FP8", f"{front}layers.*.mlp.gate_proj": "NVFP4"}
    mixed = shape(
        **({} if front == "model." else {"vision_config": {}}),
        quantization_config={
            "quant_method": "modelopt",
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {name: {"quant_algo": form} for name, form in names.items()},
            },
        },
    )
    held = [mixed.part_format(part, mixed.weight_format).name for part in PARTS]
    assert held == ["fp8", "nvfp4", "bf16"]
    assert parts_in(mixed, mixed.weight_format) == ("attention", "dense")


def test_bytes_of_a_weight() -> None:
    size = {name: one.bytes_per_weight for name, one in FORMATS.items()}
    assert size["bf16"] == 2.0
    assert 1.0 < size["fp8"] == size["int8"] < 1.002
    assert size["mxfp4"] * 8 == 4.25
    assert size["int4"] * 128 == 64 + 2 + 0.5
    with pytest.raises(ConfigError, match="fp5"):
        find_format("fp5")


def test_the_same_model_in_another_format() -> None:
    kimi = find_model("kimi-k2.5")
    fp8 = kimi.in_format("fp8", fp8_kv_cache=True)
    assert (fp8.weight_format, parts_in(fp8, "fp8"), fp8.fp8_kv_cache) == ("fp8", PARTS, True)
    assert fp8.total_weights == kimi.total_weights


def test_errors_name_the_architecture_and_the_field() -> None:
    with pytest.raises(ConfigError, match=r"'MambaForCausalLM' of tiny .*LlamaForCausalLM"):
        shape(architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match="'none'"):
        shape_of({}, "tiny")
    config = dict(catalogue()["deepseek-v3"].config)
    del config["kv_lora_rank"]
    with pytest.raises(ConfigError, match=r"config.json of mine \(DeepseekV3ForCausalLM\) lacks `kv_lora_rank`"):
        shape_of(config, "mine")


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama-3.1-8b", {"vocab_size": "abc"}, '`vocab_size` is "abc"; must be an integer'),
        ("llama-3.1-8b", {"hidden_size": -4096}, "`hidden_size` is -4096; must be an integer from 1"),
        ("llama-3.1-8b", {"num_attention_heads": 0}, "`num_attention_heads` is 0; must be an integer from 1"),
        ("llama-3.1-8b", {"quantization_config": "fp8"}, '`quantization_config` is "fp8"; must be an object'),
        ("llama-3.1-8b", {"text_config": [1]}, r"`text_config` is \[1\]; must be an object"),
        ("llama-3.1-8b", {"architectures": [["x"]]}, r'`architectures` is \[\["x"\]\]; must be a list of texts'),
        ("qwen3-30b-a3b", {"num_experts": -8}, "`num_experts` is -8; must be an integer from 1"),
        ("deepseek-v3", {"n_routed_experts": -4096}, "`n_routed_experts` is -4096; must be an integer from 1"),
        ("deepseek-v3", {"num_experts_per_tok": 257}, "`num_experts_per_tok` is 257; must be an integer from 1 to 256"),
        ("deepseek-v3", {"hidden_size": float("inf")}, "`hidden_size` is Infinity; must be an integer"),
        ("deepseek-v3.2", {"q_lora_rank": None}, "`q_lora_rank` is null; must be an integer from 1"),
        ("gpt-oss-20b", {"layer_types": 3}, "`layer_types` is 3; must be a list of texts"),
        ("gemma-3-27b", {"vision_config": {"patch_size": 0}}, "lacks `vision_config.hidden_size`"),
        (
            "gemma-3-27b",
            {"vision_config": {"hidden_size": 8, "patch_size": 0}},
            "`vision_config.patch_size` is 0; must",
        ),
    ],
)
def test_a_value_that_is_none_of_its_field_is_one_line(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        shape_of({**catalogue()[model].config, **changes}, model)
    assert "\n" not in str(caught.value)


WILD: list[Any] = [None, True, 0, -1, 1, 2.5, 1e400, float("nan"), 10**400, 2**31 - 1, "x", "", [], [1], [None], {}]


@pytest.mark.parametrize("count", [1, pytest.param(len(WILD), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*catalogue(), *SERVED])
def test_whatever_a_field_holds_parameters_are_counted_or_one_line_is_said(name: str, count: int) -> None:
    config = (
        catalogue()[name].config if name in catalogue() else {**FIELDS, **OWN.get(name, {}), "architectures": [name]}
    )
    for path in _paths(config):
        for value in random.sample(WILD, count):
            changed = copy.deepcopy(config)
            _put(changed, path, value)
            with contextlib.suppress(ConfigError):
                found = shape_of(changed, "tiny")
                assert 0 < found.active_weights <= found.total_weights + found.spec.hidden_size, (path, value)


def _paths(config: dict[str, Any]) -> Iterator[list[str]]:
    for name, value in config.items():
        yield [name]
        if isinstance(value, dict):
            yield from ([name, *rest] for rest in _paths(value))


def _put(config: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        config = config[name]
    config[path[-1]] = value


def test_a_shape_can_be_a_key() -> None:
    assert len({find_model(name) for name in catalogue()}) == len(catalogue())
