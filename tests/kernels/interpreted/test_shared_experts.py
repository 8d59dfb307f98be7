"""Layers whose shared experts lie behind the routed ones compute in Triton's kernels what apart ones do in torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import make_context
from tiny_configs import VARIANTS, tiny_config

from headrace.distributed.mesh import Group, Mesh
from headrace.kernels.moe import fused_moe, fused_moe_reference
from headrace.kernels.norm import whole
from headrace.layers import shared_experts
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models import filling, loader

EVEN = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 64}
SCALED = {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
MODELS = {
    "scaled, two": ("DeepseekV2ForCausalLM", "queries-too", EVEN | SCALED, 2),
    "gated": ("Qwen2MoeForCausalLM", "full", EVEN | {"shared_expert_intermediate_size": 32}, 1),
    "of scaled inputs": ("Llama4ForCausalLM", "scout", EVEN | {"intermediate_size": 96}, 1),
    "halved, two": ("Cohere2MoeForCausalLM", "average", EVEN | {"intermediate_size": 32, "num_shared_experts": 2}, 2),
}
"""what sets its shared experts apart -> (architecture, variant, changes, how many experts they are)"""
WHOLE = {"whole_experts": True, "mesh": Mesh(Group(1, 2), experts=Group(1, 2))}


def layers_of(
    kind: str, tp: Group, quantization: str | None = None, more: dict[str, Any] | None = None, **own: Any
) -> tuple[list[SparseMoE], float]:
    """Return the layers with experts of a model, and the bytes of its weights."""
    architecture, variant, changes, _ = MODELS[kind]
    made = tiny_config(architecture, VARIANTS[architecture][variant] | changes | (more or {}))
    config = ModelConfig.from_dict(made.to_dict())
    context = replace(make_context(config, Mesh(tp)), **own)
    model = loader.load_model(Path(), config, context, "dummy", 3, quantization)
    return [layer for layer in model.modules() if isinstance(layer, SparseMoE)], model.weight_bytes


def without_apart(kernel: Any, x: torch.Tensor, experts: Any, shared: Any, *more: Any, **named: Any) -> Any:
    return kernel(x, experts, None, *more, **named)


@pytest.mark.parametrize(("rank", "quantization"), [(None, None), (1, None), (None, "ptpc_fp8")])
@pytest.mark.parametrize("kind", MODELS)
def test_layers_agree(kind: str, rank: int | None, quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one rank's share alone, and both take as many bytes. In fp8 a kernel does not round a lone token, which
    torch does: there the reference computes both."""
    monkeypatch.setattr(filling, "DUMMY_RANGE", 0.3)
    group = Group() if rank is None else Group(rank, 2)
    apart, num_bytes = layers_of(kind, group, quantization)
    monkeypatch.setattr(shared_experts, "OWN_FORMS", ())
    together, same_bytes = layers_of(kind, group, quantization)
    assert same_bytes == num_bytes
    for one, other in zip(together, apart, strict=True):
        assert (one.experts.joined.number, other.experts.joined) == (MODELS[kind][-1], None)
        one.fused_moe = partial(without_apart, fused_moe_reference if quantization else fused_moe)
        for tokens in (1, 5):
            x = torch.randn(tokens, one.spec.hidden_size)
            out, expected = whole(one.computed(x.clone())), whole(other.computed(x.clone()))
            bound = 0.25 if quantization and MODELS[kind][-1] > 1 else 1e-5  # each is then rounded by itself
            assert (out - expected).norm() <= bound * expected.norm()


def test_those_that_adapters_change_are_computed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_experts, "OWN_FORMS", ())
    layer, seen = layers_of("gated", Group())[0][0], []

    def kernel(x: Any, experts: Any, *more: Any, **named: Any) -> Any:
        seen.append(experts.joined)
        return x, torch.zeros(1, dtype=torch.int32)

    layer.fused_moe = kernel
    linear = layer.shared.down_proj
    for wanted in (False, True):
        linear.fused = replace(linear.fused, addend=SimpleNamespace(wanted=wanted))
        layer.computed(torch.zeros(1, 64))
    assert seen == [layer.experts.joined, None]


@pytest.mark.parametrize(
    ("own", "more"),
    [({"batch_invariant": True}, {}), (WHOLE, {}), ({}, {"moe_intermediate_size": 40})],
)
def test_others_stay_apart(own: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_experts, "OWN_FORMS", ())
    layers, _ = layers_of("gated", Group(1, 2), None, more, **own)
    assert layers
    assert all(layer.experts.joined is None for layer in layers)
