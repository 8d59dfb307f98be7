"""Formats that mix within one checkpoint: one layer's experts and one dense linear are in int8, the rest is plain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, make_context
from mixed_format import quantize
from safetensors.torch import load_file, save_file
from tiny_configs import VARIANTS, save_tiny_model, tiny_config

from headrace.errors import CheckpointError
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models import loader
from headrace.models.served import describe

PROMPTS = [[5], [17, 3, 99], list(range(20, 45))]
LAYERS = (Linear, SparseMoE)
SOME = r"layers\.1\.mlp\.experts\.\d+\.\w+|layers\.0\.self_attn\.o_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("Qwen3MoeForCausalLM", "full", tmp_path / "mixed")
    return tmp_path / "mixed"


def test_a_mixed_checkpoint_gives_the_tokens_of_the_widened_one(folder: Path, tmp_path: Path) -> None:
    quantize(folder, SOME, tmp_path / "plain")
    mixed, plain = Driver(folder), Driver(tmp_path / "plain")
    held = {path: layer.scheme.format.name for path, layer in mixed.model.named_modules() if isinstance(layer, LAYERS)}
    assert {path for path, name in held.items() if name == "int8"} == {
        "model.layers.1.mlp",
        "model.layers.0.self_attn.o_proj",
    }
    (note, _) = mixed.model.notes
    assert note.startswith("Quantization int8: 1 linears and the experts of 1 layers. Unquantized: ")
    assert mixed.model.weight_bytes < plain.model.weight_bytes
    assert mixed.greedy(PROMPTS, 24) == plain.greedy(PROMPTS, 24)


def test_what_is_left_alone_may_be_named_as_it_is_fused_here(folder: Path, tmp_path: Path) -> None:
    quantize(folder, r"self_attn\.o_proj", tmp_path / "plain")
    edit(folder, ignore=["lm_head", "qkv_proj", "model.layers.0.mlp.experts", "model.layers.1.mlp"])
    assert Driver(folder).greedy(PROMPTS, 4) == Driver(tmp_path / "plain").greedy(PROMPTS, 4)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Qwen2ForCausalLM"])
def test_parts_of_one_linear_may_be_in_several_formats(architecture: str, tmp_path: Path) -> None:
    """Attention's, with biases or not; those of experts, of which gate and up are then widened; the shared ones'."""
    save_tiny_model(architecture, "full", tmp_path / "mixed")
    some = r"self_attn\.[qv]_proj|\d\.mlp\.gate_proj|layers\.1\.mlp\.experts\.\d+\.(gate|down)_proj"
    quantize(tmp_path / "mixed", some, tmp_path / "plain")
    mixed, plain = Driver(tmp_path / "mixed"), Driver(tmp_path / "plain")
    held = {path: one.scheme.format.name for path, one in mixed.model.named_modules() if isinstance(one, LAYERS)}
    assert held["model.layers.1.self_attn.qkv_proj"] == held["model.layers.0.self_attn.qkv_proj"] == "int8 and bf16"
    assert held["model.layers.1.self_attn.o_proj"] == "bf16"
    widened = [note for note in mixed.model.notes if "widened" in note]
    if architecture == "Qwen3MoeForCausalLM":
        assert held["model.layers.1.mlp"] == "int8 and bf16"
        assert widened == ["1 layers of experts are widened at load: gate and up are in different formats"]
    assert mixed.model.weight_bytes < plain.model.weight_bytes
    assert mixed.greedy(PROMPTS, 12) == plain.greedy(PROMPTS, 12)


@pytest.mark.parametrize("front", ["model.language_model.", "language_model.model."])
def test_formats_are_stated_under_names_of_files(front: str) -> None:
    """Of a model of more than text, whose experts have another name here."""
    architecture, attention, experts = "Gemma4ForConditionalGeneration", "layers.0.self_attn", "layers.0.experts"
    config = tiny_config(architecture, VARIANTS[architecture]["experts"]).to_dict()
    named = {f"{front}{attention}.{part}_proj": "FP8" for part in "qkvo"}
    named |= {f"{front}{experts}.{n}.{part}_proj": "NVFP4" for n in range(7) for part in ("gate", "up", "down")}
    stated = {name: {"quant_algo": algorithm} for name, algorithm in named.items()}
    config["quantization_config"] = {"quant_method": "modelopt", "quantized_layers": stated}
    served = ModelConfig.from_dict({**config, "architectures": [architecture]})
    context = make_context(served)
    model = loader.build_model(served, context)
    layers = [(path, one) for path, one in model.named_modules() if isinstance(one, LAYERS)]
    loader.attach_schemes(served, layers, context, None, names=describe(served).names)
    held = {path: one.scheme.format.name for path, one in layers if one.scheme.format.name != "bf16"}
    linears = dict.fromkeys((f"model.{attention}.qkv_proj", f"model.{attention}.o_proj"), "fp8")
    assert held == {**linears, "model.layers.0.moe": "nvfp4"}


def test_a_linear_that_the_files_hold_unquantized_is_so_whatever_config_says(folder: Path, tmp_path: Path) -> None:
    """Some tools leave sizes alone that their blocks do not divide, and say nothing."""
    quantize(folder, SOME, tmp_path / "plain")
    edit(folder, ignore=[])
    mixed = Driver(folder)
    (note, _) = mixed.model.notes
    assert "model.layers.*.self_attn.qkv_proj (unquantized in the checkpoint's files) x 2" in note
    assert mixed.greedy(PROMPTS, 12) == Driver(tmp_path / "plain").greedy(PROMPTS, 12)


def test_routers_may_be_quantized(tmp_path: Path) -> None:
    """And the shared expert's gate, which is read with the router; they are widened at load."""
    save_tiny_model("Qwen2MoeForCausalLM", "dense-layers", tmp_path / "model")
    some = r"layers\.1\.mlp\.(gate|experts\.\d+\.\w+)|mlp\.shared_expert_gate"
    quantize(tmp_path / "model", some, tmp_path / "plain")
    assert Driver(tmp_path / "model").greedy(PROMPTS, 12) == Driver(tmp_path / "plain").greedy(PROMPTS, 12)


