"""Models in 8-bit formats as compressed-tensors writes them: weights are widened to the bit, and logits stay close to
those of its own forward. make_w8a8_fixtures.py makes the fixtures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.layers.linear import Linear
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model

sys.path.append(str(Path(__file__).parents[1] / "models"))
from driver import Driver, make_context

FIXTURES = Path(__file__).parent / "fixtures" / "w8a8"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
CLOSE = {"experts": 0.1}
"""Relative error of logits: those of fixtures with experts are of the widened weights, without rounded activations"""


def unpack(name: str, folder: Path) -> tuple[dict[str, Tensor], list[int], Tensor]:
    """Write the checkpoint into `folder`; return its tensors, the prompt and the tool's logits."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        about = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    logits = tensors.pop("expected.logits")
    (folder / "config.json").write_text(about["config"])
    save_file(tensors, folder / "model.safetensors")
    return tensors, json.loads(about["prompt"]), logits


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_tool(name: str, tmp_path: Path) -> None:
    _, prompt, expected = unpack(name, tmp_path)
    driver = Driver(tmp_path)
    driver.start(1)
    logits = driver.step([prompt])
    bound = next((bound for kind, bound in CLOSE.items() if name.endswith(kind)), 0.02)
    error = float((logits - expected).norm() / expected.norm())
    assert error < bound, error


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_widened_to_the_bit_on_each_of_two_ranks(name: str, tmp_path: Path) -> None:
    """Codes and scales of a rank are slices of the file's."""
    tensors, _, _ = unpack(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    wide = {path.removesuffix(".weight"): widened(tensors, path) for path in tensors if path.endswith("_proj.weight")}
    for rank in (0, 1):
        held: dict[str, Tensor] = {}
        original = Linear.finalize

        def kept(layer: Linear, held: dict[str, Tensor] = held, original: object = original) -> None:
            held[str(id(layer))] = layer.scheme.layout.dequantize(layer.spec, layer.weights)["weight"]
            original(layer)  # type: ignore[operator]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Linear, "finalize", kept)
            model = load_model(tmp_path, config, make_context(config, Mesh(Group(rank, 2))))
        found = 0
        for path, layer in model.named_modules():
            if not isinstance(layer, Linear) or "lm_head" in path:
                continue
            for part in layer.spec.parts:
                whole = wide[part.path(path)]
                rows = slice(part.offset, part.offset + part.rows.stop - part.rows.start)
                assert torch.equal(held[str(id(layer))][rows], whole[part.rows, part.columns])
                found += 1
        assert found in (4, 7)  # with experts, those of attention


def widened(tensors: dict[str, Tensor], path: str) -> Tensor:
    """codes * scale, in float32."""
    codes = tensors[path].float()
    name = next(f"{path}{end}" for end in ("_scale", "_scale_inv") if f"{path}{end}" in tensors)
    scale = tensors[name].float()
    if (scale.dim() == 2 and scale.shape[1] > 1) or scale.numel() not in (1, codes.shape[0]):
        scale = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes * (scale.reshape(-1, 1) if scale.numel() in (1, codes.shape[0]) else scale)
