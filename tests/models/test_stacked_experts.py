"""Quantized experts that a checkpoint holds in one tensor a layer, as transformers' modules do, or with the rows of
gate and up in turn, as gpt-oss does: each gives what the weights that they stand for do."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, make_context
from safetensors.torch import load_file, save_file
from tiny_configs import VARIANTS, save_tiny_model, shard
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.errors import CheckpointError
from headrace.kernels.coded import E2M1
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models import filling
from headrace.models.loader import load_model

PROMPTS = [[5], [17, 3, 99], list(range(20, 45))]
WIDTH = 40
"""of an expert: the rows of gate and up share blocks of 16 rows, and words of 8 zero points"""
Made = tuple[dict[str, Tensor], Tensor]
"""the tensors of a stacked weight [experts, out, in], by what follows its name; what they stand for"""


def fp8_blocks(weight: Tensor) -> Made:
    """Blocks of 16 x 32, the last ones of a side smaller."""
    experts, outputs, inputs = weight.shape
    blocks = -(-outputs // 16), -(-inputs // 32)
    filled = torch.zeros(experts, blocks[0] * 16, blocks[1] * 32)
    filled[:, :outputs, :inputs] = weight
    scales = filled.unflatten(1, (-1, 16)).unflatten(3, (-1, 32)).abs().amax((2, 4)) / 448
    wide = scales.repeat_interleave(16, 1).repeat_interleave(32, 2)[:, :outputs, :inputs]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scales}, codes.float() * wide


def transformers_fp8(weight: Tensor) -> Made:
    made, wide = fp8_blocks(weight)
    return {"": made[""], "_scale_inv": made["_scale"]}, wide


def fp8_tensor(weight: Tensor) -> Made:
    """As ModelOpt does: a number for each expert."""
    scales = weight.abs().amax((1, 2)) / 448
    codes = (weight / scales[:, None, None]).to(torch.float8_e4m3fn)
    return {"": codes, "_weight_scale": scales}, codes.float() * scales[:, None, None]


def int4(weight: Tensor) -> Made:
    """As compressed-tensors packs it: groups of 8 inputs, with zero points packed along the outputs."""
    groups = weight.unflatten(2, (-1, 8))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    wide = ((codes - zeros[..., None]) * scales[..., None]).flatten(2)
    words, packed_zeros = into_words(codes.flatten(2)), into_words(zeros.transpose(1, 2)).transpose(1, 2).contiguous()
    shape = torch.tensor(weight.shape)
    return {"_packed": words, "_scale": scales, "_zero_point": packed_zeros, "_shape": shape}, wide


def into_words(codes: Tensor) -> Tensor:
    """Eight codes in a word of 32 bits, along the last side, which is filled up."""
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).long().unflatten(-1, (-1, 8))
    words = (filled << 4 * torch.arange(8)).sum(-1)
    return (words - (words >> 31 << 32)).int()


def int8_modules(weight: Tensor) -> Made:
    """Under the names of a module's tensors."""
    scales = weight.abs().amax(2, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": EXCEPT}


EXCEPT = ["lm_head", "re:.*self_attn", "re:.*mlp.gate$"]
FORMS: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "fp8 in blocks": (
        fp8_blocks,
        compressed("naive-quantized", type="float", num_bits=8, strategy="block", block_structure=[16, 32]),
    ),
    "transformers' fp8": (
        transformers_fp8,
        {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["self_attn", "gate"]},
    ),
    "fp8, a number an expert": (fp8_tensor, compressed("naive-quantized", type="float", num_bits=8, strategy="tensor")),
    "packed integers": (
        int4,
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=8, symmetric=False),
    ),
    "integers of modules": (int8_modules, compressed("naive-quantized", type="int", num_bits=8, strategy="channel")),
}


def stacked(folder: Path, architecture: str, form: str) -> Path:
    """Write a tiny model whose experts are stacked tensors of a form, and beside it the model that it stands for, whose
    path is returned."""
    make, quantization = FORMS[form]
    with pytest.MonkeyPatch.context() as patch:
        width = "moe_intermediate_size" if architecture.startswith("Qwen") else "intermediate_size"
        patch.setitem(VARIANTS[architecture], "odd", VARIANTS[architecture]["full"] | {width: WIDTH})
        reference = save_tiny_model(architecture, "odd", folder)
    tensors = {name: one for name, one in load_file(folder / "model.safetensors").items() if ".experts." not in name}
    with torch.no_grad():
        for number, layer in enumerate(reference.model.layers):  # type: ignore[union-attr, arg-type]
            for name in ("gate_up_proj", "down_proj"):
                held = getattr(layer.mlp.experts, name)
                made, wide = make(held)
                held.copy_(wide)
                tensors |= {f"model.layers.{number}.mlp.experts.{name}{key}": one for key, one in made.items()}
    plain = folder.with_name(f"{folder.name}-plain")
    reference.save_pretrained(plain)  # type: ignore[operator]
    (folder / "config.json").write_text(
        json.dumps(json.loads((plain / "config.json").read_text()) | {"quantization_config": quantization})
    )
    save_file(tensors, folder / "model.safetensors")
    return plain


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "transformers' fp8"])
def test_tokens_are_those_of_the_weights_that_they_stand_for(form: str, architecture: str, tmp_path: Path) -> None:
    plain = stacked(tmp_path / "model", architecture, form)
    if form == "packed integers":
        shard(tmp_path / "model")
    driver = Driver(tmp_path / "model")
    assert any("and the experts of " in note for note in driver.model.notes)
    assert driver.greedy(PROMPTS, 12) == Driver(plain).greedy(PROMPTS, 12)


