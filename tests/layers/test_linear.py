"""How linears and embeddings share themselves out: which rows and columns of which part a rank takes, and that the
ranks' results add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.distributed.mesh import Group
from headrace.errors import ConfigError
from headrace.kernels.norm import Unsummed, whole
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from headrace.layers.layer import Layer
from headrace.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from headrace.layers.norm import RMSNorm
from headrace.mixers import Attention
from headrace.quantization.formats import FORMATS
from headrace.quantization.fp8 import stored

F32 = torch.float32
CPU = torch.device("cpu")


def filled(layer: Layer, path: str, tensors: dict[str, Tensor]) -> Layer:
    layer.create_weights(CPU)
    slots = layer.slots(path)
    assert set(slots) == set(tensors)
    for name, slot in slots.items():
        assert slot.shape == tuple(tensors[name].shape)
        if slot.destination is not None:
            slot.put(tensors[name][slot.source])
    layer.finalize()
    return layer


def ranks(size: int) -> list[Group]:
    return [Group(rank, size) for rank in range(size)]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_merged_columns_keep_parts_together() -> None:
    gate, up, x = random(8, 6), random(8, 6) + 1, random(3, 6)
    tensors = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    for group in ranks(2):
        made = MergedColumnParallelLinear(6, {"gate_proj": 8, "up_proj": 8}, group, F32, bias=False)
        y = filled(made, "mlp.gate_up_proj", tensors)(x)
        mine = slice(4 * group.rank, 4 * group.rank + 4)
        torch.testing.assert_close(y, torch.cat((x @ gate[mine].T, x @ up[mine].T), dim=1))


@pytest.mark.parametrize(("size", "kv_of_rank"), [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])])
def test_qkv_goes_by_heads_and_kv_heads_are_repeated(size: int, kv_of_rank: list[list[int]]) -> None:
    heads, kv_heads, dim, x = 4, 2, 2, random(3, 6)
    tensors = {
        f"attn.{name}_proj.{kind}": random(count * dim, 6)[:, slice(None) if kind == "weight" else 0]
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        for kind in ("weight", "bias")
    }
    whole = {
        name: F.linear(x, tensors[f"attn.{name}_proj.weight"], tensors[f"attn.{name}_proj.bias"]).unflatten(
            1, (-1, dim)
        )
        for name in "qkv"
    }
    for group, kv in zip(ranks(size), kv_of_rank, strict=True):
        made = QKVParallelLinear(Attention(6, heads, kv_heads, dim, qkv_bias=True), group, F32)
        y = filled(made, "attn.qkv_proj", tensors)(x).unflatten(1, (-1, dim))
        share = heads // size
        q = whole["q"][:, group.rank * share : (group.rank + 1) * share]
        torch.testing.assert_close(y, torch.cat((q, whole["k"][:, kv], whole["v"][:, kv]), dim=1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_qkv_whose_rows_are_in_turn_for_each_kv_head_is_that_of_three_linears(size: int) -> None:
    """With fewer KV heads than ranks, too, where a rank has a part of a group's queries."""
    mixer, x = Attention(6, 8, 2, 2, qkv_bias=True, by_kv_head=True), random(3, 6)
    names, sizes = ("q_proj", "k_proj", "v_proj"), (16, 4, 4)
    apart = {}
    for place, (name, rows) in enumerate(zip(names, sizes, strict=True)):
        apart[f"attn.{name}.weight"] = random(rows, 6) + place
        apart[f"attn.{name}.bias"] = random(rows) + place
    in_turn = {
        kind: torch.cat([apart[f"attn.{name}.{kind}"].unflatten(0, (2, -1)) for name in names], dim=1)
        for kind in ("weight", "bias")
    }
    for group in ranks(size):
        made = QKVParallelLinear(mixer, group, F32)
        made.read_as("attn.qkv_proj", {"attn.qkv_proj"})
        tensors = {f"attn.{name}.{kind}": whole for name in names for kind, whole in in_turn.items()}
        wanted = filled(QKVParallelLinear(mixer, group, F32), "attn.qkv_proj", apart)(x)
        assert torch.equal(filled(made, "attn.qkv_proj", tensors)(x), wanted)


def test_rows_add_up_and_the_bias_is_added_once() -> None:
    weight, bias, x = random(5, 8), random(5), random(3, 8)
    total = torch.zeros(3, 5)
    for group in ranks(2):
        made = RowParallelLinear(8, 5, group, F32, bias=True)
        total += filled(made, "o", {"o.weight": weight, "o.bias": bias})(x[:, 4 * group.rank : 4 * group.rank + 4])
    torch.testing.assert_close(total, F.linear(x, weight, bias))


def test_columns_concatenate() -> None:
    weight, x = random(6, 4), random(3, 4)
    made = [filled(ColumnParallelLinear(4, 6, group, F32, bias=False), "c", {"c.weight": weight}) for group in ranks(3)]
    torch.testing.assert_close(torch.cat([layer(x) for layer in made], dim=1), x @ weight.T)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "size"), [(128, 1), (101, 1), (101, 2), (70, 3)])
