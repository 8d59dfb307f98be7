"""The sparse layer: what fills it, what its dummy weights route to, and how to see which experts a step used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import make_context

from headrace.distributed.mesh import Group, Mesh
from headrace.errors import ConfigError
from headrace.feed_forwards import Experts
from headrace.kernels.norm import HalfNormed, summed
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.layers.adapters import Adapters
from headrace.layers.moe import SparseMoE, distinct_experts, keep_expert_ids
from headrace.layers.norm import RMSNorm
from headrace.lora import LowRank
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model

SPEC = Experts(hidden_size=8, num_experts=4, experts_per_token=2, expert_intermediate_size=12)
CLOSE = {"rtol": 5e-4, "atol": 5e-4}
"""of sums of a hundred products of numbers up to some hundreds"""
RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "max_position_embeddings": 256,
}


def make_layer(spec: Experts, rank: int = 0, size: int = 1, whole_experts: bool = False) -> SparseMoE:
    context = make_context(ModelConfig.from_dict(RAW), Mesh(Group(rank, size), experts=Group(rank, size)))
    context = replace(context, whole_experts=whole_experts)
    norm = RMSNorm(8, 1e-6, context.kernels, context.dtype)
    norm.create_weights(torch.device("cpu"))
    torch.nn.init.ones_(norm.weight)
    layer = SparseMoE(spec, context)
    for module in layer.modules():
        module.create_weights(torch.device("cpu"))  # type: ignore[operator]
    layer.fuse_norm(norm)
    return layer


def test_a_rank_holds_its_slice_of_every_expert_gate_above_up() -> None:
    layer = make_layer(SPEC, rank=1, size=2)
    slots = layer.slots("model.layers.3.mlp")
    checkpoint = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    for name, slot in slots.items():
        assert slot.destination is not None
        slot.destination.copy_(checkpoint[name][slot.source])
    for expert in range(4):
        gate, up, down = (
            checkpoint[f"model.layers.3.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        assert torch.equal(layer.w13["weight"][expert], torch.cat((gate[6:], up[6:])))
        assert torch.equal(layer.w2["weight"][expert], down[:, 6:])
    assert torch.equal(layer.router_weights["weight"], checkpoint["model.layers.3.mlp.gate.weight"])
    assert len(slots) == 1 + 3 * 4


PATH = "model.layers.3.mlp"
GATE_UP, DOWN = f"{PATH}.experts.gate_up_proj", f"{PATH}.experts.down_proj"


def adapted(layer: SparseMoE, checkpoint: dict[str, torch.Tensor], x: torch.Tensor, slots: torch.Tensor) -> Any:
    """What a rank's layer adds to the output with an adapter in slot 1."""
    for name, slot in layer.slots(PATH).items():
        if slot.destination is not None:
            slot.destination.copy_(checkpoint[name][slot.source])
    adapters = Adapters(2, 16, {DOWN}, REFERENCE_KERNELS, torch.float32, torch.device("cpu"))
    adapters.seat(PATH, layer)
    layer.finalize()
    adapters.allocate(kept=1)
    of_down = LowRank(2.0, 3, "a of down", "b of down", 4, turned=True)
    changes = {GATE_UP: LowRank(0.5, 4, "a of up", "b of up", 4), DOWN: of_down}
    kept = adapters.host[0].fill_(torch.nan), adapters.host_ranks[0]
    adapters.put(1, *kept, adapters.read(changes, lambda name, rows, columns: checkpoint[name][rows, columns], *kept))
    with adapters.applied(slots):
        return layer._compute(x, None)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_add_up_to_experts_with_their_adapters_merged(whole_experts: bool) -> None:
    checkpoint = {name: torch.randn(slot.shape) for name, slot in make_layer(SPEC).slots(PATH).items()}
    sizes = {"a of up": (16, 8), "b of up": (24, 16), "a of down": (12, 8), "b of down": (12, 12)}
    checkpoint |= {name: torch.randn(size) for name, size in sizes.items()}
    a, b = checkpoint["a of up"].unflatten(0, (4, 4)), checkpoint["b of up"].unflatten(1, (4, 4))
    of_up = 0.5 * torch.einsum("eri,ore->eoi", a, b)
    a, b = checkpoint["a of down"].unflatten(0, (4, 3)), checkpoint["b of down"].unflatten(1, (3, 4))
    of_down = 2.0 * torch.einsum("ero,ire->eoi", a, b)
    merged = dict(checkpoint)
    for expert in range(4):
        for name, change in zip(("gate", "up", "down"), (*of_up[expert].chunk(2), of_down[expert]), strict=True):
            merged[f"{PATH}.experts.{expert}.{name}_proj.weight"] = (
                checkpoint[f"{PATH}.experts.{expert}.{name}_proj.weight"] + change
            )
    x, slots = torch.randn(9, 8), torch.tensor([1, -1, 0] * 3, dtype=torch.int32)
    expected = [adapted(make_layer(SPEC), held, x, torch.full_like(slots, -1)) for held in (checkpoint, merged)]
    ranks = [adapted(make_layer(SPEC, rank, 2, whole_experts), checkpoint, x, slots) for rank in (0, 1)]
    torch.testing.assert_close(sum(ranks), torch.where((slots == 1)[:, None], expected[1], expected[0]), **CLOSE)


