"""Models in 8-bit formats as the formats' own tools write them: weights are widened to the bit, and logits are those of
the tools, rounded activations included. fixtures/README.md says what made them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.distributed.mesh import Group, Mesh
from headrace.layers.linear import Linear
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model
from headrace.quantization.checkpoint_format import holds_kv_scales

sys.path.append(str(Path(__file__).parents[1] / "models"))
from driver import Driver, make_context
from stored_fixtures import W8A8, unpack


@pytest.mark.parametrize("name", W8A8)
def test_logits_are_those_of_the_tool(name: str, tmp_path: Path) -> None:
    """The same tokens, and the same numbers in float32; in int8 with a scale a token, whose largest number is half-way
    between two integers, a last bit decides to which it goes."""
    _, prompt, expected = unpack(name, tmp_path)
    driver = Driver(tmp_path)
    logits = driver.logits(prompt)
    error = float((logits - expected).norm() / expected.norm())
    assert error < (0.02 if name.startswith("int8-dynamic") else 1e-3), error
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", W8A8)
def test_weights_are_widened_to_the_bit_on_each_of_two_ranks(name: str, tmp_path: Path) -> None:
    """Codes and scales of a rank are slices of the file's."""
    tensors, _, _ = unpack(name, tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    stated = config.quantization or {}
    of_group = stated.get("config_groups", {}).get("group_0", {}).get("weights", {})
    block = stated.get("weight_block_size") or of_group.get("block_structure") or (1, of_group.get("group_size") or 1)
    block = (128, 128) if stated.get("quant_algo") == "fp8_pb_wo" else block
    linears = [path.removesuffix(".weight") for path in tensors if path.endswith("_proj.weight")]
    wide = {path: widened(tensors, path, block) for path in linears}
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


def widened(tensors: dict[str, Tensor], path: str, block: tuple[int, int]) -> Tensor:
    """codes * scale, in float32; a weight without a scale is as it is."""
    codes = tensors[f"{path}.weight"].float()
    scales = [tensors[f"{path}.{name}"] for name in ("weight_scale", "weight_scale_inv") if f"{path}.{name}" in tensors]
    if not scales:
        return codes
    scale = scales[0].float() if scales[0].is_floating_point() else (scales[0].float() - 127).exp2()
    scale = scale[:, 0, :, 0] if scale.dim() == 4 else scale
    if scale.numel() in (1, codes.shape[0]):
        return codes * scale.reshape(-1, 1)
    wide = scale.repeat_interleave(block[0], 0)[: codes.shape[0]]
    return codes * wide.repeat_interleave(block[1], 1)[:, : codes.shape[1]]


def test_scales_of_the_cache_come_with_the_weights(tmp_path: Path) -> None:
    for name in ("quark-fp8-static", "modelopt-fp8"):
        tensors, *_ = unpack(name, tmp_path)
        assert any(path.endswith(("k_proj.output_scale", "k_proj.k_scale")) for path in tensors)
        assert holds_kv_scales(ModelConfig.from_folder(tmp_path).quantization)
