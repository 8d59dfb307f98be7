"""What a GPU alone does, on stand-ins: our linears for few tokens, fp8 products, experts, graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.attention.torch_whole import TorchWhole
from headrace.distributed.mesh import Group, Mesh
from headrace.graph_sizes import GraphSettings
from headrace.kernels.fp8 import NarrowWeight
from headrace.kernels.gemm import skinny_linear_reference
from headrace.kernels.gemm_config import BUCKETS, GemmConfig
from headrace.kernels.moe import Experts, SwigluClamp
from headrace.kernels.table import REFERENCE_KERNELS, KernelTable
from headrace.kernels.tiled import TiledWeight, tile
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.model_config import ModelConfig
from headrace.models import filling, loader
from headrace.models.served import attention_specs, describe
from headrace.quantization import gpu_linear
from headrace.quantization.fp8 import RoundingProduct
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import GemmTable
from headrace.quantization.unquantized import PlainProduct
from headrace.runner.cuda_graph import Shape, StepGraphs
from headrace.runner.kernel_checks import Subject, kernel_checks
from headrace.runner.kv_cache import cache_shape
from headrace.runner.layer_checks import layer_checks
from headrace.runner.self_check import SelfCheck, with_switches
from headrace.runner.step_checks import scratch_limits, step_checks, without_graphs
from tests.kernels import coded_weights
from tests.runner.fakes import KERNELS, AttentionInGraphs, RecordedGraph, RecordingDevice
from tests.runner.harness import LLAMA

CPU = torch.device("cpu")
NO_FOLDER = Path()
MOE = {
    **LLAMA,
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
CONFIGS = tuple(GemmConfig(bucket, 1, 1, 1) for bucket in BUCKETS)


@pytest.fixture(autouse=True)
def weights_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "DUMMY_RANGE", 0.3)


def subject(
    config: dict[str, Any] = LLAMA,
    quantization: str | None = None,
    kernels: KernelTable = REFERENCE_KERNELS,
    attention: Any = AttentionInGraphs,
) -> Subject:
    """A model of random weights, which keeps them as on a GPU."""
    model_config = ModelConfig.from_dict(config)
    specs = attention_specs(model_config, tp_size=1, block_size=4, dtype="float32", device_type="cpu")
    backend, table = attention(), with_switches(kernels)
    context = LayerContext(Mesh(), table, backend, specs, torch.float32, CPU)
    model = loader.load_model(NO_FOLDER, model_config, context, "dummy", 0, quantization)
    shape = cache_shape(describe(model_config), specs, 1, 4, torch.float32)
    return Subject(model, backend, table, shape, model_config.vocab_size, torch.float32, CPU)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears keep their weights, fp8 is held as fp8, and each size has a kernel of ours for few tokens."""
    finalize, prepare, prepare_plain = Linear.finalize, RoundingProduct.prepare, PlainProduct.prepare

    def keeping(self: Linear) -> None:
        weights = self.weights
        finalize(self)
        self.weights = weights or {"weight": self.tied_to[0].weight.data}  # type: ignore[attr-defined]

    def tables(specs: Any, itemsize: int) -> dict[gpu_linear.Size, GemmTable]:
        return {(itemsize, spec.out_features, spec.in_features): gpu_linear.table_of(CONFIGS) for spec in specs}

    def planned(self: PlainProduct, specs: Any, device: torch.device, kernels: Any = None) -> None:
        prepare_plain(self, specs, device, kernels)
        self.tables = tables(specs, 4)

    def planned_fp8(self: RoundingProduct, specs: Any, device: torch.device, kernels: Any = None) -> None:
        prepare(self, specs, device, kernels)
        self.emulates = False
        sizes = {gpu_linear.size_of(spec, self.planned_rounding(spec)) for spec in specs}
        self.tables = {size: gpu_linear.table_of(CONFIGS) for size in sizes}

    monkeypatch.setattr(Linear, "finalize", keeping)
    monkeypatch.setattr(PlainProduct, "prepare", planned)
    monkeypatch.setattr(RoundingProduct, "prepare", planned_fp8)
    monkeypatch.setattr(gpu_linear, "skinny_linear", skinny_linear_reference)