def experts_of(folder: Path, rank: int = 0, ranks: int = 1) -> list[Tensor]:
    """The weights of all experts on a rank, gate and up first."""
    config = ModelConfig.from_folder(folder)
    model = load_model(folder, config, make_context(config, Mesh(Group(rank, ranks))))
    layers = [layer for layer in model.modules() if isinstance(layer, SparseMoE)]
    return [weight for layer in layers for weight in (layer.experts.w13, layer.experts.w2)]


@pytest.mark.parametrize("form", ["fp8 in blocks", "packed integers"])
def test_ranks_read_their_rows_of_gate_and_of_up(form: str, tmp_path: Path) -> None:
    stacked(tmp_path / "model", "Qwen3MoeForCausalLM", form)
    whole, halves = experts_of(tmp_path / "model"), [experts_of(tmp_path / "model", rank, 2) for rank in range(2)]
    for both, *shares in zip(whole[::2], *(one[::2] for one in halves), strict=True):
        for half, place in ((0, slice(0, WIDTH)), (1, slice(WIDTH, None))):
            assert torch.equal(both[:, place], torch.cat([one.chunk(2, 1)[half] for one in shares], 1))
    for down, *shares in zip(whole[1::2], *(one[1::2] for one in halves), strict=True):
        assert torch.equal(down, torch.cat(shares, 2))


@pytest.mark.parametrize("form", ["plain", "fp8 in blocks"])
def test_experts_with_inputs_before_outputs_are_read_as_those_with_outputs_first(form: str, tmp_path: Path) -> None:
    """As Qwen3-VL-MoE and Llama 4 are published. Some of the matrices are square."""
    if form == "plain":
        with pytest.MonkeyPatch.context() as patch:
            own = VARIANTS["Qwen3VLMoeForConditionalGeneration"]["text"] | {"moe_intermediate_size": 32}
            patch.setitem(VARIANTS["Qwen3VLMoeForConditionalGeneration"], "odd", own)
            save_tiny_model("Qwen3VLMoeForConditionalGeneration", "odd", tmp_path / "model")
    else:
        stacked(tmp_path / "model", "Qwen3MoeForCausalLM", form)
    (tmp_path / "turned").mkdir()
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name, one in tensors.items():
        if ".experts." in name:
            tensors[name] = one.mT.contiguous()
    save_file(tensors, tmp_path / "turned" / "model.safetensors")
    (tmp_path / "turned" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    for rank, ranks in ((0, 1), (1, 2)):
        both = (experts_of(tmp_path / folder, rank, ranks) for folder in ("model", "turned"))
        for one, turned in zip(*both, strict=True):
            assert torch.equal(one, turned)


SPOILT: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "no scales": ("_scale_inv", lambda one: None, r"lacks .*experts\.0\.gate_proj\.weight_scale_inv, "),
    "not spoilt": ("", lambda one: one, ""),
    "too few experts": ("", lambda one: one[:-1], r"gate_up_proj' .* shape \[9, 80, 64\], .* asks for 10 experts"),
    "too few rows": ("", lambda one: one[:, :-1], r"0\.gate_proj\.weight' within '.*gate_up_proj' .* \[79, .* \[80, "),
    "scales of another block": ("_scale_inv", lambda one: one[:, :-1], r"weight_scale_inv' .* \[4, \d\], .* \[5, \d\]"),
    "NaN": ("_scale_inv", lambda one: one.fill_(math.nan), r"gate_up_proj_scale_inv' \(\d+ of \d+ values are NaN"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_tensor_of_all_experts_is_refused_by_name(case: str, tmp_path: Path) -> None:
    stacked(tmp_path / "model", "Qwen3MoeForCausalLM", "transformers' fp8")
    file, (key, spoil, message) = tmp_path / "model" / "model.safetensors", SPOILT[case]
    tensors = load_file(file)
    name = f"model.layers.1.mlp.experts.gate_up_proj{key}"
    spoilt = spoil(tensors.pop(name))
    save_file(tensors | ({} if spoilt is None else {name: spoilt.contiguous()}), file)
    if not message:
        assert Driver(tmp_path / "model").model.notes[0].startswith("Quantization fp8: 0 linears and the experts of 2")
        return
    with pytest.raises(CheckpointError, match=message) as error:
        Driver(tmp_path / "model")
    assert "\n" not in str(error.value)


def test_progress_counts_bytes_that_gate_and_up_share_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked(tmp_path / "model", "Qwen3MoeForCausalLM", "fp8 in blocks")
    shard(tmp_path / "model")
    reached: list[int] = []
    monkeypatch.setattr(filling, "PROGRESS_FROM_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(filling.Progress, "update", lambda self, task, completed: reached.append(completed))
    Driver(tmp_path / "model")
    assert reached == sorted(reached)
    assert reached[-1] == sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))


# ---- gpt-oss as other tools write it

BLOCKS = {"mxfp4": 32, "nvfp4": 16}


def e2m1(codes: Tensor) -> Tensor:
    """Widen bytes of two neighbours each, along the last side."""
    return torch.tensor(E2M1)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def by_quark(held: Tensor, name: str) -> Made:
    """Each expert's tensors, [out, in]."""
    experts, inputs, outputs = held.shape
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    made = {f"{e}.{name}.weight": codes[e] for e in range(experts)}
    made |= {f"{e}.{name}.weight_scale": scales[e] for e in range(experts)}
    return made, e2m1(codes) * 2 ** (scales.float() - 127).repeat_interleave(32, -1)


def by_modelopt(held: Tensor, name: str) -> Made:
    """All experts' tensors, [in, out] scales too, and one number for all."""
    experts, inputs, outputs = held.shape
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scales = (torch.rand(experts, outputs, inputs // 16) + 0.1).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.0625)
    made = {
        name: codes.transpose(1, 2), f"{name}_weight_scale": scales.transpose(1, 2),
        f"{name}_weight_scale_2": factor, f"{name}_input_scale": torch.tensor(0.01),
    }  # fmt: skip
    return made, e2m1(codes) * scales.float().repeat_interleave(16, -1) * factor


GPT_OSS: dict[str, tuple[Callable[[Tensor, str], Made], dict[str, Any]]] = {
    "quark": (
        by_quark,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
            "exclude": ["lm_head", "*self_attn*", "*router*"],
        },
    ),
    "modelopt": (
        by_modelopt,
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
            "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.router"],
        },
    ),
}  # fmt: skip