def test_a_linear_that_the_files_hold_quantized_is_so_whatever_config_says(folder: Path, tmp_path: Path) -> None:
    quantize(folder, SOME, tmp_path / "plain")
    edit(folder, ignore=["lm_head", "re:.*(self_attn|mlp).*"])
    assert Driver(folder).greedy(PROMPTS, 12) == Driver(tmp_path / "plain").greedy(PROMPTS, 12)


def test_a_tensor_of_another_type_is_refused(folder: Path) -> None:
    quantize(folder, SOME)
    edit(folder, config_groups={})
    with pytest.raises(CheckpointError, match=r"is of type I8; accepted: F16, BF16, F32, F64|does not have"):
        Driver(folder)


@pytest.mark.parametrize("plain", [0, 2])
def test_experts_of_a_layer_that_are_not_all_in_one_format_are_refused_by_name(plain: int, folder: Path) -> None:
    quantize(folder, rf"layers\.1\.mlp\.experts\.[^{plain}]\.\w+")
    said = rf"layers\.1\.mlp\.experts\.{plain}\.gate_proj is unquantized in .* layer that are all in one format"
    with pytest.raises(CheckpointError, match=said):
        Driver(folder)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_experts_that_are_one_tensor_as_in_transformers(architecture: str, tmp_path: Path) -> None:
    """As amd-quark writes them beside quantized linears: what the model's state has, under the names that it has."""
    save_tiny_model(architecture, "full", tmp_path / "model")
    quantize(tmp_path / "model", r"self_attn\.\w_proj", tmp_path / "plain")
    expected = Driver(tmp_path / "plain").greedy(PROMPTS, 12)
    file = tmp_path / "model" / "model.safetensors"
    tensors, stacked = load_file(file), {}
    for name in list(tensors):
        found = re.match(r"(.*)\.(mlp|block_sparse_moe)\.experts\.0\.(gate_proj|w1)\.weight", name)
        if found:
            layer, block, gate = found.groups()
            up, down = {"w1": ("w3", "w2")}.get(gate, ("up_proj", "down_proj"))
            rows = {"gate_up_proj": (gate, up), "down_proj": (down,)}
            for whole, parts in rows.items():
                experts = sorted({key.split(".")[5] for key in tensors if key.startswith(f"{layer}.{block}.experts.")})
                weights = [
                    [tensors.pop(f"{layer}.{block}.experts.{e}.{part}.weight") for part in parts] for e in experts
                ]
                stacked[f"{layer}.mlp.experts.{whole}"] = torch.stack([torch.cat(one) for one in weights])
            stacked[f"{layer}.mlp.gate.weight"] = tensors.pop(f"{layer}.{block}.gate.weight")
    assert len(stacked) == 6
    save_file(tensors | stacked, file)
    assert Driver(tmp_path / "model").greedy(PROMPTS, 12) == expected


def test_dummy_weights_fill_packed_tensors_too(folder: Path) -> None:
    quantize(folder, SOME)
    first, second = (Driver(folder, load_format="dummy") for _ in range(2))
    logits = first.logits(PROMPTS[2])
    assert torch.equal(logits, second.logits(PROMPTS[2]))
    assert logits.isfinite().all()


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
