"""Every family from checkpoints of 4-bit integers and of fp8, as compressed-tensors writes them: the tokens are those
of the weights that these stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from safetensors.torch import save_file
from test_stacked_experts import Made, compressed, int4
from tiny_configs import ALIKE, VARIANTS, tiny_config
from torch import Tensor

from headrace.model_config import ModelConfig
from headrace.models.registry import SERVED
from headrace.models.served import describe

PROMPTS = [[5], [17, 3, 99], list(range(20, 45))]


def fp8(weight: Tensor) -> Made:
    """With a scale for each output."""
    scales = weight.abs().amax(2, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scales}, codes.float() * scales


FORMS: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any]]] = {
    "w4a16": (
        int4,
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=8, symmetric=False),
    ),
    "fp8": (fp8, compressed("naive-quantized", type="float", num_bits=8, strategy="channel")),
}
FAMILIES = [name for name in SERVED if name != "GptOssForCausalLM"]
"""all but one, whose experts are stored together (test_stacked_experts.py)"""


CASES = [
    pytest.param(name, form, marks=pytest.mark.slow if name in ALIKE or (place + turn) % 2 else ())
    for place, name in enumerate(FAMILIES)
    for turn, form in enumerate(FORMS)
]
"""`make test` runs one form of each family that is unlike others"""


@pytest.mark.parametrize(("architecture", "form"), CASES)
def test_tokens_are_those_of_the_weights_that_codes_stand_for(architecture: str, form: str, tmp_path: Path) -> None:
    config = tiny_config(architecture, next(iter(VARIANTS[architecture].values()))).to_dict()
    config |= {"architectures": [architecture]}
    spec = describe(ModelConfig.from_dict(config))
    quantize, settings = FORMS[form]
    generator = torch.Generator().manual_seed(5)
    plain = {
        name: torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    plain |= {
        f"model.{one.name}": torch.full(one.shape, float(one.name.endswith("weight"))) for one in spec.norm_parameters
    }
    if spec.head_bias:
        plain["lm_head.bias"] = torch.randn(spec.vocab_size, generator=generator)
    packed = dict(plain)
    for number, layer in enumerate(spec.layers):
        for one in layer.parameters:
            name, values = f"model.layers.{number}.{one.name}", torch.randn(one.shape, generator=generator)
            if one.kind == "linear":
                made, wide = quantize(1.5 * values[None] * one.shape[1] ** -0.5)
                packed |= {f"{name}{key}": tensor if key == "_shape" else tensor[0] for key, tensor in made.items()}
                if "_shape" in made:
                    packed[f"{name}_shape"] = torch.tensor(one.shape)
                values = wide[0]
            else:
                is_norm = len(one.shape) == 1 and name.endswith("weight")
                values = values * (0.3 if len(one.shape) > 1 else 0.1) + is_norm
                packed[name] = values
            plain[name] = values
    quantization = settings | {"ignore": ["lm_head"]}
    for folder, tensors, more in (("plain", plain, {}), ("packed", packed, {"quantization_config": quantization})):
        (tmp_path / folder).mkdir()
        kept = {
            name: one.contiguous()
            for name, one in tensors.items()
            if name != "lm_head.weight" or not spec.tied_embeddings
        }
        save_file(kept, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
    driver = Driver(tmp_path / "packed")
    assert any(note.startswith("Quantization") for note in driver.model.notes)
    found = driver.greedy(PROMPTS, 12)
    assert found == Driver(tmp_path / "plain").greedy(PROMPTS, 12)
    assert len({*map(tuple, found)}) > 1
