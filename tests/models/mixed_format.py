"""Makes checkpoints in which some linears are in int8 with a scale an output, as compressed-tensors writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def quantize(folder: Path, linears: str, plain: Path | None = None) -> dict[str, Tensor]:
    """Rewrite the checkpoint in `folder` with the linears whose names match the pattern in int8, and say so in its
    config.json. Returns the tensors of the plain model that it now stands for, and writes them to `plain`."""
    tensors, widened = load_file(folder / "model.safetensors"), {}
    config = json.loads((folder / "config.json").read_text())
    for name, tensor in list(tensors.items()):
        if not re.search(rf"({linears})\.weight$", name):
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 127
        tensors[name], tensors[f"{name}_scale"] = (tensor / scale).round().to(torch.int8), scale
        widened[name] = tensors[name].float() * scale
    assert widened
    exact = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")} | widened
    if plain is not None:
        plain.mkdir()
        (plain / "config.json").write_text(json.dumps(config))
        save_file(exact, plain / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", rf"re:(?!.*({linears})$)"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return exact