def run(subject: Subject) -> SelfCheck:
    check = SelfCheck(Group(), CPU)
    check.run(kernel_checks(subject))
    check.run(layer_checks(subject))
    return check


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("quantization", [None, "fp8", "ptpc_fp8"])
def test_linears_that_agree_stay(quantization: str | None) -> None:
    checked = run(subject(quantization=quantization))
    assert checked.demoted == []
    assert checked._count > len(BUCKETS) * 4


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_one_kernel_of_one_size_goes_to_the_library(quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def skinny(x: Tensor, weight: Tensor, bias: Any, config: GemmConfig, *rest: Any, **options: Any) -> Tensor:
        out = skinny_linear_reference(x, weight, bias, config, *rest, **options)
        return out.mul_(1.03) if config.block_m == 32 and weight.shape == (96, 32) else out

    monkeypatch.setattr(gpu_linear, "skinny_linear", skinny)
    found = subject(quantization=quantization)
    checked = run(found)
    assert checked.demoted == ["linear_96x32_up_to_32_tokens"]
    assert "is replaced by the vendor's library" in checked.notes[1]
    layer = next(layer for layer in found.layers(Linear) if layer.spec.out_features == 96)
    table = layer.scheme.product.table(layer.spec)
    assert table is not None
    assert [tokens for tokens, config in enumerate(table) if config is None] == [0, *range(17, 33)]
    assert run(found).demoted == []


@pytest.mark.usefixtures("on_gpu")
def test_ranks_that_measured_differently_run_the_same_checks() -> None:
    """Each ends in a collective: one more on one rank would leave the others waiting."""
    names = []
    for config in (CONFIGS[0], None):
        found = subject()
        layer = next(layer for layer in found.model.modules() if isinstance(layer, Linear))
        for table in layer.scheme.product.tables.values():  # type: ignore[attr-defined]
            table[1] = config
        names.append([check.name for check in layer_checks(found)])
        run(found)
    assert names[0] == names[1]


@pytest.mark.usefixtures("on_gpu")
def test_a_wrong_product_in_fp8_is_demoted() -> None:
    wrong = replace(REFERENCE_KERNELS, fp8_linear=lambda *a: REFERENCE_KERNELS.fp8_linear(*a) * 1.05)
    found = subject(quantization="fp8", kernels=wrong)
    assert run(found).demoted == ["fp8_linear"]
    assert run(found).demoted == []


@pytest.mark.usefixtures("on_gpu")
def test_fp8_that_harms_activations_goes_to_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    by_table = gpu_linear.by_table

    def coarse(weight: Any, *arguments: Any) -> Any:
        compute = by_table(weight, *arguments)
        of_size = weight.shape == (96, 32) and isinstance(weight, NarrowWeight)

        def harmed(x: Any, residual: Any) -> Any:  # a token alone is not rounded
            wrong = of_size and isinstance(x, Tensor) and len(x) > 1
            return compute(x * 1.5, residual) * 1.2 if wrong else compute(x, residual)

        return harmed

    monkeypatch.setattr(gpu_linear, "by_table", coarse)
    found = subject(quantization="fp8")
    checked = run(found)
    assert set(checked.demoted) == {"fp8_linear_96x32"}
    assert run(found).demoted == []


STATIC = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}


def of_8_bits(kind: str) -> dict[str, Any]:
    """What config.json says of a checkpoint whose weights and activations have 8 bits."""
    if kind == "fp8 blocks":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    number = STATIC | {"type": "float" if "fp8" in kind else "int"}
    dynamic = {} if "static" in kind else {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": number, "input_activations": number | dynamic}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if "fp8" in kind else "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["fp8 static", "fp8 blocks", "int8", "int8 static"])
