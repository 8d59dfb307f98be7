"""A made-up format, int8 with a scale an output, and checkpoints in which some linears are in it: what the seats for
formats are tried with. Its tensors are those of compressed-tensors, which is not served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.quantization.formats import Setting, WeightFormat
from headrace.quantization.scheme import Dequantized, LinearSpec, Part, Scheme, Slot, Weights
from headrace.quantization.table import SchemeEntry
from headrace.quantization.unquantized import PlainProduct, rows_of

LAYOUT = "int8"
ENTRY = SchemeEntry("mixed_format", "scheme")
"""To be put into quantization/table.SCHEMES under LAYOUT"""


class Int8Layout:
    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        shape = (*experts, spec.out_features)
        return {
            "weight": torch.empty(*shape, spec.in_features, dtype=torch.int8, device=device),
            "weight_scale": torch.empty(*shape, 1, device=device),
        }

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            weight, scale = weights["weight"][rows_of(part)], weights["weight_scale"][rows_of(part)]
            yield part, "weight", Slot(part.shape, (part.rows, part.columns), weight, stored=("I8",))
            yield part, "weight_scale", Slot((part.shape[0], 1), (part.rows, slice(0, 1)), scale)

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        return {"weight": (weights["weight"].float() * weights["weight_scale"]).to(spec.dtype)}


def scheme(format: WeightFormat, **settings: Setting) -> Scheme:
    layout = Int8Layout()
    return Scheme(format, layout, Dequantized(layout, PlainProduct()))


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