def test_ranks_must_divide_the_experts_size() -> None:
    spec = replace(SPEC, expert_intermediate_size=7)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 2 does not divide an expert's intermediate size \(7\)"
    ):
        make_layer(spec, size=2)


@pytest.mark.parametrize(("batch", "expected"), [(8, 51.6), (32, 111.8), (128, 128.0)])
def test_dummy_weights_route_nearly_uniformly(batch: int, expected: float) -> None:
    """Distinct tokens of a batch spread over the experts, in every sparse layer, as a uniform choice would."""
    config = ModelConfig.from_dict(RAW)
    context = make_context(config, dtype=torch.bfloat16)
    model = load_model(Path("nowhere"), config, context, load_format="dummy")
    keep_expert_ids(model, 128)
    tokens = torch.randperm(4096, generator=torch.Generator().manual_seed(1))[:batch]
    hidden = model.model.embed_tokens(tokens)
    for layer in model.model.layers:  # all of a layer but attention, whose share of the sum is small
        hidden = summed(layer.mlp(hidden).added_to(hidden))
    counts = distinct_experts(model)
    assert len(counts) == 2  # the layer between is dense
    assert sum(counts) / len(counts) >= 0.9 * expected
    assert max(counts) <= min(128, 8 * batch)
    keep_expert_ids(model, 0)
    assert distinct_experts(model) == []


@pytest.mark.parametrize("invariant", [False, True])
def test_the_norm_that_is_left_half_done_is_the_next_layers(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict({**RAW, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []})
    context = make_context(config, dtype=torch.bfloat16)
    context = replace(context, batch_invariant=invariant)
    plain = load_model(Path("nowhere"), config, context, load_format="dummy")
    assert [layer.mlp.experts.next_norm for layer in plain.model.layers] == [None] * 3  # a CPU's linears take no half

    monkeypatch.setattr("headrace.layers.moe.linears_take_halves", lambda weight: True)
    halving = load_model(Path("nowhere"), config, context, load_format="dummy").model
    found = [layer.mlp.experts.next_norm for layer in halving.layers]
    assert found[2] is None  # the last norm stands before no linear
    if invariant:
        assert found == [None] * 3
        return
    for weight, following in zip(found, list(halving.layers)[1:], strict=False):
        assert weight.data_ptr() == following.input_layernorm.weight.data_ptr()
    hidden = torch.randn(5, 256).bfloat16()
    half = halving.layers[0].mlp(hidden).added_to(hidden.clone())
    assert isinstance(half, HalfNormed)
    qkv = halving.layers[1].self_attn.qkv_proj
    assert torch.equal(qkv(half), qkv(half.x))  # where the library serves, it norms what is whole
    whole = plain.model.layers[0].mlp(hidden).added_to(hidden.clone())
    assert torch.equal(half.x, whole)


def test_kept_ids_forget_the_step_before() -> None:
    layer = make_layer(SPEC)
    for tensor in (layer.router_weights["weight"], layer.w13["weight"], layer.w2["weight"]):
        torch.nn.init.normal_(tensor)
    layer.finalize()
    keep_expert_ids(layer, 6)
    for tokens in (6, 1):
        layer(torch.randn(tokens, 8))
    assert distinct_experts(layer) == [2]