def test_checkpoints_of_8_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Static scales may be far from what made-up numbers need; a wrong kernel is found nonetheless."""
    config = {**LLAMA, "quantization_config": of_8_bits(kind)}
    assert run(subject(config)).demoted == []

    def skinny(x: Any, weight: Any, bias: Any, config: GemmConfig, *rest: Any, **options: Any) -> Any:
        out = skinny_linear_reference(x, weight, bias, config, *rest, **options)
        lies = config.block_m == 32 and isinstance(weight, NarrowWeight) and weight.shape == (96, 32)
        return out.mul_(1.03) if lies else out

    monkeypatch.setattr(gpu_linear, "skinny_linear", skinny)
    assert run(subject(config)).demoted == ["linear_96x32_up_to_32_tokens"]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}


@pytest.fixture
def packed(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights stay packed, and have kernels of ours for few tokens."""
    prepare = PackedProduct.prepare

    def prepared(self: PackedProduct, *arguments: Any) -> None:
        prepare(self, *arguments)
        self.widens = False

    monkeypatch.setattr(PackedProduct, "prepare", prepared)
    monkeypatch.setattr(gpu_linear, "plan_tiled", lambda *_: gpu_linear.table_of(CONFIGS))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("wrong", ["nothing", "ours", "widened"])
