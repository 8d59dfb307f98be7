"""Descriptions list the tensors that a model has: beside the modules that serve it, and beside transformers'."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from driver import make_context
from tiny_configs import ALIKE, CASES, VARIANTS, reference_class, tiny_config

from headrace.errors import UnsupportedModelError
from headrace.kernels.norm import rms_norm_reference
from headrace.layers.layer import Layer
from headrace.model_config import ModelConfig
from headrace.models import registry
from headrace.models.loader import build_model
from headrace.models.registry import DESCRIBED
from headrace.models.served import describe, resolve
from headrace.parameters import Parameter


@pytest.mark.parametrize(("architecture", "variant"), CASES, ids=lambda value: value)
def test_a_served_family_is_described_tensor_by_tensor(architecture: str, variant: str) -> None:
    config = ModelConfig.from_dict(tiny(architecture, **VARIANTS[architecture][variant]))
    context = make_context(config)
    model = build_model(config, context)
    slots = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Layer):
            layer.create_weights(torch.device("meta"))
            slots.update(layer.slots(path))
    asked = {name: slot.shape for name, slot in slots.items() if not slot.optional and ".layers." in name}
    described = {
        f"model.layers.{i}.{parameter.name}": parameter.shape
        for i, layer in enumerate(describe(config).layers)
        for parameter in layer.parameters
    }
    described = {name: shape for name, shape in described.items() if name not in slots or not slots[name].optional}
    assert described == asked


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=[pytest.mark.slow] * (one in ALIKE)) for one in VARIANTS]
)
def test_a_family_s_norms_round_where_transformers_does(architecture: str) -> None:
    """Rounding once more tips a quarter of the numbers in bfloat16, a sum in another order one of thousands."""
    variant = next(iter(VARIANTS[architecture].values()))
    norm = describe(ModelConfig.from_dict(tiny(architecture, **variant))).norm
    with torch.device("meta"):
        model = reference_class(architecture)(tiny_config(architecture, variant))
    text = [module for name, module in model.named_modules() if "visi" not in name and "visual" not in name]
    kinds = {type(one) for one in text if "RMSNorm" in type(one).__name__ and "Gated" not in type(one).__name__}
    assert kinds or norm.kind == "layer"
    for kind in kinds if norm.kind == "rms" else ():
        theirs, x = kind(256).bfloat16(), torch.randn(16, 256).bfloat16()
        weight = torch.nn.init.normal_(theirs.weight.data)
        weight = weight.float() + norm.plus_one if norm.float32 else weight
        ours = rms_norm_reference(x, weight, theirs.eps if hasattr(theirs, "eps") else theirs.variance_epsilon)
        assert (ours != theirs(x)).float().mean() < 0.02, kind


def tiny(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return {**tiny_config(architecture, changes).to_dict(), "architectures": [architecture]}


def parts_of(value: Any, name: str = "") -> set[str]:
    """What a description says of its layers but sizes: kinds, options that are on, tensors and how they are split."""
    if isinstance(value, Parameter):
        return {f"{name} {value.name} {value.split} {value.axis} {value.kind}"}
    if is_dataclass(value):
        return {type(value).__name__}.union(
            *(parts_of(getattr(value, field.name), f"{type(value).__name__}.{field.name}") for field in fields(value))
        )
    if isinstance(value, tuple | list):
        return set().union(*(parts_of(entry, name) for entry in value))
    return {f"{name} {value if isinstance(value, str | bool | None) else type(value).__name__}"}


def test_families_that_count_as_alike_have_no_part_of_their_own() -> None:
    parts = {
        case: parts_of(describe(ModelConfig.from_dict(tiny(case[0], **VARIANTS[case[0]][case[1]]))).layers)
        for case in CASES
    }
    others = set().union(*(found for (architecture, _), found in parts.items() if architecture not in ALIKE))
    assert {case: found - others for case, found in parts.items() if case[0] in ALIKE and found - others} == {}


def test_what_is_described_and_has_no_modules_is_refused_in_one_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = replace(DESCRIBED["LlamaForCausalLM"], architecture="Planned", module="")
    monkeypatch.setitem(registry.DESCRIBED, "Planned", planned)
    raw = {**tiny("LlamaForCausalLM"), "architectures": ["Planned"]}
    with pytest.raises(UnsupportedModelError, match=r"'Planned' .*headrace plan.*LlamaForCausalLM") as error:
        resolve(ModelConfig.from_dict(raw))
    assert "\n" not in str(error.value)
