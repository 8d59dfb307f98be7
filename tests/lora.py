"""Writes adapters (LoRA) as PEFT does, and merges them into the weights of a model by the formula of its paper."""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(folder: Path, model: nn.Module, seed: int = 0, strip: str = "", **fields: Any) -> Path:
    """Write an adapter with random matrices for the modules of transformers' `model` that `target_modules` names.
    `strip`: what their names begin with that the adapted model has not. `rank_pattern` names ends of modules."""
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merge(model: nn.Module, adapter: Path, strip: str = "") -> None:
    """Add an adapter to the weights of transformers' model."""
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, module in model.named_modules():
        for kind, end in (("", ".weight"), ("embedding_", "")):
            front = f"base_model.model.{name.removeprefix(strip)}.lora_{kind}"
            if f"{front}A{end}" not in tensors:
                continue
            a, b = tensors[f"{front}A{end}"], tensors[f"{front}B{end}"]
            patterns = config.get("alpha_pattern", {}).items()
            alpha = next((one for end, one in patterns if name.endswith(end)), config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            module.weight += scale * ((b @ a).T if kind else b @ a)


@torch.inference_mode()
def scores(model: nn.Module, tokens: list[int]) -> Tensor:
    """The log-probability of each token but the first # [len(tokens) - 1]."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