def test_packed_linears(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def skinny(x: Any, weight: Any, bias: Any, config: GemmConfig, *rest: Any, **options: Any) -> Any:
        out = skinny_linear_reference(x, weight, bias, config, *rest, **options)
        lies = wrong == "ours" and config.block_m == 32 and isinstance(weight, TiledWeight)
        return out.mul_(1.03) if lies and weight.out_features == 96 else out

    def widened(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
        return REFERENCE_KERNELS.widen_tiled(weight, dtype) * (1.01 if wrong == "widened" else 1.0)

    monkeypatch.setattr(gpu_linear, "skinny_linear", skinny)
    found = subject({**LLAMA, "quantization_config": AWQ}, kernels=replace(REFERENCE_KERNELS, widen_tiled=widened))
    assert all("codes" in layer.weights for layer in found.layers(Linear) if layer.spec.out_features == 96)
    demoted = {"nothing": [], "ours": ["linear_96x32_up_to_32_tokens"], "widened": ["widen_tiled"]}
    assert run(found).demoted == demoted[wrong]
    assert run(found).demoted == []


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_experts(factor: float) -> None:
    def fused(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, ids = REFERENCE_KERNELS.fused_moe(*arguments)
        return out * factor, ids

    checked = run(subject(MOE, kernels=replace(REFERENCE_KERNELS, fused_moe=fused)))
    assert checked.demoted == ([] if factor == 1.0 else ["fused_moe"])


@pytest.mark.parametrize("kind", ["mxfp4", "int4 zeros"])
@pytest.mark.parametrize("fault", [None, "scale", "bias"])
def test_experts_with_coded_weights_biases_and_a_clamp(kind: str, fault: str | None) -> None:
    """A kernel that takes one group's scale, or one bias, for another is found."""

    def fused(x: Tensor, experts: Experts, *rest: Any) -> tuple[Tensor, Tensor]:
        if fault == "scale" and isinstance(experts.w13, TiledWeight):
            held = {"words": experts.w13.words, "factors": experts.w13.factors}
            shifted: Any = {name: one.roll(1, -1) for name, one in held.items() if one is not None}
            experts = replace(experts, w13=replace(experts.w13, **shifted))
        elif fault == "bias" and experts.w2_bias is not None:
            experts = replace(experts, w2_bias=experts.w2_bias.roll(1, 1))
        return REFERENCE_KERNELS.fused_moe(x, experts, *rest)

    found = subject(MOE, kernels=replace(REFERENCE_KERNELS, fused_moe=fused))
    for layer in found.layers(SparseMoE):
        weights = {}
        for name, inputs in (("w13", 32), ("w2", 16)):
            held = coded_weights.random_coded(6, 32, inputs, **coded_weights.KINDS[kind])
            if kind == "mxfp4":  # scales that differ, as they hardly do among random ones
                held = replace(held, scales=torch.randint_like(held.scales, 120, 126))
            weights[name] = tile(held, torch.bfloat16, gated=name == "w13")
        biases = {"w13_bias": torch.randn(6, 32), "w2_bias": torch.randn(6, 32)}
        layer.experts = replace(layer.experts, clamp=SwigluClamp(1.7, 2.0), **weights, **biases)
    assert run(found).demoted == ([] if fault is None else ["fused_moe"])


def other_experts(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, ids = REFERENCE_KERNELS.fused_moe(*arguments)
    return out, (ids + 1) % 6


def test_other_experts() -> None:
    assert run(subject(MOE, kernels=replace(REFERENCE_KERNELS, fused_moe=other_experts))).demoted == ["fused_moe"]


def settings_of(mode: str, found: Subject) -> GraphSettings | None:
    limits = scratch_limits(found.vocab_size)
    sizes = (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
    return GraphSettings.of({"cudagraph_mode": mode}, *sizes)


def test_an_encoder_computes_texts_whole_so_no_decode_is_checked_or_captured() -> None:
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 60, "max_position_embeddings": 40,
    }  # fmt: skip
    found, refused = subject(config, kernels=KERNELS, attention=TorchWhole), {"decode"}
    check = SelfCheck(Group(), CPU)
    assert not found.decodes
    check.run(step_checks(found, settings_of("FULL_AND_PIECEWISE", found), refused, device=RecordingDevice))
    assert check.notes[0].startswith("Self-check: 2 checks"), check.notes
    assert check.demoted == []


KINDS = {
    "PIECEWISE": ("piecewise", "piecewise", "none"),
    "FULL": ("full", "full", "none"),
    "FULL_DECODE_ONLY": ("full", "none", "none"),
    "FULL_AND_PIECEWISE": ("full", "piecewise", "full"),
}
"""of decodes, other steps, and prompts that run alone"""


def checked_graphs(mode: str, config: dict[str, Any] = LLAMA) -> tuple[SelfCheck, GraphSettings | None]:
    """(the check, what is left of `mode`)"""
    found, refused = subject(config, kernels=KERNELS), set[str]()
    check, settings = SelfCheck(Group(), CPU), settings_of(mode, found)
    check.run(step_checks(found, settings, refused, device=RecordingDevice))
    return check, without_graphs(settings, refused)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("wrong", ["neither", "decode", "other", "alone"])
def test_graphs(mode: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_graph, replays = StepGraphs.run, 0

    def disturbed(self: StepGraphs, shape: Shape, batch: Any) -> Tensor:
        nonlocal replays
        hidden = run_graph(self, shape, batch)
        replays += bool(self._captured)
        lies = self._captured and wrong == ("decode" if shape.decode else "alone" if shape.alone else "other")
        return hidden * 1.2 if lies else hidden

    monkeypatch.setattr(StepGraphs, "run", disturbed)
    check, left = checked_graphs(mode)
    kinds = dict(zip(("decode", "other", "alone"), KINDS[mode], strict=True))
    wanted = sum(kind != "none" for kind in kinds.values())
    if kinds["alone"] == "full" and wrong in ("decode", "other"):
        wanted -= 1  # lone prompts are whole where decodes are, beside pieces
        kinds["alone"] = "none"
    assert replays == 2 * wanted
    if wrong == "neither" or kinds[wrong] == "none":
        assert check.demoted == []
    else:
        assert check.demoted == [f"cuda_graph_{wrong}"]
        kinds[wrong] = "none"
    if left is None:
        assert set(kinds.values()) == {"none"}
    else:
        assert (left.decode, left.other) == (kinds["decode"], kinds["other"])
        assert bool(left.alone_sizes) == (kinds["alone"] == "full")


def test_graphs_of_recurrent_layers_begin_each_time_with_the_same_states() -> None:
    sizes = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": ["linear_attention"] * 2}
    config = {**LLAMA, **sizes, **heads, "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 16}
    check, left = checked_graphs("PIECEWISE", {**config, "num_hidden_layers": 2})
    assert check.demoted == []
    assert left is not None


def test_graphs_that_do_nothing_or_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedGraph, "replay", lambda _: None)
    check, left = checked_graphs("FULL")
    assert check.demoted == ["cuda_graph_decode", "cuda_graph_other"]
    assert left is None

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedGraph, "capture_begin", fails)
    check, left = checked_graphs("FULL")
    assert check.demoted == ["cuda_graph_decode", "cuda_graph_other"]
    assert "RuntimeError: operation not permitted" in check.notes[1]
    assert left is None
