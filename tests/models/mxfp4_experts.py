"""gpt-oss's own way to store experts: random MXFP4 blocks and scales in place of a tiny model's experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS = ("gate_up_proj", "down_proj")


def to_mxfp4(model: torch.nn.Module, folder: Path, plain_layers: tuple[int, ...] = ()) -> None:
    """Give the experts of `model`, which `folder` holds, the values of random MXFP4 tensors, which take their place in
    the checkpoint. The experts of `plain_layers` stay as they are, and config.json names them."""
    random, tensors = torch.Generator().manual_seed(5), load_file(folder / "model.safetensors")
    for number, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        for name in EXPERTS if number not in plain_layers else ():
            key, held = f"model.layers.{number}.mlp.experts.{name}", getattr(layer.mlp.experts, name)
            experts, inputs, outputs = held.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(121, 126, blocks.shape[:-1], generator=random, dtype=torch.uint8)
            del tensors[key]
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            with torch.no_grad():
                held.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    config = json.loads((folder / "config.json").read_text())
    alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    alone += [f"model.layers.{number}.mlp.experts" for number in plain_layers]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": alone}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
