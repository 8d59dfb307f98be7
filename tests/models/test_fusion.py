"""What a recorded run finds out about neighbours, and that a model computes the same whether it is used or not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import Driver, make_context
from tiny_configs import VARIANTS, save_tiny_model
from torch import Tensor

from headrace.kernels.norm import Unsummed
from headrace.layers.layer import Layer
from headrace.layers.linear import ColumnParallelLinear, RowParallelLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.models import loader
from headrace.models.fusion import fuse, record

PROMPTS = [[5], [17, 3, 99], list(range(20, 55))]


class Block(Layer):
    """Attention-like and feed-forward-like branches over one norm, as in families with parallel branches."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        group, dtype = context.mesh.tp, context.dtype
        self.norm = RMSNorm(8, 1e-5, context.kernels, dtype)
        self.left, self.right = (ColumnParallelLinear(8, 8, group, dtype, False) for _ in range(2))
        self.down = RowParallelLinear(8, 8, group, dtype, False)
        self.last = RMSNorm(8, 1e-5, context.kernels, dtype)

    def forward(self, input_ids: Tensor, *unused: Any) -> Tensor:
        hidden, residual = self.norm(torch.ones(1, 8))
        hidden = self.down(self.left(hidden) + self.right(hidden))
        return self.last(hidden, residual)[0]


class Joining(Block):
    """Its branches are joined by torch itself, and what comes of them goes through a norm before it is added."""

    def forward(self, input_ids: Tensor, *unused: Any) -> Tensor:
        hidden, residual = self.norm(torch.ones(1, 8))
        hidden = torch.stack((self.left(hidden), hidden)).mean(0)
        hidden, _ = self.norm(self.down(hidden))
        return self.last(hidden, residual)[0]


class Branching(Block):
    """Its forward looks into a value, which only a tensor allows."""

    def forward(self, input_ids: Tensor, *unused: Any) -> Tensor:
        hidden, residual = self.norm(torch.ones(1, 8))
        return self.last(hidden if hidden.sum() > 0 else -hidden, residual)[0]


@pytest.fixture
def context(tmp_path: Path) -> Any:
    save_tiny_model("LlamaForCausalLM", "gqa", tmp_path)
    return make_context(Driver(tmp_path).config)


def test_all_norms_but_the_last_run_in_the_linear_behind_them(tmp_path: Path) -> None:
    save_tiny_model("LlamaForCausalLM", "gqa", tmp_path)
    model = Driver(tmp_path).model
    assert [norm.deferred for norm in norms_in_order(model)] == [True] * 4 + [False]
    assert model.notes[-1].startswith("Fused: 4 of 5 norms")
    assert "4 sums" in model.notes[-1]
    for layer in model.model.layers:
        for linear, norm in (
            (layer.self_attn.qkv_proj, layer.input_layernorm),
            (layer.mlp.gate_up_proj, layer.post_attention_layernorm),
        ):
            assert linear.fused.norm_weight.data_ptr() == norm.weight.data_ptr()


def norms_in_order(model: Any) -> list[RMSNorm]:
    pairs = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in model.model.layers]
    return [*(norm for pair in pairs for norm in pair), model.model.norm]


def test_each_of_two_linears_norms_what_it_reads(context: Any) -> None:
    """Neither makes a sum that is not made yet, which the other reads too."""
    block = Block(context)
    first, last = record(block, 1, torch.device("cpu"))
    assert (first.readers(), first.source()) == ([block.left, block.right], None)
    assert last.source() is block.down
    assert "forward" not in block.left.__dict__, "stand-ins are gone"
    fuse(block, 1, torch.device("cpu"))
    assert (block.norm.deferred, block.norm.half_is_left, block.norm.sum_is_left) == (True, True, False)
    assert all(one.fused.norm_weight is not None for one in (block.left, block.right))
    block.norm.create_weights(torch.device("cpu"))
    residual, left = torch.ones(3, 8), SimpleNamespace(added_to=lambda x, residual: Unsummed(residual, x))
    total, kept = block.norm(Pending(left, torch.full((3, 8), 2.0)), residual)
    assert total is kept is residual
    assert (residual == 3).all()


def test_a_norm_after_a_layer_computes_it_whole_and_is_read_by_no_linear(context: Any) -> None:
    """It adds what it computes to the residual itself, unless it is used in another place too."""
    block = Joining(context)
    first, after, last = record(block, 1, torch.device("cpu"))
    assert first.out.readers[0] is not None
    assert (first.readers(), after.readers(), after.source(), last.source()) == ([], [], None, block.norm)
    fuse(block, 1, torch.device("cpu"))
    assert not block.norm.pending


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo2ForCausalLM"])
def test_norms_behind_a_layer_add_to_the_residual(architecture: str, tmp_path: Path) -> None:
    """Where a norm reads the sum it makes it too: in one pass."""
    save_tiny_model(architecture, next(iter(VARIANTS[architecture])), tmp_path)
    model, between = Driver(tmp_path).model, architecture.startswith("Gemma")
    behind = [norm for norm in model.modules() if isinstance(norm, RMSNorm) and norm.pending]
    assert len(behind) == 2 * len(model.model.layers)
    assert [norm.next_makes_sum for norm in behind] == [between] * (len(behind) - 1) + [True]


@pytest.mark.parametrize("variant", [("LlamaForCausalLM", "biases"), ("Qwen2MoeForCausalLM", None)])
def test_a_family_that_cannot_be_recorded_serves_unfused_with_the_same_tokens(
    variant: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, name = variant
    save_tiny_model(architecture, name or next(iter(VARIANTS[architecture])), tmp_path)
    fused = Driver(tmp_path)
    tokens = fused.greedy(PROMPTS, 16)
    monkeypatch.setattr(loader, "fuse", lambda *_: "not fused")
    plain = Driver(tmp_path)
    assert not any(norm.deferred for norm in norms_in_order(plain.model))
    assert plain.greedy(PROMPTS, 16) == tokens


def test_what_cannot_be_recorded_is_said_in_one_line(context: Any) -> None:
    block = Branching(context)
    said = fuse(block, 1, torch.device("cpu"))
    assert said.startswith("No norm is fused: a run of Branching cannot be recorded (")
    assert "\n" not in said
    assert not block.norm.deferred
    assert "forward" not in block.norm.__dict__, "stand-ins are gone"


def test_several_ranks_leave_the_sum_to_the_linear_behind(context: Any) -> None:
    """After the reduction over ranks the sum is made in the pass of the next norm, as on one rank."""
    layer, norm = (
        RowParallelLinear(8, 8, context.mesh.tp, context.dtype, False),
        RMSNorm(8, 1e-5, context.kernels, context.dtype),
    )
    layer.alone = False
    layer.compute = lambda x, residual: x * 2
    residual, x = torch.ones(3, 8), torch.full((3, 8), 2.0)
    assert layer.added_to(x, residual) is residual
    assert (residual == 5).all()
    norm.create_weights(torch.device("cpu"))
    layer.fuse_next_norm(norm)
    left = layer.added_to(x, residual)
    assert isinstance(left, Unsummed)
    assert left.x is residual
    assert (left.delta == 4).all()
