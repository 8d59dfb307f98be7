"""Tiny models as the formats' own tools write them give, on one rank and on two, the tokens that transformers gives for
the weights that the tools widen (tests/quantization/fixtures/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driver import Driver
from safetensors.torch import load_file, save_file
from stored_fixtures import CASES, W8A8, about, unpack, write
from tiny_configs import save_tiny_model, shard
from torch import Tensor
from tp_rank import check_two, run, run_two

from headrace import LLM, SamplingParams
from headrace.errors import CheckpointError
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import Compute, FusedOps, HeldExperts, LinearSpec, Multiply, Weights
from headrace.quantization.unquantized import PlainProduct

each_model = pytest.mark.parametrize(("tool", "name"), CASES, ids=lambda one: one)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all models, each with what two ranks computed of it."""
    root = tmp_path_factory.mktemp("stored")
    for tool, name in CASES:
        write(tool, name, root / tool / name)
    for name in W8A8:
        (root / "w8a8" / name).mkdir(parents=True)
        unpack(name, root / "w8a8" / name)
    write_shared_expert_in_fp8(root / "shared")
    models = [root / tool / name for tool, name in (*CASES, *(("w8a8", name) for name in W8A8))]
    run_two(root / "rendezvous", [*models, root / "shared"])
    return root


