"""Formats that mix within one checkpoint: one layer's experts and one dense linear are in int8, the rest is plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from mixed_format import quantize
from tiny_configs import save_tiny_model

from headrace.errors import CheckpointError, UnsupportedModelError
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE

PROMPTS = [[5], [17, 3, 99], list(range(20, 45))]
SOME = r"layers\.1\.mlp\.experts\.\d+\.\w+|layers\.0\.self_attn\.o_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("Qwen3MoeForCausalLM", "full", tmp_path / "mixed")
    return tmp_path / "mixed"


def test_a_mixed_checkpoint_gives_the_tokens_of_the_widened_one(folder: Path, tmp_path: Path) -> None:
    quantize(folder, SOME, tmp_path / "plain")
    mixed, plain = Driver(folder), Driver(tmp_path / "plain")
    held = {
        path: layer.scheme.format.name
        for path, layer in mixed.model.named_modules()
        if isinstance(layer, Linear | SparseMoE)
    }
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


def test_parts_of_one_linear_in_several_formats_are_refused(folder: Path) -> None:
    quantize(folder, r"layers\.0\.self_attn\.q_proj")
    with pytest.raises(UnsupportedModelError, match=r"qkv_proj is computed as one.*q_proj: int8.*k_proj: bf16"):
        Driver(folder)


def test_a_tensor_of_another_type_is_refused(folder: Path) -> None:
    quantize(folder, SOME)
    edit(folder, ignore=["lm_head", "re:.*(self_attn|mlp).*"])
    with pytest.raises(CheckpointError, match=r"is of type I8; accepted: F16, BF16, F32, F64|does not have"):
        Driver(folder)


def test_dummy_weights_fill_packed_tensors_too(folder: Path) -> None:
    quantize(folder, SOME)
    first, second = (Driver(folder, load_format="dummy") for _ in range(2))
    first.start(1), second.start(1)
    logits = first.step([PROMPTS[2]])
    assert torch.equal(logits, second.step([PROMPTS[2]]))
    assert logits.isfinite().all()


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
