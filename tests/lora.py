"""Writes adapters (LoRA) as PEFT does, and merges them into the weights of a model by the formula of its paper."""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

GATES = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}
"""linears of one expert that are rows of gate_up_proj, and where; others are down_proj"""
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(
    folder: Path, model: nn.Module, seed: int = 0, strip: str = "", each_expert: str = "", **fields: Any
) -> Path:
    """Write an adapter with random matrices for the modules of transformers' `model` that `target_modules` names.
    `strip`: what their names begin with that the adapted model has not. `rank_pattern` names ends of modules.
    `each_expert`: names of an expert's linears in checkpoints, which are adapted too, behind that of their block."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ALL, **fields}
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        targets, name = config["target_modules"], name.removeprefix(strip)
        hit = re.fullmatch(targets, name) if isinstance(targets, str) else name.split(".")[-1] in targets
        if not hit or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        made = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        rank = next((r for end, r in config.get("rank_pattern", {}).items() if name.endswith(end)), config["r"])
        outputs, inputs = module.weight.shape[::-1] if isinstance(module, nn.Embedding) else module.weight.shape
        kind, end = ("embedding_", "") if isinstance(module, nn.Embedding) else ("", ".weight")
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=made) * shape[1] ** -0.5
            tensors[f"base_model.model.{name}.lora_{kind}{which}{end}"] = values
    made = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if not hasattr(module, "gate_up_proj") or isinstance(module.gate_up_proj, nn.Module):
            continue
        targets = config.get("target_parameters", [])
        params = [one for one in ("gate_up_proj", "down_proj") if f"{name}.{one}".endswith(tuple(targets or "-"))]
        for place, one in enumerate(params):  # the first is the innermost
            front = f"base_model.model.{name}{'.base_layer' * (len(params) - 1 - place)}.lora_"
            rank = next((r for end, r in config.get("rank_pattern", {}).items() if one.endswith(end)), config["r"])
            number, outputs, inputs = getattr(module, one).shape
            if is_turned(config, module):
                outputs, inputs = inputs, outputs
            for which, shape in (("A", (number * rank, inputs)), ("B", (outputs, number * rank))):
                tensors[f"{front}{which}.weight"] = torch.randn(shape, generator=made) * (shape[1] / 3) ** -0.5
        block, *linears = each_expert.split() or [""]
        for expert, one in itertools.product(range(len(module.gate_up_proj)), linears):
            weight = module.gate_up_proj[expert].chunk(2)[0] if one in GATES else module.down_proj[expert]
            front = f"base_model.model.{name.replace('mlp', block)}.{expert}.{one}.lora_"
            for which, shape in (("A", (config["r"], weight.shape[1])), ("B", (weight.shape[0], config["r"]))):
                tensors[f"{front}{which}.weight"] = torch.randn(shape, generator=made) * (shape[1] / 3) ** -0.5
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def is_turned(config: dict[str, Any], module: nn.Module) -> bool:
    """Whether PEFT takes the first dimension of an expert's weight for its inputs: up to 0.18 it always does."""
    return config.get("peft_version", "0.21.2") < "0.19" or getattr(module, "is_transposed", False)


@torch.no_grad()
def merge(model: nn.Module, adapter: Path, strip: str = "") -> None:
    """Add an adapter to the weights of transformers' model."""
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, module in model.named_modules():
        for kind, end in (("", ".weight"), ("embedding_", "")):
            front = f"base_model.model.{name.removeprefix(strip)}.lora_{kind}"
            if f"{front}A{end}" not in tensors or not isinstance(module, nn.Linear | nn.Embedding):
                continue
            a, b = tensors[f"{front}A{end}"], tensors[f"{front}B{end}"]
            patterns = config.get("alpha_pattern", {}).items()
            alpha = next((one for end, one in patterns if name.endswith(end)), config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            module.weight += scale * ((b @ a).T if kind else b @ a)
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
            _merge_experts(name, module, config, tensors)


def _merge_experts(name: str, module: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    wrapped = sum(f"base_model.model.{name}{inner}.lora_A.weight" in tensors for inner in ("", ".base_layer"))
    for one, inner in (("gate_up_proj", ".base_layer" * (wrapped - 1)), ("down_proj", "")):
        front, weight = f"base_model.model.{name}{inner}.lora_", getattr(module, one)
        if f"{front}A.weight" in tensors and any(one in target for target in config["target_parameters"]):
            a, b = tensors[f"{front}A.weight"], tensors[f"{front}B.weight"]
            a, b = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight)))
            scale = config["lora_alpha"] / (math.sqrt(a.shape[1]) if config.get("use_rslora") else a.shape[1])
            weight += scale * torch.einsum("ore,eri->eio" if is_turned(config, module) else "ore,eri->eoi", b, a)
    for key, a in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.*)\.\w+\.experts\.(\d+)\.(\w+)\.lora_A\.weight", key)
        if found is None or found[1] != name.removesuffix(".mlp.experts"):
            continue
        expert, change = int(found[2]), tensors[key.replace("lora_A", "lora_B")] @ a * config["lora_alpha"] / len(a)
        if found[3] in GATES:
            module.gate_up_proj[expert].chunk(2)[GATES[found[3]]].add_(change)
        else:
            module.down_proj[expert] += change


@torch.inference_mode()
def scores(model: nn.Module, tokens: list[int]) -> Tensor:
    """The log-probability of each token but the first # [len(tokens) - 1]."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