def write_shared_expert_in_fp8(folder: Path) -> None:
    """As compressed-tensors has it, with a scale a token."""
    save_tiny_model("Qwen2MoeForCausalLM", "full", folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, folder / "model.safetensors")
    floats = {"type": "float", "num_bits": 8, "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**floats, "strategy": "channel"}}
    group["input_activations"] = {**floats, "strategy": "token", "dynamic": True}
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*gate$"]}
    config["quantization_config"] = {**stated, "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps(config))


@each_model
def test_tokens_are_those_of_the_widened_model(tool: str, name: str, tmp_path: Path) -> None:
    tokens = write(tool, name, tmp_path / "model")
    driver = Driver(tmp_path / "model")
    quantized = [one for _, one in driver.model.named_modules() if isinstance(one, Linear | SparseMoE)]
    packed = [one for one in quantized if isinstance(one.scheme.product, PackedProduct)]
    assert len(packed) >= 2, "all but the head"
    assert driver.greedy(about(tool)["prompts"], len(tokens[0])) == tokens


@pytest.mark.parametrize(("tool", "name"), [*CASES, *(("w8a8", name) for name in W8A8)], ids=lambda one: one)
def test_two_ranks_compute_what_one_does(two_ranks: Path, tool: str, name: str) -> None:
    """Also where activations are rounded: with the scales of whole tokens. Symmetric int8 puts a token's largest number
    half-way between two integers, and a last bit decides to which it goes."""
    check_two(two_ranks / tool / name, 0.05 if name in ("int8-dynamic", "int8-dynamic-experts") else 1e-5)


@each_model
def test_what_a_gpu_holds_computes_the_same(
    tool: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed form, whose values are not rounded to 16 bits; and where there is none, that is said."""
    write(tool, name, tmp_path / "model")
    expected = run(Driver(tmp_path / "model"))
    held: list[bool] = []

    def plain(self: PackedProduct, spec: LinearSpec, weights: Weights, experts: int = 0) -> Weights:
        held.append(self._tile(spec, weights, False, experts) is not None)
        return self.widened(spec, weights)

    def of_experts(self: PackedProduct, spec: LinearSpec, weights: Weights) -> HeldExperts:
        return HeldExperts(plain(self, spec, weights, len(next(iter(weights.values()))))["weight"])

    def finalize(self: PackedProduct, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        return self.plain.finalize(spec, plain(self, spec, weights), fused)

    monkeypatch.setattr(PackedProduct, "finalize", finalize)
    monkeypatch.setattr(PackedProduct, "experts", of_experts)
    driver = Driver(tmp_path / "model")
    for step, logits in run(driver).items():
        assert (logits - expected[step]).norm() < 0.01 * logits.norm()
    notes = [note for note in driver.model.notes if "widened at load" in note]
    if name == "moe-orders-differ":
        assert held.count(False) == 3
        assert [note.partition(": ")[2] for note in notes] == [
            "its parts have their inputs in different orders",
            "each expert has its inputs in an order of its own",
        ]
    else:
        assert all(held)
        assert notes == []


def test_two_ranks_round_the_input_of_a_shared_expert_as_one_does(two_ranks: Path) -> None:
    check_two(two_ranks / "shared")


def damaged(tool: str, name: str, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    write(tool, name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


CT = ("compressed-tensors", "w4a16-dense")
NAN = r"\d+ of \d+ values are NaN"


@pytest.mark.parametrize(
    ("model", "tensor", "change", "said"),
    [
        (("auto-gptq", "4-bit-moe"), f"{Q}.qzeros", None, r"lacks model\.layers\.0\.self_attn\.q_proj\.qzeros"),
        (("autoawq", "dense"), f"{DOWN}.scales", None, r"lacks .*down_proj\.scales"),
        (("modelopt", "dense"), f"{DOWN}.weight_scale_2", None, r"lacks .*down_proj\.weight_scale_2"),
        (("autoawq", "dense"), f"{Q}.qweight", lambda one: one[:, :-1], r"shape \[64, 7\], .*\[64, 8\]"),
        (("auto-gptq", "3-bit-dense"), f"{Q}.qweight", lambda one: one[:-1], r"shape \[5, 64\], .*\[6, 64\]"),
        (CT, f"{Q}.weight_packed", torch.Tensor.long, "of type I64; accepted: I32"),
        (CT, f"{Q}.weight_shape", lambda one: one + 1, r"^tensor '.*q_proj\.weight_shape' in .*is \[65, 65\]"),
        (CT, f"{Q}.weight_scale", lambda one: one * torch.nan, rf"q_proj\.weight_scale' \({NAN}"),
        (("quark", "dense"), f"{Q}.weight_scale", lambda one: one.fill_(255), rf"q_proj\.weight_scale' \({NAN}"),
        (("modelopt", "dense"), f"{Q}.weight_scale", lambda one: one.view(torch.uint8).fill_(127).view(one.dtype), NAN),
        (("modelopt", "dense"), f"{Q}.weight_scale_2", lambda one: one * torch.inf, r"weight_scale_2' \(1 of 1"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    model: tuple[str, str], tensor: str, change: Callable[[Tensor], Tensor] | None, said: str, tmp_path: Path
) -> None:
    def apply(tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(tensor)
        if change is not None:
            tensors[tensor] = change(old).contiguous()

    folder = damaged(*model, tmp_path / "model", apply)
    with pytest.raises(CheckpointError, match=said) as raised:
        Driver(folder)
    assert "\n" not in str(raised.value)


def test_an_extra_scale_is_refused_by_name(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight_zero_point"] = torch.zeros(8, 2, dtype=torch.int32)

    folder = damaged("act-order", "moe-orders-differ", tmp_path / "model", add)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_zero_point', which this model does not have"):
        Driver(folder)


def test_groups_that_the_scales_are_not_of_are_refused_by_the_tensors_name(tmp_path: Path) -> None:
    write("autoawq", "dense", tmp_path / "model", group_size=24)
    with pytest.raises(CheckpointError, match=r"qzeros' .* has shape \[4, 8\], config.json asks for \[6, 8\]"):
        Driver(tmp_path / "model")


@pytest.mark.parametrize(
    ("tool", "name", "fields"),
    [
        ("autoawq", "moe", {"modules_to_not_convert": ["gate"]}),  # part of gate_proj, which some tools do not mean
        ("auto-gptq", "biases-and-head", {"lm_head": False}),
        ("compressed-tensors", "w4a16-dense", {"ignore": ["lm_head", "re:.*down_proj"]}),
    ],
)
def test_a_linear_that_the_files_hold_quantized_is_so_whatever_config_says(
    tool: str, name: str, fields: dict[str, object], tmp_path: Path
) -> None:
    tokens = write(tool, name, tmp_path / "model", **fields)
    assert Driver(tmp_path / "model").greedy(about(tool)["prompts"], len(tokens[0])) == tokens


def test_a_quantized_head_is_not_the_embedding_though_config_says_tied(tmp_path: Path) -> None:
    tokens = write("auto-gptq", "biases-and-head", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    assert Driver(tmp_path / "model").greedy(about("auto-gptq")["prompts"], len(tokens[0])) == tokens


def test_a_quantized_checkpoint_in_several_files(tmp_path: Path) -> None:
    tokens = write("quark", "moe", tmp_path / "model")
    shard(tmp_path / "model")
    assert Driver(tmp_path / "model").greedy(about("quark")["prompts"], len(tokens[0])) == tokens


@pytest.mark.parametrize(
    ("tool", "name"),
    [("autoawq", "moe"), ("auto-gptq", "3-bit-dense"), CT, ("modelopt", "moe"), ("quark", "dense")],
)
def test_dummy_weights_are_small_in_every_layout(
    tool: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tool, name, tmp_path / "model")
    wide: list[Tensor] = []
    hold = PlainProduct.multiply

    def multiply(self: PlainProduct, spec: LinearSpec, weights: Weights) -> Multiply:
        wide.append(weights["weight"])
        return hold(self, spec, weights)

    monkeypatch.setattr(PlainProduct, "multiply", multiply)
    driver = Driver(tmp_path / "model", load_format="dummy")
    assert len(wide) > 2
    for weight in wide:
        assert 1e-4 < weight.std() < 2e-3
        assert weight.abs().max() < 5e-3
    assert driver.logits([5, 9, 13]).isfinite().all()


def test_a_tied_head_has_the_embeddings_weights_in_any_format(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 90,
    }
    linears = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    config = {
        "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "max_position_embeddings": 64, **sizes,
        "tie_word_embeddings": True, "torch_dtype": "float32", "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
            "config_groups": {"group_0": {"targets": ["Linear"], **linears}},
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu") as llm:
        model = llm._core._executor._worker.model  # type: ignore[union-attr, attr-defined]
        assert model.lm_head.scheme.format.name == "bf16"
        assert model.model.layers[0].mlp.down_proj.scheme.format.name == "int4"
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