def test_vocabulary_is_padded_and_split(vocab: int, size: int, tied: bool) -> None:
    table, ids, hidden = random(vocab, 8), torch.tensor([0, 5, vocab - 1, vocab // 2]), random(2, 8)
    embedded, logits = torch.zeros(4, 8), []
    for group in ranks(size):
        embedding = VocabParallelEmbedding(vocab, 8, group, F32)
        filled(embedding, "e", {"e.weight": table})
        assert embedding.weight.shape[0] % 64 == 0
        embedded += embedding(ids)
        head = ParallelLMHead(vocab, 8, group, F32, embedding if tied else None)
        filled(head, "h", {} if tied else {"h.weight": table})
        logits.append(head.compute(hidden, None))
        assert torch.isfinite(logits[-1]).all()
    torch.testing.assert_close(embedded, table[ids])
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, :vocab], hidden @ table.T)


def test_a_soft_cap_bounds_logits_and_keeps_their_order() -> None:
    table, hidden = torch.randn(100, 8), torch.randn(3, 8)
    head = ParallelLMHead(100, 8, Group(), F32, soft_cap=2.0)
    filled(head, "h", {"h.weight": table})
    torch.testing.assert_close(head(hidden), 2 * torch.tanh(hidden @ table.T / 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda group: QKVParallelLinear(Attention(8, 4, 4, 2), group, F32), "3 does not divide num_attention_heads"),
        (lambda group: QKVParallelLinear(Attention(8, 6, 2, 2), group, F32), "3 must divide num_key_value_heads"),
        (lambda group: RowParallelLinear(8, 8, group, F32, False), "3 does not divide the inputs"),
        (lambda group: MergedColumnParallelLinear(8, {"up_proj": 8}, group, F32, False), "the outputs of up_proj"),
    ],
)
def test_what_a_mesh_cannot_divide_is_named(make: Callable[[Group], Layer], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Group(0, 3))


def test_a_layer_without_weights_says_so() -> None:
    with pytest.raises(RuntimeError, match="before its weights"):
        ColumnParallelLinear(4, 6, Group(), F32, bias=False)(random(1, 4))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_sum_is_left_to_the_norm_behind_it(fp8: bool) -> None:
    """Once: after the norm's linear has had it, the sum is in the residual's place."""
    bf16, alone = torch.bfloat16, Group(0, 1)
    norm = RMSNorm(32, 1e-5, REFERENCE_KERNELS, bf16)
    norm.weight = torch.nn.Parameter(random(32).to(bf16), requires_grad=False)
    results = []
    for tells in (False, True):
        before = RowParallelLinear(16, 32, alone, bf16, bias=False)
        after = ColumnParallelLinear(32, 48, alone, bf16, bias=False)
        after.fuse_norm(norm)
        if tells:
            before.fuse_next_norm(norm)
        if fp8:
            before.scheme = after.scheme = stored(FORMATS["ptpc_fp8"], "fp8", "channel", made_at_load=True)
            before.scheme.product.prepare([before.spec, after.spec], CPU)
        filled(before, "o_proj", {"o_proj.weight": random(32, 16).to(bf16)})
        filled(after, "up_proj", {"up_proj.weight": random(48, 32).to(bf16)})
        residual = random(5, 32).to(bf16)
        x = before.added_to(random(5, 16).to(bf16), residual)
        assert isinstance(x, Unsummed) == tells
        out = after(x)
        assert whole(x) is residual
        results.append((out, residual))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("quantized", [False, True])
def test_what_an_adapter_adds_comes_after_the_norm_and_before_the_activation(quantized: bool) -> None:
    tensors = {f"{name}_proj.weight": random(16, 32) for name in ("gate", "up")}
    down, up, norm, x = random(4, 32), random(32, 4), RMSNorm(32, 1e-6, REFERENCE_KERNELS, F32), random(3, 32)
    norm.weight.data.copy_(random(32))
    adapter, activate = (lambda x: x @ down.T @ up.T), REFERENCE_KERNELS.gate_and_mul
    addend = SimpleNamespace(wanted=True, add=lambda x, out: out.add_(adapter(x)))

    def linear(**around: Any) -> Layer:
        made = MergedColumnParallelLinear(32, {"gate_proj": 16, "up_proj": 16}, Group(), F32, bias=False)
        if quantized:
            made.scheme = stored(FORMATS["ptpc_fp8"], "fp8", "channel", made_at_load=True)
            made.scheme.product.prepare([made.spec], CPU)
        if around:
            made.fuse_norm(norm)
        made.fused = replace(made.fused, **around)
        made.create_weights(CPU)
        for name, slot in made.slots("gate_up_proj").items():
            slot.put(tensors[name.removeprefix(".")][slot.source])
        made.finalize()
        return made

    normed = norm(x, None)[0]
    expected = activate(linear()(normed) + adapter(normed))
    adapted = linear(addend=addend, activation=activate)
    torch.testing.assert_close(adapted(x), expected)
    addend.wanted = False
    torch.testing.assert_close(adapted(x), activate(linear()(normed)))