def gpt_oss(folder: Path, tool: str) -> Path:
    """Write a tiny gpt-oss as a tool does, and beside it the model that it stands for, whose path is returned."""
    make, quantization = GPT_OSS[tool]
    reference = save_tiny_model("GptOssForCausalLM", "sliding", folder)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for number, layer in enumerate(reference.model.layers):  # type: ignore[union-attr, arg-type]
            for name in ("gate_up_proj", "down_proj"):
                block, held = f"model.layers.{number}.mlp.experts", getattr(layer.mlp.experts, name)
                made, wide = make(held, name)
                held.copy_(wide.transpose(1, 2))
                del tensors[f"{block}.{name}"]
                tensors |= {f"{block}.{key}": one.contiguous() for key, one in made.items()}
                if tool == "quark":
                    biases = tensors.pop(f"{block}.{name}_bias")
                    tensors |= {f"{block}.{e}.{name}.bias": one.contiguous() for e, one in enumerate(biases)}
    plain = folder.with_name(f"{folder.name}-plain")
    reference.save_pretrained(plain)  # type: ignore[operator]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return plain


@pytest.mark.parametrize("tool", GPT_OSS)
def test_gpt_oss_of_another_tool_gives_the_tokens_of_its_weights(tool: str, tmp_path: Path) -> None:
    plain = gpt_oss(tmp_path / "model", tool)
    driver = Driver(tmp_path / "model")
    assert any("0 linears and the experts of 3 layers" in note for note in driver.model.notes)
    assert driver.greedy(PROMPTS, 12) == Driver(plain).greedy(PROMPTS, 12)
    whole, halves = experts_of(tmp_path / "model"), [experts_of(tmp_path / "model", rank, 2) for rank in range(2)]
    for number, one in enumerate(whole):
        shares = [half[number] for half in halves]
        if number % 2:
            assert torch.equal(one, torch.cat(shares, 2))
        else:
            assert torch.equal(one, torch.cat([each.chunk(2, 1)[i] for i in range(2) for each in shares], 1))


@pytest.mark.parametrize(
    ("tool", "tensor", "message"),
    [
        ("quark", "experts.2.gate_up_proj.weight_scale", r"lacks .*experts\.2\.gate_up_proj\.weight_scale "),
        ("modelopt", "experts.down_proj_weight_scale_2", r"lacks .*experts\.down_proj_weight_scale_2 "),
    ],
)
def test_gpt_oss_without_a_scale_is_refused_by_name(tool: str, tensor: str, message: str, tmp_path: Path) -> None:
    gpt_oss(tmp_path / "model", tool)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.mlp.{tensor}"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        Driver(tmp_path / "model")
